"""Rows for a policy to choose among, in one pool or in several, without a loader."""

from collections.abc import Callable, Sequence
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from dataio.base.seeding import key
from dataio.plan.history import (
    COLUMNS,
    EARLIER,
    ByField,
    Candidates,
    Scores,
    no_field,
    score_dtype,
    unscored,
)
from dataio.plan.policies import Importance, Selection
from dataio.world import World, run_threads, thread_worlds

SCORE_DTYPE = score_dtype(COLUMNS)

LAST_DTYPE = score_dtype(("loss", "loss_mean", "confidence", "correct", "forgotten"))
"""Without earlier losses and other counts: rows of (loss, loss_mean, confidence, correct,
forgotten, epoch)."""

Result = TypeVar("Result")


def reported(loss: Sequence[float] | NDArray[np.floating]) -> Scores:
    """Rows of some losses, the same each time, right, sure and known."""
    scores = unscored(len(loss), SCORE_DTYPE)
    for name in (*EARLIER, "loss_second", "loss_mean"):
        scores[name] = loss
    scores["confidence"], scores["correct"], scores["epoch"] = 1, True, 0
    return scores


def one_pool(scores: Scores, *, seed: int = 0, epoch: int = 0) -> Candidates:
    """All rows of a job in one pool, row i of sample i."""
    stream = key(seed, "importance", epoch=epoch)
    return Candidates(
        scores, np.arange(len(scores)), len(scores), stream, by_field=field_of(len(scores))
    )


def field_of(num_samples: int) -> ByField:
    """Stand in for what a loader reads: the labels of `tests.memory_source.MemorySource`."""
    return lambda name: np.arange(num_samples) % 10 if name == "label" else no_field(name)


def scattered(num_samples: int, num_pools: int, *, seed: int = 0) -> list[NDArray[np.int64]]:
    """Deal samples to pools of any sizes, in any order; a pool may be empty."""
    rng = np.random.default_rng(seed)
    home = rng.integers(0, num_pools, num_samples)
    shuffled = rng.permutation(num_samples)
    return [shuffled[home[shuffled] == pool] for pool in range(num_pools)]


def in_pools(
    scores: Scores,
    pools: Sequence[NDArray[np.int64]],
    function: Callable[[Candidates], Result],
    *,
    seed: int = 0,
    epoch: int = 0,
) -> list[Result]:
    """Ask of every pool at once, each in a thread, with totals over all of them."""
    whole = one_pool(scores, seed=seed, epoch=epoch)

    def ask(world: World) -> Result:
        def total(values: NDArray[np.int64]) -> NDArray[np.int64]:
            return world.allreduce(values, op="sum", doing="try")

        mine = pools[world.rank]
        return function(
            Candidates(scores[mine], mine, len(scores), whole.stream, total, whole.by_field)
        )

    return run_threads(thread_worlds([1] * len(pools)), ask)


def select_in_pools(
    policy: Importance,
    scores: Scores,
    pools: Sequence[NDArray[np.int64]],
    *,
    epoch: int,
    num_epochs: int | None,
    seed: int = 0,
) -> list[Selection]:
    """Select in every pool at once."""

    def select(rows: Candidates) -> Selection:
        return policy.select(rows, epoch=epoch, num_epochs=num_epochs)

    return in_pools(scores, pools, select, seed=seed, epoch=epoch)
