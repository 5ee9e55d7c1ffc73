"""Every rank's rows to the next, in parcels."""

import numpy as np

from dataio.exchange.transfer import Transfer
from dataio.rows.fields import row_schema
from dataio.rows.parcel import Parcel
from tests.memory_source import FIELDS, payload

ROWS, PARCELS = 60, 12


FIELD_SCHEMA = row_schema(FIELDS)


DRIVERS = {"thread": [True, True, True], "polling": [False] * 3, "mixed": [True, False, True]}


def parcels(peer, *, steps=PARCELS, tag=0):
    """All rows, in as many parcels, one a step."""
    parts = np.array_split(np.arange(ROWS), PARCELS)
    return [Parcel(part, peer, tag + n, n * steps // PARCELS) for n, part in enumerate(parts)]


def ring(world, store, **kwargs):
    """Every rank's rows to the next."""
    after, before = (world.rank + 1) % world.world_size, (world.rank - 1) % world.world_size
    return Transfer(world, store, sends=parcels(after), receives=parcels(before), **kwargs)


def row_bytes(sample_id):
    return (sample_id % 10).to_bytes(8, "little") + payload(sample_id)
