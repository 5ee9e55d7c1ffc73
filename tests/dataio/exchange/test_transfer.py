"""Parcels by either driver: the same rows, bounded memory, and partners that fail are named."""

import contextlib
import gc
import threading
import weakref
from types import SimpleNamespace

import numpy as np
import pytest

from dataio.base.errors import ExchangeError, StallError, WorldError
from dataio.exchange.carrier import MAX_IN_FLIGHT, SEGMENTS_OUT
from dataio.exchange.transfer import Transfer
from dataio.plan.layout import Layout
from dataio.plan.policies import AtHand, ExchangeContext
from dataio.rows.parcel import ParcelBuffers
from dataio.world import run_threads, thread_worlds
from shuffle import Partial
from tests.dataio.exchange.rings import (
    DRIVERS,
    PARCELS,
    ROWS,
    parcels,
    ring,
    row_bytes,
)
from tests.row_store import MemoryStore


@pytest.mark.parametrize("driver", DRIVERS)
def test_every_row_that_leaves_arrives_once_by_any_driver(driver):
    def run(world):
        store = MemoryStore(ROWS * world.rank, ROWS)
        transfer = ring(world, store, threaded=DRIVERS[driver][world.rank])
        for step in range(PARCELS):
            transfer.progress(step)
        scores = np.zeros(ROWS, [("loss", "<f4")])
        scores["loss"] = world.rank
        return store.arrived, scores["loss"].tolist(), transfer.finish(scores), scores

    for rank, (arrived, _, figures, scores) in enumerate(run_threads(thread_worlds([1] * 3), run)):
        before = (rank - 1) % 3
        expected = range(ROWS * before, ROWS * before + ROWS)
        assert arrived == {slot: (i, row_bytes(i)) for slot, i in enumerate(expected)}
        assert scores["loss"].tolist() == [before] * ROWS
        assert figures["rows"] == ROWS
        assert figures["messages"] == 2 * PARCELS + 1
        assert 0 <= figures["overlap_fraction"] <= 1
        assert figures["cpu_s"] > 0


def test_polling_carries_rows_before_the_end():
    def run(world):
        transfer = ring(world, MemoryStore(ROWS * world.rank, ROWS), threaded=False)
        for step in range(2 * PARCELS):
            transfer.progress(step)
            world.barrier(doing="step")
        return transfer.finish(None)["overlap_fraction"]

    assert run_threads(thread_worlds([1, 1]), run) == [1.0, 1.0]


def test_a_thread_carries_rows_while_its_caller_does_something_else(monkeypatch):
    def run(world):
        store = MemoryStore(ROWS * world.rank, ROWS)
        everything = threading.Event()
        write = store.write_arrivals

        def written(slots, rows):
            write(slots, rows)
            if len(store.arrived) == ROWS:
                everything.set()

        monkeypatch.setattr(store, "write_arrivals", written)
        transfer = ring(world, store, threaded=True)
        transfer.progress(PARCELS)
        assert everything.wait(20), "one call, and all arrives"
        return transfer.finish(None)["rows"]

    assert run_threads(thread_worlds([1, 1]), run) == [ROWS, ROWS]


def call_for_ever(transfer):
    call_for_ever_at(transfer, 0)


def call_for_ever_at(transfer, step):
    while True:
        transfer.progress(step)


@pytest.mark.parametrize("threaded", [True, False])
def test_a_partner_that_falls_silent_is_named_in_the_middle_of_the_epoch(threaded):
    worlds = thread_worlds([1, 1], timeout_s=0.2)
    transfer = ring(worlds[0], MemoryStore(0, ROWS), threaded=threaded)
    with pytest.raises(StallError, match=r"rank 0: waited .* s for rank 1 while exchanging rows"):
        call_for_ever(transfer)
    transfer.stop()


@pytest.mark.parametrize("threaded", [True, False])
def test_a_partner_that_dies_is_named_at_once(threaded):
    worlds = thread_worlds([1, 1], timeout_s=300)
    transfer = ring(worlds[0], MemoryStore(0, ROWS), threaded=threaded)
    transfer.progress(0)
    with contextlib.suppress(WorldError):
        worlds[1].abort("the disk is on fire")
    with pytest.raises(ExchangeError, match=r"\[rank 0\] exchange with rank 1 failed:.*on fire"):
        transfer.finish(None)


def test_a_pause_of_the_caller_is_no_silence_of_its_partner(monkeypatch):
    now = 0.0
    monkeypatch.setattr("dataio.exchange.carrier.time", SimpleNamespace(monotonic=lambda: now))
    world = thread_worlds([1, 1], timeout_s=5)[0]
    transfer = ring(world, MemoryStore(0, ROWS), threaded=False)
    transfer.progress(0)
    for _ in range(5):
        now += 1000.0
        transfer.progress(0)
    now += 1000.0
    with pytest.raises(StallError, match="waited 5 s for rank 1 while exchanging rows"):
        transfer.progress(0)


