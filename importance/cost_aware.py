"""Train rows as often as they are worth what they cost, and weigh them so that none counts less."""

from dataclasses import KW_ONLY, dataclass
from typing import ClassVar, Literal

import numpy as np
from numpy.typing import NDArray

from dataio.base.checked import Fraction, checked
from dataio.plan.history import QUANTUM, Candidates, ScoreColumn
from dataio.plan.policies import Selection
from importance.infobatch import MOST_LOSS
from importance.schedule import annealing
from importance.threshold import BLOCK

LEVELS_PER_DOUBLING = 32
"""Rows whose worth for a second is within 2 % are treated alike."""

NUM_LEVELS = 64 * LEVELS_PER_DOUBLING
MICRO = 1e-6
MOST_COST = 2.0**21
"""Microseconds of a row, two seconds: sums of 2**32 rows stay exact."""

BISECTIONS = 64


@checked
@dataclass(frozen=True)
class CostAware:
    """Show each row with a probability that follows from what it is worth and what it costs.

    A row that would cost c seconds and is worth v is visible with the probability
    p = min(1, scale * v / sqrt(c)), at least ``floor``, and then weighs 1 / p, so that the weighted
    sum of gradients is the full sum in expectation. The scale is such that the visible rows are
    expected to cost ``budget`` of what all rows would. For a given budget these are the
    probabilities of least variance, if gradients are as long as rows are worth: rows that lie in
    the cache come often, those that are read from a slow source seldom, with a weight to match.

    What rows cost is measured while the run trains (`dataio.plan.costs`): reading from the source,
    if the row does not stay in a cache with a quota; making batches; steps. Until an epoch has been
    measured, all rows cost alike. Rows are drawn by their places, anew each epoch: for the same
    costs the same samples are hidden on any ranks and nodes. Two runs measure other costs, so they
    may hide other rows; a run that goes on from a save finds its epoch's rows there.

    Args:
        budget: Share of what an epoch of all rows costs to spend in each, in (0, 1].
        floor: Least probability, in (0, budget]: no row weighs more than 1 / floor.
        by_cost: False: as if all rows cost alike, so that ``budget`` is the share of rows.
        value: ``"rows"``: all are worth the same. ``"loss"``: a row is worth its last loss, which
            it keeps while it is hidden; one that was never reported, the mean of the others.
        debias: Weights are the probabilities to the power of minus this, in [0, 1], scaled so that
            the visible ones are expected to sum to the number of rows. 1: unbiased. 0: all alike,
            which varies least, but lets cheap rows count more; where what a row costs has nothing
            to do with what it shows, as with rows that a quota keeps by chance, that may be better.
        delta: Fraction of the run after which every row is visible, in [0, 1].

    Raises:
        ValueError: If a setting is out of range.

    Source: optimal allocation by size and cost, Neyman, JRSS 1934, and Cochran, Sampling
    Techniques, 1977, section 5.5; probabilities in proportion to gradients' lengths, Zhao and
    Zhang, ICML 2015, with losses in their place as in Katharopoulos and Fleuret, 2017.
    """

    budget: Fraction = 0.5
    _: KW_ONLY
    floor: float = 0.1
    by_cost: bool = True
    value: Literal["loss", "rows"] = "rows"
    debias: Fraction = 1.0
    delta: Fraction = 1.0

    columns: ClassVar[tuple[ScoreColumn, ...]] = ("loss", "bytes")
    """The last loss, and the bytes that a row takes."""

    def __post_init__(self) -> None:
        # Written so that NaN fails too.
        if not 0 < self.floor <= self.budget:
            raise ValueError(
                f"CostAware: floor is {self.floor} and budget is {self.budget}, expected 0 < floor "
                "<= budget; 0.1 lets no row weigh more than 10"
            )

    def select(self, rows: Candidates, *, epoch: int, num_epochs: int | None) -> Selection:
        """Select the rows of one pool for an epoch. Collective where ``rows.total`` is.

        Raises:
            ValueError: If ``delta`` < 1 and the length of the run is not known.
        """
        never = "CostAware(delta=1.0), which never goes back to full data"
        at_the_end = annealing("CostAware", epoch, num_epochs, delta=self.delta, otherwise=never)
        if at_the_end or self.budget == 1:
            return Selection()
        loss = rows.scores["loss"]
        cost_s = rows.cost_s if self.by_cost and rows.cost_s is not None else None
        # float32[num_slots], at least a microsecond
        cost = np.ones(len(loss), np.float32) if cost_s is None else _in_micros(cost_s)
        level = _levels(_values(loss, rows) if self.value == "loss" else None, cost)
        counts = np.bincount(level, minlength=NUM_LEVELS)
        # float64, but whole numbers below 2**53, so that no sum was rounded
        costs = np.bincount(level, cost, minlength=NUM_LEVELS)
        # int64[2, NUM_LEVELS]
        levels = rows.total(np.concatenate([counts, np.rint(costs).astype(np.int64)]))
        counts, costs = levels.reshape(2, NUM_LEVELS)
        shown = _numbers_shown(costs, rows.num_samples, budget=self.budget, floor=self.floor)
        share = shown / rows.num_samples
        weights = share**-self.debias
        if self.debias < 1:
            weights *= rows.num_samples / float(counts @ (share * weights))
        return Selection(
            hidden=np.flatnonzero(rows.places >= shown[level]),
            weights=weights.astype(np.float32)[level],
            figures={"expected_cost_fraction": float(costs @ share / max(int(costs.sum()), 1))},
        )

    def due(self, hidden: NDArray[np.int64], *, epoch: int) -> NDArray[np.int64]:
        """Choose none: a hidden row keeps its old loss."""
        return hidden[:0]


