import contextlib
import os
from collections import Counter
from functools import partial

import numpy as np
import pytest

from dataio import ByStep, StateError
from dataio.mixture import Mixture
from dataio.plan.policies import Selection
from dataio.world import run_threads, single_world, thread_worlds
from tests.dataio.loaders import digest, make
from tests.memory_source import MemorySource
from tests.stand_ins import Killed

WEIGHTS = {"large": 3, "small": 1}


def mixed(world, root, *, weights=WEIGHTS, steps=40, seed=5):
    loaders = {
        "large": make(world, root / "large", source=MemorySource(61, name="large")),
        "small": make(world, root / "small", source=MemorySource(22, name="small")),
    }
    return Mixture(loaders, weights, steps=steps, seed=seed)


def seen(batch):
    name = batch["dataset"]
    return name, digest({k: v for k, v in batch.items() if k != "dataset"})


@pytest.mark.parametrize("layout", [[1], [2, 1]])
def test_steps_come_in_the_proportions_asked_for_the_same_on_all_ranks(tmp_path, layout):
    def run(world):
        with mixed(world, tmp_path) as mixture:
            return [[batch["dataset"] for batch in mixture] for _ in mixture.epochs(2)]

    everyone = run_threads(thread_worlds(layout), run)
    assert all(rank == everyone[0] for rank in everyone)
    for epoch in everyone[0]:
        assert Counter(epoch) == {"large": 30, "small": 10}
    assert everyone[0][0] != everyone[0][1]


def test_each_dataset_goes_round_at_its_own_pace(tmp_path):
    with mixed(single_world(), tmp_path, weights={"large": 0, "small": 1}, steps=15) as mixture:
        ids = [i for batch in mixture for i in batch["sample_id"].tolist() if i >= 0]
    assert Counter(ids) == {i: 3 for i in range(22)}, "15 batches are three laps of 22 rows"
    assert ids[:22] != ids[22:44], "each lap in an order of its own"


def test_weights_may_change_between_epochs(tmp_path):
    def weights(epoch):
        return {"large": 1, "small": epoch}

    with mixed(single_world(), tmp_path, weights=weights, steps=12) as mixture:
        counts = [Counter(b["dataset"] for b in mixture)["small"] for _ in mixture.epochs(4)]
    assert counts == [0, 6, 8, 9]


@pytest.mark.parametrize("by_save", [True, False])
def test_a_mixture_goes_on_from_any_step(tmp_path, by_save):
    def whole(world):
        with mixed(world, tmp_path / "whole") as mixture:
            return [seen(batch) for _ in mixture.epochs(2) for batch in mixture]

    def parts(world, stop):
        root = tmp_path / f"part{stop}"
        batches, state = [], None
        with mixed(world, root) as mixture:
            for _ in mixture.epochs(2):
                for batch in mixture:
                    batches.append(seen(batch))
                    if len(batches) == stop:
                        mixture.save(root / "saved")
                        state = mixture.state_dict()
                        break
                if state is not None:
                    break
        with mixed(world, root) as mixture:
            if by_save:
                mixture.restore(root / "saved")
            else:
                mixture.load_state_dict(state)
            return batches + [seen(batch) for _ in mixture.epochs(2) for batch in mixture]

    uninterrupted = run_threads(thread_worlds([1, 1]), whole)
    for stop in (1, 9, 17, 40, 63):
        resumed = run_threads(thread_worlds([1, 1]), partial(parts, stop=stop))
        assert resumed == uninterrupted, f"stopped after {stop}"


@pytest.mark.parametrize("renamed", range(7))
def test_a_kill_while_a_mixture_is_saved_leaves_all_loaders_where_they_stood_together(
    tmp_path, monkeypatch, renamed
):
    """At each rename: loaders from before and after it would skip or repeat samples."""
    saved, rename, left = tmp_path / "saved", os.replace, renamed

    def killing(source, target):
        nonlocal left
        if "saved" in str(source):
            left -= 1
            if left < 0:
                raise Killed
        rename(source, target)

    with mixed(single_world(), tmp_path) as mixture:
        batches = iter(mixture)
        before = [seen(next(batches)) for _ in range(4)]
        mixture.save(saved)
        after = [seen(next(batches)) for _ in range(5)]
        with monkeypatch.context() as patched:
            patched.setattr(os, "replace", killing)
            with contextlib.suppress(Killed):
                mixture.save(saved)
        assert left < 0, "killed"
    with mixed(single_world(), tmp_path) as mixture:
        mixture.restore(saved)
        assert mixture.step in (4, 9)
        gone_on = (before + after)[: mixture.step] + [seen(batch) for batch in mixture]
    with mixed(single_world(), tmp_path / "whole") as mixture:
        assert gone_on == [seen(batch) for batch in mixture]


