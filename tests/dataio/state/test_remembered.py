"""Ranks that lost others go on with a policy as ones that restore a save, but for lost scores."""

import itertools
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

import shuffle
from dataio import Loader
from dataio.base.errors import StateError
from dataio.plan.history import Scores
from dataio.world import World, run_threads, single_world, thread_worlds
from importance import CostAware, Full, InfoBatch, Kakurenbo, RandomPrune, SeTa, Weighted
from tests.faults.kill.job import outcome
from tests.faults.samples import Job

EPOCHS = 4
POLICIES: dict[str, Any] = {
    "all columns": Full(columns=("loss", "loss_2", "wrong", "forgotten", "history")),
    "infobatch": InfoBatch(0.5, delta=1.0),
    "kakurenbo": Kakurenbo(0.4, tau=0.3, drops=(), alphas=(1.0,), warmup_epochs=0),
    "random": RandomPrune(0.3, delta=1.0),
    "weighted": Weighted([1 + i % 4 for i in range(48)]),
    "by cost": CostAware(0.3),
    "seta": SeTa(0.3),
}
SHUFFLES = {"local": shuffle.Local(), "partial": shuffle.Partial(0.4), "global": shuffle.Global()}


class Left(NamedTuple):
    """What a rank has that lost others."""

    state: dict[str, object]
    remembered: Any
    sample_id: NDArray[np.int64]


class Rest(NamedTuple):
    """What a rank goes on with."""

    hidden: list[int]
    lr_factor: float
    batches: list[tuple[list[int], list[float]]]
    sample_id: NDArray[np.int64]
    scores: Scores


def report(loader: Loader, batch: Any) -> None:
    told = outcome(batch["sample_id"].numpy(), loader.epoch)
    loader.report(batch, **{name: torch.from_numpy(each) for name, each in told.items()})


def train_until(loader: Loader, epoch: int, steps: int | None, *, saves: Path) -> Left:
    """Train up to a step of an epoch, its last one for None, save, and go on a little in vain."""
    remembered, left = loader.remember(), list[Left]()

    def note() -> None:
        loader.save(saves)
        ids = loader._session.pool.sample_ids.copy()
        left.append(Left(loader.state_dict(), remembered, ids))

    for running in loader.epochs(EPOCHS):
        for batch in loader:
            report(loader, batch)
            if left:  # of a step that does not count
                return left[0]
            loader.count(loader.state_dict())
            if (running, loader.step) == (epoch, steps):
                note()
        if (running, steps) == (epoch, None):
            note()
        for batch in loader.refresh():
            report(loader, batch)
    raise AssertionError("the run is over")


def go_on(loader: Loader) -> Rest:
    """Read what is left of an epoch."""
    selection = loader._run.running.plan.selection
    pool = loader._session.pool
    ids, scores = pool.sample_ids.copy(), pool.scores.copy()
    hidden = ids[selection.hidden].tolist()
    rest: Any = [] if loader.is_used_up() else loader
    batches = [(batch["sample_id"].tolist(), batch["weight"].tolist()) for batch in rest]
    return Rest(hidden, loader.lr_factor, batches, ids, scores)


QUICK = {
    ("kakurenbo", "partial", 1, None), ("weighted", "partial", 1, 1), ("by cost", "local", 0, 1),
    ("infobatch", "global", 1, 1), ("infobatch", "local", 1, 1),
}  # fmt: skip
CASES = [
    pytest.param(*case, marks=() if case in QUICK else pytest.mark.nightly)
    for policy, kind, at in itertools.product(POLICIES, SHUFFLES, [(0, 1), (1, 1), (1, None)])
    for case in [(policy, kind, *at)]
]


@pytest.mark.parametrize(("policy", "kind", "epoch", "steps"), CASES)
@pytest.mark.parametrize("comes", [False, True])
def test_those_that_are_left_go_on_as_a_restored_run_but_for_the_scores_of_lost_rows(
    tmp_path, policy, kind, epoch, steps, comes
):
    options = {"importance": POLICIES[policy], "shuffle": SHUFFLES[kind]}
    if kind == "partial":
        options |= {"exclude": [3, 17], "drop_last": policy != "by cost"}
    job = Job((1, 1, 1), "fixed", options=options)
    left: dict[int, Left] = {}

    def first(world: World) -> None:
        loader = job.make(world, tmp_path / "a")
        left[world.rank] = train_until(loader, epoch, steps, saves=tmp_path / "saved")
        loader.__exit__(ConnectionError)

    run_threads(thread_worlds(job.nodes), first)
    lost = left.pop(1)

    def rest(world: World) -> Rest:
        known = [*left.values()][world.rank : world.rank + 1]
        with job.make(world, tmp_path / "b") as loader:
            loader.remember()
            loader.go_on(left[0].state, [None, *(each.remembered for each in known)])
            return go_on(loader)

    def restored(world: World) -> Rest:
        with job.make(world, tmp_path / "c") as loader:
            loader.restore(tmp_path / "saved")
            return go_on(loader)

    nodes = (1, 1, 1) if comes else (1, 1)
    for found, expected in zip(
        run_threads(thread_worlds(nodes), rest),
        run_threads(thread_worlds(nodes), restored),
        strict=True,
    ):
        assert {*expected.hidden} == {*found.hidden}
        assert found[1:3] == expected[1:3]
        assert np.array_equal(found.sample_id, expected.sample_id)
        scores = expected.scores
        if kind == "global":  # the others have what lost ones reported in the epochs before
            same = found.scores["epoch"] >= scores["epoch"]
            assert (scores["epoch"][~same] == epoch).all()
            same &= found.scores["epoch"] == scores["epoch"]
        else:
            same = ~np.isin(found.sample_id, lost.sample_id)
            assert (found.scores["epoch"][~same] == -1).all()
        assert found.scores[same].tobytes() == scores[same].tobytes()


def test_ranks_of_which_none_was_there_do_not_go_on(tmp_path):
    job = Job((1,), "fixed", options={"importance": POLICIES["infobatch"]})
    with job.make(single_world(), tmp_path / "a") as loader:
        next(iter(loader))
        state = loader.state_dict()
    with (
        job.make(single_world(), tmp_path / "a") as loader,
        pytest.raises(StateError, match="which rows epoch 0 hides; start the same command again"),
    ):
        loader.go_on(state, [])
