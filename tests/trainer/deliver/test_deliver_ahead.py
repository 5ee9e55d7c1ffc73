"""The next batch lies ready for the other ranks while one is trained, and nothing counts it."""

import threading
from typing import Any

import pytest
import torch

from dataio import Loader, Reports, Workers
from dataio.batch.feed import taken_ahead
from dataio.world import run_threads, thread_worlds
from importance import Kakurenbo
from tests.cases import diagonal
from tests.memory_source import FIELDS, MemorySource
from tests.trainer.deliver.test_deliver_faults import open_replica
from tests.trainer.mesh.meshes import score
from tonari.trainer.deliver.relay import BATCH, END, Outlet, RelayRoute
from tonari.trainer.deliver.ring import NUM_SLOTS
from tonari.trainer.deliver.scores import ScoreReceiver
from tonari.trainer.mesh.place import feed_of, place_of

STEPS = 6


def open_loader(root, importance=None):
    return Loader(
        MemorySource(48), batch_size=8, fields=FIELDS, cache=root, workers=Workers(threads=0),
        importance=importance, reports=Reports(progress=False),
    )  # fmt: skip


def ids(batch):
    return batch["sample_id"].tolist()


@pytest.mark.parametrize("count", range(4))
def test_each_batch_is_taken_before_the_one_in_front_of_it_is_yielded(count):
    done: list[tuple[str, Any]] = []

    def made():
        for number in range(count):
            done.append(("made", number))
            yield {"number": number}

    for batch in taken_ahead(made(), lambda batch: done.append(("taken", batch["number"]))):
        done.append(("yielded", batch["number"]))
    assert [number for what, number in done if what == "yielded"] == list(range(count))
    assert [number for what, number in done if what == "taken"] == list(range(count))
    for number in range(count - 1):
        assert done.index(("taken", number + 1)) < done.index(("yielded", number))
        # One step ahead, not more.
        if number + 2 < count:
            assert done.index(("yielded", number)) < done.index(("made", number + 2))


def test_a_loader_that_looks_ahead_counts_what_it_delivered(tmp_path):
    with open_loader(tmp_path / "one") as plain, open_loader(tmp_path / "two") as ahead:
        taken = []
        ahead.look_ahead(lambda batch: taken.append(ids(batch)))
        delivered = []
        for before, batch in zip(plain, ahead, strict=True):
            delivered.append(ids(batch))
            assert ids(batch) == ids(before)
            assert ahead.step == plain.step == len(delivered)
            assert ahead.state_dict() == plain.state_dict()
            assert len(taken) == min(len(delivered) + 1, STEPS)
        assert taken == delivered


@pytest.mark.parametrize("restores", [False, True])
def test_what_was_taken_and_not_delivered_is_taken_again(tmp_path, restores):
    with open_loader(tmp_path / "cache") as loader:
        whole = [ids(batch) for batch in loader]
    taken, delivered = [], []
    with open_loader(tmp_path / "cache") as loader:
        loader.look_ahead(lambda batch: taken.append(ids(batch)))
        for batch in loader:
            delivered.append(ids(batch))
            if loader.step == 2:
                break
        if restores:
            loader.save(tmp_path / "saved")
            loader.restore(tmp_path / "saved")
        delivered += [ids(batch) for batch in loader]
    assert delivered == whole
    assert taken == [*whole[:3], *whole[2:]]


@pytest.mark.parametrize("sizes", [(2, 1, 1), (1, 1, 2), (3, 1, 1)])
def test_the_next_batch_lies_ready_while_the_reader_trains(tmp_path, sizes):
    """The reader is amid step 1, until another rank has got batch 2."""
    got = threading.Event()

    def rank(world):
        with open_replica(world, tmp_path, sizes=sizes) as loader:
            next(loader.epochs(1))
            for number, _ in enumerate(loader, 1):
                if world.rank == world.world_size - 1 and number == 2:
                    got.set()
                if world.rank == 0 and number == 1:
                    assert got.wait(20)
            return loader.step

    num_ranks = sizes[0] * sizes[2]
    assert run_threads(thread_worlds([num_ranks]), rank) == [STEPS] * num_ranks


