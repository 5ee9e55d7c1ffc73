"""What is remembered of a row: the columns of a pool's scores, and how a report changes them. Pure.

A policy names the columns that it goes by, and no others are kept.
"""

from collections.abc import Iterable
from itertools import pairwise
from typing import Literal, get_args

import numpy as np
from numpy.typing import NDArray

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