def test_a_pause_of_the_caller_is_no_silence_to_its_thread_either(monkeypatch):
    now, looked = [0.0], threading.Semaphore(0)

    def monotonic():
        looked.release()
        return now[0]

    monkeypatch.setattr("dataio.exchange.carrier.time", SimpleNamespace(monotonic=monotonic))
    world = thread_worlds([1, 1], timeout_s=5)[0]
    transfer = ring(world, MemoryStore(0, ROWS), threaded=True)
    transfer.progress(0)
    # Each of the thread's looks finds a thousand seconds gone in which nobody called.
    for _ in range(20):
        now[0] += 1000.0
        assert looked.acquire(timeout=20)
    transfer.progress(0)
    transfer.stop()


def test_a_slow_receiver_bounds_the_senders_memory(monkeypatch):
    world, store, buffers = thread_worlds([1, 1])[0], MemoryStore(0, ROWS), ParcelBuffers()
    taken = threading.Event()
    monkeypatch.setattr(world, "isend", lambda *_, **__: SimpleNamespace(test=taken.is_set))
    transfer = Transfer(
        world, store, sends=parcels(1), receives=[], buffers=buffers, threaded=False
    )
    for _ in range(50):
        transfer.progress(PARCELS)
    assert store.read == MAX_IN_FLIGHT * ROWS // PARCELS
    assert buffers.num_allocated == MAX_IN_FLIGHT
    taken.set()
    transfer.finish(None)
    assert store.read == ROWS
    assert len(buffers._idle) == MAX_IN_FLIGHT


@pytest.mark.parametrize("driver", DRIVERS)
@pytest.mark.parametrize("segment_bytes", [1, 64, 100])
def test_a_parcel_may_go_in_many_messages(monkeypatch, driver, segment_bytes):
    monkeypatch.setattr("dataio.exchange.carrier.SEGMENT_BYTES", segment_bytes)

    def run(world):
        store = MemoryStore(ROWS * world.rank, ROWS)
        figures = ring(world, store, threaded=DRIVERS[driver][world.rank]).finish(None)
        return store.arrived, figures["messages"]

    for rank, (arrived, messages) in enumerate(run_threads(thread_worlds([1, 1]), run)):
        expected = range(ROWS * (1 - rank), ROWS * (2 - rank))
        assert arrived == {slot: (i, row_bytes(i)) for slot, i in enumerate(expected)}
        assert messages > 3 * PARCELS


def test_few_messages_are_under_way_at_once_and_one_parcel_leaves_at_a_time(monkeypatch):
    monkeypatch.setattr("dataio.exchange.carrier.SEGMENT_BYTES", 16)
    world, taken, tags = thread_worlds([1, 1])[0], threading.Event(), []

    def isend(data, *, dest, tag):
        tags.append(tag)
        return SimpleNamespace(test=taken.is_set)

    monkeypatch.setattr(world, "isend", isend)
    transfer = Transfer(world, MemoryStore(0, ROWS), sends=parcels(1), receives=[], threaded=False)
    for _ in range(50):
        transfer.progress(PARCELS)
    # The lengths of each parcel under way go ahead, then the first one's rows.
    assert sorted(tags) == [0] * (1 + SEGMENTS_OUT) + list(range(1, MAX_IN_FLIGHT))
    taken.set()
    transfer.finish(None)
    rows = [tag for place, tag in enumerate(tags) if tag in tags[:place]]
    assert rows == sorted(rows)


@pytest.mark.parametrize("threaded", [True, False])
def test_a_partner_whose_turn_has_not_come_is_not_called_silent(monkeypatch, threaded):
    """Rank 1 takes nothing; what is meant for rank 2 waits behind it."""
    world = thread_worlds([1, 1, 1], timeout_s=0.2)[0]
    monkeypatch.setattr(world, "isend", lambda *_, **__: SimpleNamespace(test=lambda: False))
    sends = [*parcels(1)[:2], *parcels(2)[2:4]]
    transfer = Transfer(world, MemoryStore(0, ROWS), sends=sends, receives=[], threaded=threaded)
    with pytest.raises(StallError, match=r"waited 0\.2 s for rank 1 while exchanging rows"):
        call_for_ever_at(transfer, PARCELS)
    transfer.stop()


def test_parcels_may_be_done_in_any_order(monkeypatch):
    world, first = thread_worlds([1, 1])[0], []

    def isend(data, *, dest, tag):
        # The first parcel is done long after others that were posted later.
        return SimpleNamespace(test=lambda: tag > 0 or tag_seen(tag))

    def tag_seen(tag):
        first.append(tag)
        return len(first) > 20

    monkeypatch.setattr(world, "isend", isend)
    transfer = Transfer(world, MemoryStore(0, ROWS), sends=parcels(1), receives=[], threaded=False)
    assert transfer.finish(None)["messages"] == 2 * PARCELS
    assert len(first) > 20


