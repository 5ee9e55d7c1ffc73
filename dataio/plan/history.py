"""What is remembered of a row: the columns of a pool's scores, and how a report changes them. Pure.

A policy names the columns that it goes by, and no others are kept. It is handed `Candidates`: the
rows that it chooses among, and the means to agree with other pools. Nothing in there depends on
where a row lies: a policy that goes by scores, places and totals hides the same samples on any
number of nodes.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import pairwise
from typing import Literal, get_args

import numpy as np
from numpy.typing import NDArray

from dataio.base.permutation import permute
from dataio.base.seeding import Key
from dataio.plan.exclusion import Exclusion

ScoreColumn = Literal[
    "loss", "loss_1", "loss_2", "loss_3", "loss_4", "loss_second", "loss_mean",
    "confidence", "correct", "forgotten", "wrong", "epoch", "bytes", "history",
]  # fmt: skip
"""``loss``: float32, of the last report, inf before the first; ``loss_1`` to ``loss_4``: float32,
of the one before it to the fourth before it; ``loss_second``: float32, of the first report in an
epoch after the first one, inf before: what later losses are held against, as a loss of the first
epoch says mostly how early in it the row came; ``loss_mean``: float32, exponential mean of all
losses; ``confidence``: float32 in [0, 1]; ``correct``: bool, whether the row was predicted right at
last; ``forgotten``: uint16, how often it was right and then wrong (Toneva et al., ICLR 2019);
``wrong``: uint16, how often it was reported wrong; ``epoch``: int32, of the last report, -1 before
the first; ``bytes``: uint32, of the row as it is stored, 0 where it is not known, which no report
changes; ``history``: float16[`HISTORY_EPOCHS`], the losses of the last epochs, that of epoch e at
place e modulo `HISTORY_EPOCHS`, nan where an epoch had no report: read it with `losses_in`. Losses,
their means and confidences are multiples of `QUANTUM`, but for those of ``history``."""

EARLIER: tuple[ScoreColumn, ...] = ("loss", "loss_1", "loss_2", "loss_3", "loss_4")
"""Losses from the last report to the fourth before it: each is kept where a later name is."""

Scores = NDArray[np.void]
"""A structured array of some columns, in the order of `COLUMNS`, a row a slot."""

COLUMNS: tuple[ScoreColumn, ...] = get_args(ScoreColumn)

QUANTUM = 1 / 1024
"""Losses are rounded to this: a last-bit difference between two runs selects the same rows."""

MEAN_DECAY = 0.8
"""What an exponential mean keeps of itself at each report."""

HISTORY_EPOCHS = 32
"""Epochs whose losses ``history`` keeps, two bytes each: 64 a row."""

MOST_TIMES = np.uint16(2**16 - 1)
"""Where ``forgotten`` and ``wrong`` stop counting."""

_KINDS = {
    **dict.fromkeys((*EARLIER, "loss_second", "loss_mean"), "<f4"), "confidence": "<f4",
    "correct": "?", "forgotten": "<u2", "wrong": "<u2", "epoch": "<i4", "bytes": "<u4",
    "history": f"{HISTORY_EPOCHS}<f2",
}  # fmt: skip
_OF_OUTCOMES = ("confidence", "correct", "forgotten", "wrong")
_UNREPORTED = {
    **dict.fromkeys((*EARLIER, "loss_second", "loss_mean"), np.inf), "epoch": -1, "history": np.nan,
}  # fmt: skip


def score_dtype(columns: Iterable[ScoreColumn]) -> np.dtype[np.void]:
    """Lay out the scores of a policy: its columns, and what these need.

    Args:
        columns: Their names. ``epoch`` is always there; ``correct`` where ``forgotten`` is;
            ``loss`` where ``history`` is; all of `EARLIER` before one of these.

    Raises:
        ValueError: If there is no such column.
    """
    wanted = {*columns, "epoch"}
    for name in wanted.difference(COLUMNS):
        raise ValueError(
            f"scores: there is no column {name!r}; expected some of {', '.join(COLUMNS)}"
        )
    if "forgotten" in wanted:
        wanted.add("correct")
    if "history" in wanted:
        wanted.add("loss")
    wanted.update(*(EARLIER[:ago] for ago, name in enumerate(EARLIER) if name in wanted))
    return np.dtype([(name, _KINDS[name]) for name in COLUMNS if name in wanted], align=False)


def needs_outcome(columns: Iterable[ScoreColumn]) -> bool:
    """Whether some of the columns follow from what a report says beside the loss."""
    return not set(columns).isdisjoint(_OF_OUTCOMES)


def unscored(num_slots: int, dtype: np.dtype[np.void]) -> Scores:
    """Make scores[num_slots]: no report yet."""
    scores = np.zeros(num_slots, dtype)
    for name, value in _UNREPORTED.items():
        if name in (dtype.names or ()):
            scores[name] = value
    return scores


def record(
    scores: Scores,
    slots: NDArray[np.int64],
    *,
    loss: NDArray[np.float32],
    correct: NDArray[np.bool_] | None,
    confidence: NDArray[np.float32] | None,
    epoch: int,
) -> None:
    """Write the reports of some rows, quantised. A missing outcome counts as wrong and unsure.

    Args:
        scores: Of the pool.
        slots: int64[n]: Distinct rows.
        loss: float32[n]: No nan.
        correct: bool[n].
        confidence: float32[n], in [0, 1].
        epoch: Of the reports.
    """
    # Field by field: whole entries of a structured array are gathered and put back far slower.
    names = scores.dtype.names or ()
    right = np.zeros(len(slots), np.bool_) if correct is None else correct
    # The oldest first, so that each takes what the one behind it still holds
    for later, name in reversed([*pairwise(EARLIER)]):
        if name in names:
            scores[name][slots] = scores[later][slots]
    if "loss" in names:
        scores["loss"][slots] = _quantised(loss)
    if "loss_mean" in names:
        older = scores["loss_mean"][slots]
        older = np.where(np.isfinite(older), older, loss)
        scores["loss_mean"][slots] = _quantised(MEAN_DECAY * older + (1 - MEAN_DECAY) * loss)
    if "loss_second" in names:
        second, last = scores["loss_second"][slots], scores["epoch"][slots]
        is_second = ~np.isfinite(second) & (last >= 0) & (last < epoch)
        scores["loss_second"][slots] = np.where(is_second, _quantised(loss), second)
    if "forgotten" in names:
        lost = scores["correct"][slots] & ~right
        scores["forgotten"][slots] = _counted(scores["forgotten"][slots], lost)
    if "wrong" in names:
        scores["wrong"][slots] = _counted(scores["wrong"][slots], ~right)
    if "correct" in names:
        scores["correct"][slots] = right
    if "confidence" in names:
        scores["confidence"][slots] = 0.0 if confidence is None else _quantised(confidence)
    if "history" in names:
        _remember(scores, slots, loss, epoch)
    scores["epoch"][slots] = epoch


def losses_in(scores: Scores, epoch: NDArray[np.int64]) -> NDArray[np.float32]:
    """Find what rows reported in some epochs.

    Args:
        scores: scores[n], with the column ``history``.
        epoch: int64[n]: Of each row, or int64[m, 1] for all of them.

    Returns:
        float32[n] or float32[m, n]: nan where a row had no report in that epoch, or has had one
        since in an epoch that is `HISTORY_EPOCHS` or more later.
    """
    ago = scores["epoch"] - epoch
    losses = scores["history"][np.arange(len(scores)), epoch % HISTORY_EPOCHS]
    is_kept = (epoch >= 0) & (ago >= 0) & (ago < HISTORY_EPOCHS)
    return np.where(is_kept, losses, np.float16(np.nan)).astype(np.float32)


def _remember(
    scores: Scores, slots: NDArray[np.int64], loss: NDArray[np.float32], epoch: int
) -> None:
    history = scores["history"]
    since = np.minimum(epoch - scores["epoch"][slots], HISTORY_EPOCHS)
    # The places of epochs that had no report still hold those of a lap before
    for ago in range(1, int(since.max(initial=0))):
        history[slots[since > ago], (epoch - ago) % HISTORY_EPOCHS] = np.nan
    with np.errstate(over="ignore"):  # what float16 does not hold is infinite
        # The sum makes -0.0 a plain 0
        history[slots, epoch % HISTORY_EPOCHS] = loss.astype(np.float16) + np.float16(0)


def _counted(times: NDArray[np.uint16], again: NDArray[np.bool_]) -> NDArray[np.uint16]:
    counted: NDArray[np.uint16] = times + (again & (times < MOST_TIMES))
    return counted


def _quantised(values: NDArray[np.floating]) -> NDArray[np.floating]:
    quanta: NDArray[np.floating] = np.rint(values / QUANTUM)
    # The sum makes -0.0 a plain 0
    return quanta * QUANTUM + 0.0


Total = Callable[[NDArray[np.int64]], NDArray[np.int64]]
"""Adds int64[n] of all pools, element by element, each pool once. Collective: every rank calls it
as often, with as many numbers."""


ByField = Callable[[str], NDArray[np.generic]]
"""Returns dtype[num_samples]: a field's value of every sample of the dataset, by sample id.
Collective the first time that a field is asked for; the same on all ranks."""


def no_field(name: str) -> NDArray[np.generic]:
    """Stand in for the values of a field where no rows are held."""
    raise ValueError(
        f"importance: a policy goes by the field {name!r}, which only a loader can read; give the "
        "policy an array of values by sample id"
    )


def alone(values: NDArray[np.int64]) -> NDArray[np.int64]:
    """Stand in for a total where a pool decides by itself."""
    return values


@dataclass(frozen=True)
class Candidates:
    """The rows of one pool.

    Attributes:
        scores: scores[num_slots]: The columns that the policy named, with all reports of the epoch
            before.
        sample_id: int64[num_slots], each in [0, num_ids).
        num_samples: Rows of all pools together, less those that are left out for good.
        stream: Key of the epoch's places, the same on all ranks.
        total: Sums over all pools.
        by_field: The values of a field that `ByFields.by_fields` names, of all samples.
        before: The figures of what the policy chose for the epoch before; empty where none was
            chosen. A decision that is to last is among them: they are saved and restored with it.
        exclusion: What is left out for good, of which no row is among these; None: nothing.
        cost_s: float32[num_slots]: Seconds that a rank is expected to spend on each row if it is
            visible, > 0, by what was measured before the epoch; asked for by `ByCost.by_cost`.
            None: nothing is known, so all rows cost alike.
    """

    scores: Scores
    sample_id: NDArray[np.int64]
    num_samples: int
    stream: Key
    total: Total = alone
    by_field: ByField = no_field
    before: Mapping[str, float] = field(default_factory=dict)
    exclusion: Exclusion | None = None
    cost_s: NDArray[np.float32] | None = None

    @property
    def num_ids(self) -> int:
        """Samples of the dataset, left out or not: ids are in [0, num_ids)."""
        return self.num_samples if self.exclusion is None else self.exclusion.num_samples

    @cached_property
    def places(self) -> NDArray[np.int64]:
        """int64[num_slots]: Each row's place in a list of all rows, shuffled for this epoch.

        Distinct over all pools, in [0, num_samples): what a policy draws by, and what breaks ties.
        """
        numbers = self.sample_id
        if self.exclusion is not None:
            numbers = self.exclusion.numbers(numbers)
        return permute(numbers, self.num_samples, self.stream)

    def of(self, slots: NDArray[np.int64]) -> "Candidates":
        """Take some of the rows, int64[num_taken]: their keys and places stay what they were."""
        cost_s = None if self.cost_s is None else self.cost_s[slots]
        return replace(
            self, scores=self.scores[slots], sample_id=self.sample_id[slots], cost_s=cost_s
        )