@diagonal(shared=[True, False], at=[1, 2, 5])
def test_a_loop_left_in_the_middle_and_a_restore_go_on_with_the_next_batch(
    tmp_path, monkeypatch, at, shared
):
    """What was handed on ahead is passed over, whatever comes next: a state, a loop, an end."""
    if not shared:
        monkeypatch.setattr("tonari.trainer.deliver.relay.MAX_PEERS", 0)

    def rank(world):
        seen = []

        def train(batch):
            if world.rank == 1:
                seen.append(ids(batch))
                loader.report(batch, *score(batch["sample_id"], 0))

        with open_replica(world, tmp_path / "cache", importance=POLICY) as loader:
            for _ in loader.epochs(2):
                for batch in loader:
                    train(batch)
                    if loader.step == at:
                        break
                loader.save(tmp_path / "saved")
                world.barrier(doing="saving")
                loader.restore(tmp_path / "saved")
                for batch in loader:
                    train(batch)
                    if loader.step + 1 == len(loader):
                        break
                if loader.step < len(loader):
                    for batch in loader:
                        train(batch)
                for batch in loader.refresh():
                    train(batch)
                break
            for batch in loader:
                train(batch)
                break
        return seen

    with open_loader(tmp_path / "one", POLICY) as one:
        expected = []
        for _ in one.epochs(2):
            for batch in one:
                expected.append(ids(batch))
                one.report(batch, *score(batch["sample_id"], 0))
            expected += [ids(batch) for batch in one.refresh()]
            break
    nothing, seen = run_threads(thread_worlds([2]), rank)
    assert nothing == []
    assert seen[: len(expected)] == expected


def test_losses_of_a_scorer_that_is_ahead_wait_for_their_batch(tmp_path, monkeypatch):
    """It left out a batch before, so that the first losses are of one that the reader has not."""
    sent = threading.Event()
    expect = ScoreReceiver.expect

    def expect_late(receiver, number, batch):
        assert sent.wait(20)
        expect(receiver, number, batch)

    monkeypatch.setattr(ScoreReceiver, "expect", expect_late)

    def rank(world):
        with open_replica(world, tmp_path) as loader:
            next(loader.epochs(1))
            for number, batch in enumerate(loader, 1):
                if world.rank == 1 and number == 2:
                    loader.report(batch, torch.full((8,), 2.5))
                    sent.set()
            return loader.mean_loss()

    assert run_threads(thread_worlds([2]), rank) == [2.5, None]


class Late:
    """A message that comes when somebody waits for it."""

    def __init__(self):
        self.came = False

    def test(self):
        return self.came


def test_of_announced_batches_only_those_of_the_slots_before_are_waited_for(monkeypatch):
    """Messages of some media are not sent before somebody receives them, which is a step later."""

    def rank(world):
        if world.rank:
            return 0
        sent = []

        def send(data, *, dest, tag):
            sent.append(Late())
            return sent[-1]

        def wait(requests, *, peers, doing):
            for request in requests:
                request.came = True

        monkeypatch.setattr(world, "isend", send)
        monkeypatch.setattr(world, "wait", wait)
        place = feed_of(
            place_of(0, (3, 1, 1, 1, 1), schedule="1f1b", virtual=1), last_stage_reads=False
        )
        outlet = Outlet(
            RelayRoute(world=world, place=place, inputs=(), targets=(), first_tag=0, guard=True,
                  shared=True)
        )  # fmt: skip
        for number in range(1, 2 * NUM_SLOTS):
            outlet.send_header(BATCH)
            came = [request.came for request in sent]
            # To each of the two others.
            num_late = 2 * min(number, NUM_SLOTS)
            assert came == [True] * (2 * number - num_late) + [False] * num_late
        outlet.send_header(END)
        assert all(request.came for request in sent)
        return len(sent)

    assert run_threads(thread_worlds([3]), rank) == [4 * NUM_SLOTS, 0, 0]


POLICY = Kakurenbo(0.4, drops=(), alphas=(1.0,), warmup_epochs=0)


def test_batches_handed_on_ahead_are_what_was_read_when_the_slots_are_used_again(tmp_path):
    """A rank that lags gets each batch whole: no slot is written while somebody may look at it."""

    def rank(world):
        kept = []
        with open_replica(world, tmp_path, sizes=(1, 1, 2)) as loader:
            for _ in loader.epochs(2):
                kept += [(batch, {n: v.clone() for n, v in batch.items()}) for batch in loader]
        assert len(kept) == 2 * STEPS
        for batch, copy in kept:
            assert all(torch.equal(batch[name], value) for name, value in copy.items())
        return [ids(batch) for batch, _ in kept]

    first, second = run_threads(thread_worlds([2]), rank)
    assert first == second