def test_wrong_weights_and_states_are_refused(tmp_path):
    with pytest.raises(ValueError, match=r"weights for large, the loaders are large, small.*one"):
        mixed(single_world(), tmp_path / "a", weights={"large": 1})
    with pytest.raises(ValueError, match=r"expected numbers >= 0 that are not all 0"):
        mixed(single_world(), tmp_path / "b", weights={"large": 0, "small": 0})
    with mixed(single_world(), tmp_path / "c") as mixture:
        for name, mine in (("seed", 5), ("steps", 40)):
            cure = rf"{name} is 9, this one has {mine}; give Mixture\(..., {name}=9\)"
            with pytest.raises(StateError, match=cure):
                mixture.load_state_dict(mixture.state_dict() | {name: 9})
        with pytest.raises(
            StateError, match=r"nowhere: no saved .*\(mixture.json is missing\); give"
        ):
            mixture.restore(tmp_path / "nowhere")


class HideAll:
    """A policy that leaves nothing to train on."""

    columns = ()

    def select(self, rows, *, epoch, num_epochs):
        return Selection(np.arange(len(rows.sample_id)))

    def due(self, hidden, *, epoch):
        return hidden[:0]


def test_a_dataset_that_never_has_a_batch_is_an_error_and_no_endless_loop(tmp_path):
    loader = make(single_world(), tmp_path, importance=HideAll())
    with Mixture({"small": loader}, {"small": 1}, steps=5) as mixture:
        with pytest.raises(ValueError, match=r"3 epochs in a row of 'small' had no batch.*lower"):
            next(iter(mixture))


def test_a_finished_run_that_is_restored_stays_at_its_end(tmp_path):
    def weights(epoch):
        return [{"large": 3, "small": 1}, {"large": 1, "small": 1}][epoch]

    with mixed(single_world(), tmp_path, weights=weights, steps=4) as mixture:
        for _ in mixture.epochs(2):
            assert len(list(mixture)) == 4
        state = mixture.state_dict()
    with mixed(single_world(), tmp_path, weights=weights, steps=4) as mixture:
        mixture.load_state_dict(state)
        assert list(mixture.epochs(2)) == []
        assert mixture.state_dict() == state


def by_step(step):
    """Small ones come more and more often, and large ones no longer from step 60 on."""
    return {"large": 1.0 if step < 60 else 0.0, "small": step / 20}


@pytest.mark.parametrize("layout", [[1], [2, 1]])
def test_weights_that_change_by_step_hold_in_any_window_on_all_ranks(tmp_path, layout):
    def run(world):
        with mixed(world, tmp_path, weights=ByStep(by_step), steps=25) as mixture:
            return [batch["dataset"] for _ in mixture.epochs(3) for batch in mixture]

    everyone = run_threads(thread_worlds(layout), run)
    assert all(rank == everyone[0] for rank in everyone)
    drawn = np.cumsum([name == "small" for name in everyone[0]])
    shares = [by_step(step)["small"] / sum(by_step(step).values()) for step in range(75)]
    due = np.cumsum(shares)
    assert np.abs(drawn - due).max() <= 0.5 + 1e-9, "of two each is within half a step"
    assert everyone[0][60:] == ["small"] * 15


@pytest.mark.parametrize("by_save", [True, False])
def test_a_mixture_by_step_goes_on_from_any_step(tmp_path, by_save):
    def whole(mixture):
        return [seen(batch) for _ in mixture.epochs(3) for batch in mixture]

    weights = ByStep([(0, {"large": 1, "small": 0}), (20, {"large": 1, "small": 3})])
    with mixed(single_world(), tmp_path, weights=weights, steps=9) as mixture:
        uninterrupted = whole(mixture)
    for stop in range(1, 27):
        begun = []
        with mixed(single_world(), tmp_path, weights=weights, steps=9) as mixture:
            for _ in mixture.epochs(3):
                for batch in mixture:
                    begun.append(seen(batch))
                    if len(begun) == stop:
                        break
                if len(begun) == stop:
                    break
            mixture.save(tmp_path / "saved")
            state = mixture.state_dict()
        with mixed(single_world(), tmp_path, weights=weights, steps=9) as mixture:
            if by_save:
                mixture.restore(tmp_path / "saved")
            else:
                mixture.load_state_dict(state)
            assert begun + whole(mixture) == uninterrupted, f"stopped after {stop}"


def test_set_epoch_finds_the_weights_of_its_steps(tmp_path):
    def names(mixture):
        return [batch["dataset"] for batch in mixture]

    with mixed(single_world(), tmp_path, weights=ByStep(by_step), steps=15) as mixture:
        epochs = [names(mixture) for _ in mixture.epochs(5)]
        mixture.set_epoch(1)
        assert names(mixture) == epochs[1]
        mixture.set_epoch(4)
        assert names(mixture) == epochs[4] == ["small"] * 15
