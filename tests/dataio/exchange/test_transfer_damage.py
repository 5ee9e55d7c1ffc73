"""Rows that are damaged, before or on their way: fetched, named, and never kept."""

import numpy as np
import pytest

from dataio.base.errors import CorruptRowError, ExchangeError
from dataio.exchange.transfer import Transfer
from dataio.rows.parcel import Parcel, ParcelBuffers
from dataio.rows.rows import Rows
from dataio.world import run_threads, thread_worlds
from tests.dataio.exchange.rings import FIELD_SCHEMA, ROWS, parcels, ring, row_bytes
from tests.memory_source import FIELDS, MemorySource
from tests.row_store import MemoryStore


class Damaged(MemoryStore):
    """A store that gives out a row of a field that does not match its checksum."""

    def __init__(self, world, slot, column):
        super().__init__(ROWS * world.rank, ROWS)
        self.damaged = slot, column

    def read_into(self, slots, into):
        super().read_into(slots, into)
        slot, column = self.damaged
        if slot in slots:
            row = slots.tolist().index(slot)
            if column == "fixed":
                into.fixed[0][row] ^= 1
            else:
                into.variable[0][into.lengths[:row].sum()] ^= 1


@pytest.mark.parametrize("column", ["fixed", "variable"])
@pytest.mark.parametrize("threaded", [True, False])
def test_a_damaged_row_is_fetched_by_its_receiver(threaded, column, caplog):
    def run(world):
        store, source, fetched = Damaged(world, 8, column), MemorySource(2 * ROWS), []

        def fetch(sample_ids):
            fetched.extend(sample_ids.tolist())
            return source.read(sample_ids, FIELDS)

        ring(world, store, threaded=threaded, fetch=fetch).finish(None)
        return store.arrived, fetched

    for rank, (arrived, fetched) in enumerate(run_threads(thread_worlds([1, 1]), run)):
        first = ROWS * (1 - rank)
        assert arrived == {slot: (first + slot, row_bytes(first + slot)) for slot in range(ROWS)}
        assert fetched == [first + 8]
    assert "rows of samples [8] from rank 0 do not match" in caplog.text


def refuse(sample_ids):
    raise CorruptRowError("the source is gone")


def other_bytes(sample_ids):
    (rows,) = MemorySource(ROWS).read(sample_ids + 1, FIELDS)
    yield Rows(FIELD_SCHEMA, sample_ids, rows.checksum, rows.fixed, rows.lengths, rows.variable)


@pytest.mark.parametrize(
    ("fetch", "why"),
    [
        (None, ""),
        (lambda sample_ids: iter(()), ""),
        (other_bytes, ""),
        (refuse, r" \(the source is gone\)"),
    ],
)
def test_a_damaged_row_that_no_source_has_is_not_kept(fetch, why):
    arrived = {}

    def run(world):
        store = Damaged(world, 7 if world.rank == 0 else -1, "fixed")
        arrived[world.rank] = store.arrived
        ring(world, store, fetch=fetch).finish(None)

    message = rf"\[rank 1\] 1 rows from rank 0.*first is sample 7,.*{why}; .*tonari cache verify"
    with pytest.raises(ExchangeError, match=message):
        run_threads(thread_worlds([1, 1]), run)
    assert 7 not in arrived[1]


def test_a_row_that_is_damaged_on_its_way_is_not_kept():
    def run(world):
        send = world.isend

        def damaged(data, *, dest, tag):
            if world.rank == 0 and len(data) > 8 * ROWS:
                data[-1] ^= 1
            return send(data, dest=dest, tag=tag)

        world.isend = damaged
        store = MemoryStore(7 * ROWS * world.rank, ROWS)
        everything = [Parcel(np.arange(ROWS), 1 - world.rank, 0, 0)]
        Transfer(world, store, sends=everything, receives=everything).finish(None)

    with pytest.raises(ExchangeError, match=r"\[rank 1\].*from rank 0 do not.*memory or network"):
        run_threads(thread_worlds([1, 1]), run)


@pytest.mark.parametrize("length", [1 << 62, 1 << 35, -1])
def test_damaged_lengths_are_an_error_that_names_the_message(length):
    def run(world):
        send = world.isend

        def damaged(data, *, dest, tag):
            if world.rank == 0 and len(data) == 8 * ROWS:
                data.view(np.int64)[:3] = length
            return send(data, dest=dest, tag=tag)

        world.isend = damaged
        store = MemoryStore(7 * ROWS * world.rank, ROWS)
        everything = [Parcel(np.arange(ROWS), 1 - world.rank, 0, 0)]
        Transfer(world, store, sends=everything, receives=everything).finish(None)

    with pytest.raises(ExchangeError, match=r"lengths of 60 rows: found .*message is damaged"):
        run_threads(thread_worlds([1, 1]), run)


class FullMemory(ParcelBuffers):
    def take(self, num_bytes):
        raise MemoryError


def test_lengths_that_no_memory_holds_are_an_error_that_names_the_sender():
    def run(world):
        store = MemoryStore(0, ROWS)
        if world.rank == 0:
            Transfer(world, store, sends=parcels(1), receives=[]).finish(None)
        else:
            Transfer(
                world, store, sends=[], receives=parcels(0), buffers=FullMemory()
            ).finish(None)  # fmt: skip

    with pytest.raises(ExchangeError, match=r"rank 0 announces 5 rows of \d+ bytes"):
        run_threads(thread_worlds([1, 1]), run)
