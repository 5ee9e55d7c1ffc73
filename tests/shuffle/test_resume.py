"""Loaders whose rows move, some of them or all dealt anew: resumed they go on."""

from functools import partial
from typing import Any

import numpy as np
import pytest

import shuffle
from dataio import Loader, NodeCache, Reports, StateError, Workers
from dataio.base.atomic import read_record, write_record
from dataio.plan.policies import Shuffle
from dataio.world import run_threads, thread_worlds
from importance import Kakurenbo
from tests.dataio.loaders import digest, jitter, loss_of
from tests.memory_source import FIELDS, MemorySource

pytestmark = pytest.mark.thorough

EPOCHS = 4
HIDES = Kakurenbo(0.3, drops=(), alphas=(1.0,), warmup_epochs=0)
SHUFFLES: dict[str, Shuffle] = {
    "partial": shuffle.Partial(0.3),
    "moves": shuffle.Global(moves=True),
}


def make(world, root, name, *, num_samples=61, quota=None, **options):
    chosen: dict[str, Any] = {"importance": HIDES, "batch_size": 5, "fields": FIELDS, "seed": 7}
    chosen |= {"transform": jitter}
    chosen |= {"workers": Workers(threads=1), "reports": Reports(progress=False)}
    return Loader(
        MemorySource(num_samples),
        cache=NodeCache(root, quota=quota),
        world=world,
        shuffle=SHUFFLES[name],
        **(chosen | options),
    )


def train(loader, epochs=EPOCHS, *, on_step=None):
    """Run to the end: digests of all batches, and each epoch's slots."""
    seen = []
    for epoch in loader.epochs(epochs):
        for batch in loader:
            loader.report(batch, *loss_of(batch["sample_id"], epoch))
            seen.append(digest(batch))
            if on_step is not None:
                on_step(epoch, loader.step, len(seen))
        for batch in loader.refresh():
            loader.report(batch, *loss_of(batch["sample_id"], epoch + 0.5))
            seen.append(digest(batch))
    return seen


def whole_run(tmp_path, name, replicas, saves):
    """An uninterrupted run that saves at some steps: what each rank saw, and when it saved."""

    def whole(world):
        saved = {}
        with make(world, tmp_path / "whole", name) as loader:

            def on_step(epoch, step, number):
                if step in saves:
                    loader.save(tmp_path / f"at-{epoch}-{step}")
                    saved[epoch, step] = number

            return train(loader, on_step=on_step), saved

    return run_threads(thread_worlds(list(replicas), timeout_s=20), whole)


@pytest.mark.parametrize("name", SHUFFLES)
def test_a_node_that_committed_alone_steps_back_without_the_source(tmp_path, name):
    """A kill between save and commit, or between two nodes' commits: caches an epoch ahead."""

    def first(world):
        with make(world, tmp_path / "cache", name) as loader:
            for epoch in loader.epochs(3):
                for batch in loader:
                    loader.report(batch, *loss_of(batch["sample_id"], epoch))
                    if (epoch, loader.step) == (1, 2):
                        loader.save(tmp_path / "saved")
                if epoch == 2:
                    return np.array(loader._session.pool.sample_ids)

    def again(world):
        with make(world, tmp_path / "cache", name) as loader:
            loader._session.pool.source.rows_read.clear()
            loader.restore(tmp_path / "saved")
            return (
                loader._session.pool.source.rows_read,
                loader.epoch,
                np.array(loader._session.pool.sample_ids),
            )

    ahead = run_threads(thread_worlds([1, 1], timeout_s=20), first)
    results = run_threads(thread_worlds([1, 1], timeout_s=20), again)
    assert [read for read, _, _ in results] == [[], []]
    assert [epoch for _, epoch, _ in results] == [1, 1]
    for there, (_, _, here) in zip(ahead, results, strict=True):
        assert not np.array_equal(there, here)


def test_a_snapshot_whose_rows_were_changed_is_refused(tmp_path):
    name = "partial"
    whole_run(tmp_path, name, (1, 1), saves=(3,))
    saved, later = (read_record(tmp_path / at / "state.json") for at in ("at-1-3", "at-2-3"))
    (tmp_path / "at-1-3" / "node-0.arrow").write_bytes(
        (tmp_path / "at-2-3" / "node-0.arrow").read_bytes()
    )

    def rest(world, found):
        with make(world, tmp_path / "other", name) as loader:
            with pytest.raises(StateError, match=found):
                loader.restore(tmp_path / "at-1-3")

    found = r"node-0.arrow: .*not the one that state.json was saved with.*restore an older save"
    run_threads(thread_worlds([1, 1], timeout_s=20), partial(rest, found=found))
    # Somebody who gives the part its sums all the same
    saved["nodes"][0] = later["nodes"][0]
    write_record(tmp_path / "at-1-3" / "state.json", saved)
    found = r"not those of epoch 1.*restore an older save"
    run_threads(thread_worlds([1, 1], timeout_s=20), partial(rest, found=found))


@pytest.mark.parametrize("name", SHUFFLES)
def test_a_quota_without_room_for_arrivals_goes_on_without_an_exchange(tmp_path, name):
    def job(world):
        with make(world, tmp_path, name, num_samples=4000, quota=350_000) as loader:
            seen: list[list[int]] = []
            for epoch in loader.epochs(2):
                seen.append([])
                for batch in loader:
                    seen[-1] += batch["sample_id"][batch["slot"] >= 0].tolist()
                    loader.report(batch, *loss_of(batch["sample_id"], epoch))
            return seen, loader._session.pool.moves

    results = run_threads(thread_worlds([1, 1], timeout_s=20), job)
    assert [moves for _, moves in results] == [False, False]
    first = sorted(i for seen, _ in results for i in seen[0])
    assert first == list(range(4000))
