"""One replica's epoch as a list of parcels: which rows, to and from whom, before which step."""

from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from dataio.base.errors import ExchangeError
from dataio.plan.layout import Layout
from dataio.world import CHANNEL_TAGS
from shuffle.plan import chunk_bounds, chunk_step, parcel_bounds
from shuffle.ring import make_ring


@dataclass(frozen=True)
class Leg:
    """One message of the plan.

    Attributes:
        start: First of its rows, counted in the replica's leaving rows.
        stop: One past the last.
        chunk: The chunk that it is a part of.
        dest: Replica that it goes to.
        source: Replica whose parcel of the same number comes in.
        step: Step of the epoch before which it is sent.
        tag: The same at sender and receiver.
    """

    start: int
    stop: int
    chunk: int
    dest: int
    source: int
    step: int
    tag: int


def plan_legs(
    layout: Layout,
    *,
    replica: int,
    num_leaving: int,
    seed: int,
    epoch: int,
    steps: range,
    mean_row_bytes: int,
    first_tag: int,
) -> list[Leg]:
    """Plan a replica's parcels of an epoch, in the order in which they are sent.

    Args:
        layout: Replicas on more than one node.
        replica: Whose plan.
        num_leaving: Rows that leave, >= 1.
        seed: The run's seed.
        epoch: The running epoch.
        steps: Its steps that remain.
        mean_row_bytes: The same on all ranks.
        first_tag: Parcels are tagged from here on.

    Raises:
        ExchangeError: If a channel has not enough tags.
    """
    bounds = chunk_bounds(num_leaving)
    chunks = len(bounds) - 1
    ring = make_ring(layout, seed=seed, epoch=epoch)
    shifts = ring.shifts(chunks)
    dests = ring.destinations(np.full(chunks, replica), shifts)
    sources = ring.destinations(np.full(chunks, replica), -shifts)
    cuts = [
        start + parcel_bounds(stop - start, mean_row_bytes=mean_row_bytes)
        for start, stop in pairwise(bounds.tolist())
    ]
    num_parcels = sum(len(cut) - 1 for cut in cuts)
    if num_parcels > CHANNEL_TAGS:
        raise ExchangeError(
            f"replica {replica}: {num_leaving} leaving rows of {mean_row_bytes} bytes make "
            f"{num_parcels} parcels an epoch, expected at most {CHANNEL_TAGS}; lower the exchange "
            f"fraction or start more ranks"
        )
    legs: list[Leg] = []
    for chunk, cut in enumerate(cuts):
        step = chunk_step(chunk, chunks, steps)
        for start, stop in pairwise(cut.tolist()):
            dest, source = int(dests[chunk]), int(sources[chunk])
            tag = first_tag + len(legs)
            legs.append(Leg(start, stop, chunk, dest, source, step, tag))
    return legs
