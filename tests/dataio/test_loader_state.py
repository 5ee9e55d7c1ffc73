"""Where a loader stands: small states, saves, and what they are refused for."""

import errno
import json
import logging
import threading
from unittest.mock import Mock

import numpy as np
import pytest

import dataio.state.snapshot
from dataio import StateError, WorldError
from dataio.store.cache import Cache
from dataio.store.commit_log import CommitLog
from dataio.world import run_threads, single_world, thread_worlds
from importance import Kakurenbo, RandomPrune
from tests.dataio.loaders import POLICIES, digest, loss_of, make


def test_the_state_is_small_json_and_goes_on_without_importance(tmp_path):
    with make(single_world(), tmp_path) as loader:
        loader.set_epoch(0)
        batches = [digest(batch) for batch in loader]
    with make(single_world(), tmp_path) as loader:
        loader.set_epoch(0)
        for _, _batch in zip(range(4), loader, strict=False):
            pass
        state = json.dumps(loader.state_dict())
        assert len(state) < 1024
    with make(single_world(), tmp_path) as loader:
        loader.load_state_dict(json.loads(state))
        assert [digest(batch) for batch in loader] == batches[4:]


@pytest.mark.parametrize("batch_size", [5, 3])
def test_the_length_of_an_epoch_that_goes_on_is_one_before_the_loop_and_in_it(tmp_path, batch_size):
    with make(single_world(), tmp_path, batch_size=5) as loader:
        next(iter(loader))
        state = loader.state_dict()
    with make(single_world(), tmp_path, batch_size=batch_size) as loader:
        loader.load_state_dict(state)
        length, done = len(loader), loader.step
        assert [len(loader) for _ in loader] == [length] * (length - done)


def test_a_save_of_other_files_is_told_once_that_places_may_be_of_other_samples(tmp_path, caplog):
    def opened(values, cache):
        fields = {"x": dataio.Int("x")}
        return dataio.Loader(
            {"x": values}, batch_size=5, fields=fields, cache=dataio.NodeCache(tmp_path / cache),
            world=single_world(),
        )  # fmt: skip

    values = np.arange(20)
    with opened(values, "a") as loader:
        loader.save(tmp_path / "saved")
        state = loader.state_dict()
    with opened(values, "a") as loader:
        loader.restore(tmp_path / "saved")
    assert not caplog.records
    with opened(values[::-1].copy(), "b") as loader:
        loader.restore(tmp_path / "saved")
        loader.load_state_dict(state)
    assert ["begin anew" in record.message for record in caplog.records] == [True, True]


def test_ranks_made_differently_are_told_which(tmp_path):
    def run(world):
        make(world, tmp_path, seed=world.rank)

    with pytest.raises(WorldError, match="rank 1 was made with seed 1, rank 0 with 0"):
        run_threads(thread_worlds([1, 1]), run)

    def run_compressed(world):
        make(world, tmp_path, compress=("none", "zstd")[world.rank])

    with pytest.raises(WorldError, match=r"made with shuffle\.compress zstd, rank 0"):
        run_threads(thread_worlds([1, 1]), run_compressed)


def test_another_checkpoint_is_refused(tmp_path):
    with make(single_world(), tmp_path / "a") as loader:
        loader.save(tmp_path / "saved")
    with (
        make(single_world(), tmp_path / "b", seed=8) as loader,
        pytest.raises(StateError, match="seed is 7, this loader has 8"),
    ):
        loader.restore(tmp_path / "saved")
    with (
        make(single_world(), tmp_path / "b") as loader,
        pytest.raises(StateError, match="no saved loader state here"),
    ):
        loader.restore(tmp_path / "nowhere")


def test_state_without_scores_warns_under_importance(tmp_path, caplog):
    with make(single_world(), tmp_path, importance=POLICIES["kakurenbo"]) as loader:
        state = loader.state_dict()
        with caplog.at_level(logging.WARNING):
            loader.load_state_dict(state)
        assert "the score history is not part of state_dict" in caplog.text


RANDOM = RandomPrune(0.5, delta=1.0)


