"""What runs, or is to begin: each call brings a run to the state that it names, and to no other."""

import threading

import numpy as np
import pytest

from dataio import StallError, StateError
from dataio.run_state import New, Repositioned, Restored, Running
from dataio.world import run_threads, single_world, thread_worlds
from importance import Full, RandomPrune
from tests.dataio.loaders import make


def is_state(loader, kind, epoch, step):
    state, position = loader._run.state, loader._run.position
    return type(state) is kind and (position.epoch, position.running.steps) == (epoch, step)


def test_every_call_leads_to_its_state(tmp_path):
    with make(single_world(), tmp_path / "cache") as loader:
        assert is_state(loader, New, 0, 0)
        next(iter(loader))
        assert is_state(loader, Running, 0, 1), "a position is that of the last batch"
        saved = loader.state_dict()
        loader.save(tmp_path / "save")
        assert is_state(loader, Running, 0, 1)
        list(loader)
        loader.set_epoch(1)
        assert is_state(loader, Running, 1, 0)
        loader.load_state_dict(saved)
        assert is_state(loader, Repositioned, 0, 1), (
            "it begins with the next call that needs an epoch"
        )
        assert loader.state_dict() == saved
        assert (loader.epoch, loader.step) == (0, 1), "the attributes are of where it goes on"
        assert not loader.is_used_up()
        assert is_state(loader, Running, 0, 1)
        loader.set_epoch(3)
        assert is_state(loader, Running, 3, 0)
        loader.restore(tmp_path / "save")
        assert is_state(loader, Running, 0, 1)
    assert is_state(loader, Repositioned, 0, 1), "nothing runs behind a close"


def test_a_run_that_was_given_a_position_is_not_started_elsewhere(tmp_path):
    with make(single_world(), tmp_path) as loader:
        loader._run.start_with(2)
        assert is_state(loader, New, 2, 0)
        loader._run.start_with(1)
        assert is_state(loader, New, 2, 0)
        loader._run.choose(loader._run.start_of(4))
        loader._run.start_with(1)
        assert is_state(loader, Repositioned, 4, 0)
        loader.set_epoch(0)
        loader._run.start_with(1)
        assert is_state(loader, Running, 0, 0)


def test_scores_are_of_the_state_that_an_epoch_begins_from(tmp_path):
    with make(single_world(), tmp_path / "cache", importance=Full(columns=("loss",))) as loader:
        for batch in loader:
            loader.report(batch, batch["sample_id"].float())
        loader.save(tmp_path / "save")
        reported = loader._session.pool.scores.copy()
        assert (reported["epoch"] == 0).all()
        loader.set_epoch(2)
        assert (loader._session.pool.scores["epoch"] == -1).all(), (
            "a chosen position begins without"
        )
        seen = []
        begin = loader._run.ensure_running

        def ensure_running():
            seen.append(type(loader._run.state))
            return begin()

        loader._run.ensure_running = ensure_running
        loader.restore(tmp_path / "save")
        assert seen == [Restored]
        assert np.array_equal(loader._session.pool.scores, reported)


def test_refresh_before_any_epoch_says_what_to_do(tmp_path):
    with make(single_world(), tmp_path) as loader:
        with pytest.raises(StateError, match="no epoch runs, expected one; begin it by a loop"):
            next(loader.refresh())


def test_a_state_that_was_refused_is_refused_again(tmp_path):
    with make(single_world(), tmp_path, importance=RandomPrune(0.25, delta=1.0)) as loader:
        next(iter(loader))
        saved = loader.state_dict()
        assert saved["hidden"]
    with make(single_world(), tmp_path) as loader:
        loader.load_state_dict(saved)
        for _ in range(2):
            with pytest.raises(StateError, match="hides"):
                next(iter(loader))
            assert is_state(loader, Repositioned, 0, 1)


def test_a_rank_that_closes_alone_says_that_it_did(tmp_path):
    """Its partner is not to blame, whose rows it waits for in vain."""
    closed = threading.Event()

    def work(world):
        loader = make(world, tmp_path)
        for batch in loader:
            del batch
            if loader.step < 3:
                continue
            if world.rank == 1:
                try:
                    with pytest.raises(StallError) as caught:
                        loader.close()
                finally:
                    closed.set()
                return str(caught.value)
            assert closed.wait(60)
            loader.__exit__(StallError, None, None)
            return ""
        raise AssertionError

    _, said = run_threads(thread_worlds([1, 1], timeout_s=1), work)
    assert said.startswith("Loader: this rank left epoch 0 at step 3 (by close, restore")
    assert "look for such a call on some ranks alone. rank 1: waited 1 s for rank 0" in said