def test_memory_for_parcels_is_used_again_by_the_next_exchange():
    def run(world):
        buffers, allocated = ParcelBuffers(), []
        for _ in range(6):
            ring(world, MemoryStore(ROWS * world.rank, ROWS), buffers=buffers).finish(None)
            allocated.append(buffers.num_allocated)
            assert sum(map(len, buffers._idle)) <= 2 * MAX_IN_FLIGHT * 1000
            assert len(buffers._idle) <= 2 * MAX_IN_FLIGHT
        return allocated

    for allocated in run_threads(thread_worlds([1, 1]), run):
        assert allocated[-1] <= 4 * MAX_IN_FLIGHT, "six exchanges of twelve parcels in and out"


def test_rows_at_hand_are_neither_sent_nor_written():
    class Keeping(MemoryStore):
        def keep_rows(self, slots, *, held_in):
            self.arrived |= zip(slots.tolist(), held_in.tolist(), strict=True)

    def run(world):
        store, other = Keeping(0, ROWS), 1 - world.rank
        figures = ring(world, store, at_hand=AtHand([other], [other], 1000)).finish(None)
        return store.arrived, store.read, figures["rows"], figures["sent_bytes"]

    kept = {slot: 1000 + slot for slot in range(ROWS)}
    assert run_threads(thread_worlds([1, 1]), run) == [(kept, 0, ROWS, 8 * ROWS)] * 2


def test_messages_do_not_depend_on_how_many_samples_there_are():
    def run(world, num_samples):
        layout, policy = Layout(world.replicas_per_node, num_samples), Partial(0.25)
        store = MemoryStore(0, layout.pool_rows(world.node))
        running = policy.begin(ExchangeContext(world, store, layout, 0, 0, range(20), 20, 0))
        assert running is not None
        figures = running.finish(None)
        return figures["rows"], figures["messages"]

    few = run_threads(thread_worlds([1, 1]), lambda world: run(world, 400))
    many = run_threads(thread_worlds([1, 1]), lambda world: run(world, 8000))
    assert [rows for rows, _ in few + many] == [50, 50, 1000, 1000]
    assert len({messages for _, messages in few + many}) == 1


def names():
    return [thread.name for thread in threading.enumerate()]


def test_stopping_leaves_no_thread_and_writes_nothing_more():
    world = thread_worlds([1, 1])[0]
    transfer = ring(world, MemoryStore(0, ROWS), threaded=True)
    transfer.progress(0)
    assert "tonari-exchange" in names()
    transfer.stop()
    assert "tonari-exchange" not in names()


def test_what_a_medium_may_still_write_into_outlives_a_stop():
    world = thread_worlds([1, 1])[0]
    transfer = ring(world, MemoryStore(0, ROWS), threaded=False)
    transfer.progress(0)
    carrier = weakref.ref(transfer._carrier)
    transfer.stop()
    del transfer
    gc.collect()
    assert carrier() is not None


def test_no_parcel_leaves_before_its_step(monkeypatch):
    """Else a receiver's memory fills with what it has not asked for, and none of it is spread."""

    def run(world):
        sent = []
        transfer = ring(world, MemoryStore(ROWS * world.rank, ROWS), threaded=False)
        send = world.isend

        def counted(data, *, dest, tag):
            sent.append(tag)
            return send(data, dest=dest, tag=tag)

        monkeypatch.setattr(world, "isend", counted)
        for step in range(PARCELS):
            for _ in range(4):
                transfer.progress(step)
            assert max(sent) <= step
        return transfer.finish(None)["rows"]

    assert run_threads(thread_worlds([1, 1]), run) == [ROWS] * 2


def test_a_callers_end_ends_its_exchange():
    world = thread_worlds([1, 1])[0]
    caller = threading.Thread(
        target=lambda: ring(world, MemoryStore(0, ROWS), threaded=True).progress(0)
    )
    caller.start()
    caller.join()
    for thread in threading.enumerate():
        if thread.name == "tonari-exchange":
            thread.join(20)
    assert "tonari-exchange" not in names()


def test_what_a_caller_that_ended_left_is_carried_by_the_one_that_finishes():
    def run(world):
        store = MemoryStore(ROWS * world.rank, ROWS)
        transfer = ring(world, store, threaded=True)
        transfer._owner = threading.Thread()
        transfer.progress(0)
        transfer._thread.join(20)
        return transfer.finish(None)["rows"], len(store.arrived)

    assert run_threads(thread_worlds([1, 1]), run) == [(ROWS, ROWS)] * 2