HIDING = Kakurenbo(0.5, drops=(), alphas=(1.0,), tau=0.0)


@pytest.mark.parametrize(
    ("before", "after", "batch_size", "message"),
    [
        (RANDOM, None, 5, r"epoch 1 hides \d+ rows, with the importance of this loader 0, so"),
        (None, RANDOM, 5, r"epoch 1 hides 0 rows, with the importance of this loader \d+, so"),
        (HIDING, None, 5, r"epoch 1 hides \d+ rows, with the importance of this loader 0, so"),
        (RANDOM, None, 4, r"epoch 1 was begun on other ranks or with another batch size, and"),
        (RANDOM, RANDOM, 5, None),
    ],
)
def test_a_state_goes_on_amid_an_epoch_only_with_what_that_epoch_hid(
    tmp_path, before, after, batch_size, message
):
    """Else samples of that epoch would be skipped or repeated."""
    first = []
    with make(single_world(), tmp_path, importance=before, batch_size=5) as loader:
        for epoch in loader.epochs(2):
            for number, batch in enumerate(loader):
                loader.report(batch, *loss_of(batch["sample_id"], epoch))
                if epoch == 1:
                    first += batch["sample_id"].tolist()
                    if number == 1:
                        break
        state = json.loads(json.dumps(loader.state_dict()))
    with make(single_world(), tmp_path, importance=after, batch_size=batch_size) as loader:
        if message is None:
            loader.load_state_dict(state)
            assert loader.state_dict() == state
            rest = [i for batch in loader for i in batch["sample_id"].tolist() if i >= 0]
            assert (
                len(set(first + rest)) == len(first + rest) == loader.num_samples - state["hidden"]
            )
            return
        with pytest.raises(StateError, match=message):
            _go_on(loader, state)


def _go_on(loader, state):
    loader.load_state_dict(state)
    next(iter(loader))


def test_a_save_that_fails_is_named_and_keeps_what_was_saved(tmp_path, monkeypatch):
    with make(single_world(), tmp_path / "cache") as loader:
        loader.save(tmp_path / "saved")
        before = json.loads((tmp_path / "saved" / "state.json").read_text())
        next(iter(loader))
        full = OSError(errno.ENOSPC, "No space left on device")
        with monkeypatch.context() as patch:
            patch.setattr(dataio.state.snapshot, "write_table", Mock(side_effect=full))
            with pytest.raises(StateError, match=r"saved: .*No space left.*free some space"):
                loader.save(tmp_path / "saved")
        assert json.loads((tmp_path / "saved" / "state.json").read_text()) == before
        loader.save(tmp_path / "saved")
    with make(single_world(), tmp_path / "cache") as loader:
        loader.restore(tmp_path / "saved")
        assert loader.step == 1


def test_a_checkpoint_is_never_ahead_of_the_caches(tmp_path, monkeypatch):
    """The manifest that is written beside training is there before anything is saved."""
    write_head, settle, save = (
        CommitLog.write_head,
        Cache.await_commit,
        dataio.state.snapshot.save_snapshot,
    )
    asked = threading.Event()
    heads: list[int] = []

    def late(self, head, **options):
        if head.epoch == 1:
            assert asked.wait(10)
        write_head(self, head, **options)

    def settled(self):
        if self.log.epoch == 1:
            asked.set()
        settle(self)

    def saved(path, state, node, world, **more):
        world.barrier(doing="look at the manifests")
        heads.extend(json.loads(p.read_text())["epoch"] for p in tmp_path.rglob("manifest.json"))
        save(path, state, node, world, **more)

    monkeypatch.setattr(CommitLog, "write_head", late)
    monkeypatch.setattr(Cache, "await_commit", settled)
    monkeypatch.setattr("dataio.loader.save_snapshot", saved)

    def run(world):
        with make(world, tmp_path) as loader:
            for epoch in loader.epochs(3):
                if epoch == 1:
                    loader.save(tmp_path / "saved")
                    return
                list(loader)

    run_threads(thread_worlds([1, 1]), run)
    assert heads == [1] * 4
