"""Epochs that end early, by an error, a break or a jump: no thread, lock or row is left behind."""

import threading

import numpy as np
import pytest

from dataio import ExchangeError, Loader, Reports, Workers
from dataio.exchange.transfer import Transfer
from dataio.plan.layout import Layout
from dataio.rows.rows import corrupt_rows
from dataio.store.cache import Cache
from dataio.store.writer import RowWriter
from dataio.world import run_threads, thread_worlds
from importance import Kakurenbo
from shuffle import Global, Partial
from tests.cases import diagonal
from tests.dataio.loaders import loss_of
from tests.memory_source import FIELDS, MemorySource

pytestmark = pytest.mark.thorough

SAMPLES = 120
HIDES = Kakurenbo(0.3, drops=(), alphas=(1.0,), warmup_epochs=0)
SHUFFLES = [Partial(0.5), Global(moves=True)]


def make(world, root, policy, **options):
    return Loader(
        MemorySource(SAMPLES), cache=root, world=world, batch_size=4, fields=FIELDS, seed=3,
        workers=Workers(threads=0), shuffle=policy, importance=HIDES,
        reports=Reports(progress=False), **options,
    )  # fmt: skip


def on_both(function):
    return run_threads(thread_worlds([2, 1], timeout_s=20), function)


def names():
    return [thread.name for thread in threading.enumerate() if thread.name.startswith("tonari")]


class Fault(Exception):
    """An error of the training loop."""


def train_until(loader, fault):
    with loader:
        for epoch in loader.epochs(3):
            for batch in loader:
                loader.report(batch, *loss_of(batch["sample_id"], epoch))
                if (epoch, loader.step) == (1, 2):
                    raise fault


@diagonal(policy=SHUFFLES, fault=[Fault, KeyboardInterrupt])
def test_an_error_in_the_loop_ends_threads_frees_the_cache_and_writes_nothing_more(
    tmp_path, monkeypatch, policy, fault
):
    released, late = set(), []
    write, close = RowWriter.write, Cache.close

    def watched(self, *args, **options):
        if id(self) in released:
            late.append(self)
        return write(self, *args, **options)

    def closed(self):
        released.add(id(self.writer))
        close(self)

    monkeypatch.setattr(RowWriter, "write", watched)
    monkeypatch.setattr(Cache, "close", closed)

    def on_rank(world):
        loader = make(world, tmp_path, policy)
        with pytest.raises(fault):
            train_until(loader, fault)
        # What a `finally` of the program may do as well.
        loader.close()
        world.barrier(doing="let go")
        with make(world, tmp_path, policy) as again:
            # In epoch 0 nothing is hidden yet.
            return [i for batch in again for i in batch["sample_id"].tolist() if i >= 0]

    before = names()
    ends = on_both(on_rank)
    assert sorted(i for ids in ends for i in ids) == list(range(SAMPLES))
    assert names() == before
    assert late == []


@pytest.mark.parametrize("policy", SHUFFLES)
def test_a_close_that_cannot_complete_its_exchange_frees_the_cache_all_the_same(
    tmp_path, monkeypatch, policy
):
    def fails(self, scores):
        raise ExchangeError("the partner is gone")

    def on_rank(world):
        with pytest.raises(ExchangeError, match="gone"):
            with make(world, tmp_path, policy) as loader:
                next(iter(loader))
        loader.close()  # a second time, as a `finally` may: nothing is left to fail
        world.barrier(doing="let go")
        return make(world, tmp_path, policy)

    before = names()
    with monkeypatch.context() as patch:
        patch.setattr(Transfer, "finish", fails)
        loaders = on_both(on_rank)
    run_threads([loader.world for loader in loaders], lambda world: loaders[world.rank].close())
    assert names() == before


@diagonal(policy=SHUFFLES, threaded=[True, False])
def test_epochs_that_are_broken_off_exchange_all_the_same_in_bounded_memory(
    tmp_path, policy, threaded
):
    def on_rank(world):
        world.threaded = threaded
        allocated = []
        with make(world, tmp_path, policy) as loader:
            for epoch in loader.epochs(30):
                for batch in loader:
                    loader.report(batch, *loss_of(batch["sample_id"], epoch))
                    if loader.step == 2:
                        break
                allocated.append(loader._session.moves.buffers.num_allocated)
                assert names().count("tonari-exchange") <= 3, "one a rank"
                assert len(loader._session.pool.cache.background.seals) <= 16
            cache, layout = loader._session.pool.cache, Layout(world.replicas_per_node, SAMPLES)
            ids = cache.entries.sample_id[:].tolist()
            wanted = policy.placement(layout, node=world.node, epoch=29, seed=3)
            assert ids == wanted.tolist()
            assert not len(corrupt_rows(cache.read_rows(np.arange(len(ids)))))
            return ids, allocated

    ends = on_both(on_rank)
    assert sorted(ends[0][0] + ends[2][0]) == list(range(SAMPLES))
    for _, allocated in ends:
        assert allocated[-1] - allocated[5] <= 8, "buffers are used again"


@pytest.mark.parametrize("policy", [Partial(0.5), Global(moves=True)])
def test_jumps_in_the_middle_of_epochs_give_each_epoch_its_batches(tmp_path, policy):
    """The exchange under way is let go of; what it wrote is free again."""

    def on_rank(world):
        seen: dict[int, list[list[int]]] = {}
        with make(world, tmp_path, policy) as loader:
            for epoch in (0, 1, 4, 2, 3, 0, 4, 1):
                loader.set_epoch(epoch)
                steps = []
                for batch in loader:
                    steps.append(batch["sample_id"].tolist())
                    # Predicted wrong, so that none is hidden.
                    ids = batch["sample_id"]
                    loader.report(batch, ids.float(), ids < -1, ids.float())
                    if loader.step == 3:
                        break
                assert seen.setdefault(epoch, steps) == steps, f"epoch {epoch}"
            return loader._session.pool.source.rows_read

    read = [i for rows in on_both(on_rank) for i in rows]
    assert sorted(read) == list(range(SAMPLES)), "each from the source once"


@pytest.mark.parametrize("policy", [Partial(0.5), Global(moves=True)])
def test_beginning_an_epoch_again_and_again_takes_no_more_room(tmp_path, policy):
    """What arrived for an epoch that does not take effect gives its space back."""

    def on_rank(world):
        ends, ids = [], []
        with make(world, tmp_path, policy) as loader:
            early = loader.state_dict()
            for _ in range(6):
                ids.append([batch["sample_id"].tolist() for batch in loader])
                loader.load_state_dict(early)
                ends.append(loader._session.pool.cache.log.space.extents.end)
                assert loader._session.pool.cache.arrivals.kept == [], (
                    "nor is a change of slot left over"
                )
        assert ids == ids[:1] * 6
        return ends

    for ends in on_both(on_rank):
        assert ends == ends[:1] * 6