def _in_micros(cost_s: NDArray[np.float32]) -> NDArray[np.float32]:
    """float32[n]: Whole microseconds, 1 at least."""
    micros: NDArray[np.float32] = np.rint(cost_s / np.float32(MICRO))
    return np.clip(micros, np.float32(1), np.float32(MOST_COST))


def _values(loss: NDArray[np.float32], rows: Candidates) -> NDArray[np.float32]:
    """float32[n]: What each row is worth, > 0: its last loss, or the mean of those known."""
    known = np.isfinite(loss)
    bounded = np.clip(np.where(known, loss, 0), 0, np.float32(MOST_LOSS))
    quanta = np.rint(bounded.sum(dtype=np.float64) / QUANTUM)
    total, num_known = rows.total(np.array([quanta, known.sum()], np.int64)).tolist()
    mean = total * QUANTUM / num_known if num_known else 1.0
    return np.maximum(np.where(known, bounded, np.float32(mean)), np.float32(QUANTUM))


def _levels(value: NDArray[np.float32] | None, cost: NDArray[np.float32]) -> NDArray[np.int64]:
    """int64[n], in [0, NUM_LEVELS): Logarithm of what each row is worth for the root of its cost.

    A value is a quantum to 2**20, a cost 1 to 2**21: neither end is reached.
    """
    levels = np.empty(len(cost), np.int64)
    for start in range(0, len(cost), BLOCK):
        part = slice(start, start + BLOCK)
        worth = -0.5 * np.log2(cost[part])
        if value is not None:
            worth += np.log2(value[part])
        levels[part] = np.rint(worth * LEVELS_PER_DOUBLING)
    return levels + NUM_LEVELS // 2


def _numbers_shown(
    spent: NDArray[np.int64], num_samples: int, *, budget: float, floor: float
) -> NDArray[np.int64]:
    """Find how many of all places are visible at each level.

    Args:
        spent: int64[NUM_LEVELS]: What the rows of each level cost together, over all pools.
        num_samples: Rows of all pools.
        budget: Share of the whole to spend.
        floor: Least share of the places.

    Returns:
        int64[NUM_LEVELS], in [1, num_samples]: A row of the level is visible where its place is
        below.
    """
    worth = np.exp2((np.arange(NUM_LEVELS) - NUM_LEVELS // 2) / LEVELS_PER_DOUBLING)
    aim = budget * float(spent.sum())
    low, high = -80.0, 80.0

    def shares(log_scale: float) -> NDArray[np.float64]:
        return np.asarray(np.clip(2.0**log_scale * worth, floor, 1.0))

    for _ in range(BISECTIONS):
        middle = (low + high) / 2
        if float(spent @ shares(middle)) > aim:
            high = middle
        else:
            low = middle
    shown = np.rint(shares(low) * num_samples).astype(np.int64)
    return np.maximum(shown, 1)
