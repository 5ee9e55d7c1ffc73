"""Which rows were hardest to learn, by what was remembered of them. Pure."""

from typing import Literal, get_args

import numpy as np
from numpy.typing import NDArray

from dataio.plan.history import Scores

Measure = Literal["loss_mean", "loss", "forgotten", "confidence", "wrong"]
MEASURES: tuple[Measure, ...] = get_args(Measure)
"""The first of them that was saved is what rows are ranked by, by default."""


def reported_rows(scores: Scores, *, by: Measure) -> NDArray[np.int64]:
    """Find the rows that ``by`` was ever reported of.

    Args:
        scores: With the column ``by``.
        by: What rows are to be ranked by.
    """
    reported = scores["epoch"] >= 0
    if by == "loss_mean" and "loss" in (scores.dtype.names or ()):
        # A run that went on with more columns: its first report of a finite loss makes a mean
        reported &= np.isfinite(scores["loss_mean"]) | ~np.isfinite(scores["loss"])
    return np.flatnonzero(reported)


def hardness(scores: Scores, *, by: Measure) -> NDArray[np.float32]:
    """Measure how hard each row is: more is harder.

    Forgotten most are the rows that were right and then wrong; but those that never were right,
    which have nothing to forget, come before them (Toneva et al., ICLR 2019).
    Confidence is that in the predicted class. Where it is known whether that was right, rows that
    were surely something else come first, then unsure ones; else only unsure ones.
    Of rows that were wrong as often, those of higher last loss come first, where that is known.

    Returns:
        float32[len(scores)].
    """
    values = scores[by].astype(np.float32)
    if by == "forgotten":
        return np.where(scores["correct"] | (values > 0), values, np.float32(np.inf))
    if by == "wrong" and "loss" in (scores.dtype.names or ()):
        # In [0, 1), so that it decides among equal counts alone
        part: NDArray[np.float32] = 1 - 1 / (1 + np.fmax(scores["loss"], np.float32(0)))
        return values + np.float32(0.999) * part
    if by == "confidence" and "correct" in (scores.dtype.names or ()):
        return np.where(scores["correct"], -values, values)
    return -values if by == "confidence" else values


def within_classes(values: NDArray[np.float32], labels: NDArray[np.generic]) -> NDArray[np.float32]:
    """Measure how hard each row is for its class: which share of the class's rows is less hard.

    So a class that is hard as a whole does not fill the list. Of equal rows of a class half counts;
    of equally hard rows of two classes that of the larger class is harder.

    Args:
        values: float32[num_rows], no nan; more is harder.
        labels: [num_rows]: Numbers or text.

    Returns:
        float32[num_rows], in (0, 1).
    """
    if not len(values):
        return values.astype(np.float32)
    _, classes = np.unique(labels, return_inverse=True)
    order = np.lexsort((values, classes))
    # int64[num_rows]: places in the run of the own class, from 0
    sizes = np.bincount(classes)
    starts = np.cumsum(sizes) - sizes
    place = np.arange(len(values)) - starts[classes[order]]
    # Rows that are alike share the middle of their places
    ordered, of = values[order], classes[order]
    same = np.r_[False, (ordered[1:] == ordered[:-1]) & (of[1:] == of[:-1])]
    group = np.cumsum(~same) - 1
    middle = np.bincount(group, place) / np.bincount(group)
    shares = np.empty(len(values), np.float32)
    shares[order] = (middle[group] + 0.5) / sizes[classes[order]]
    return shares


def hardest_rows(values: NDArray[np.float32], *, top: int) -> NDArray[np.int64]:
    """Choose the rows of the largest values, largest first; of equal ones the earlier row.

    Args:
        values: float32[num_rows], no nan.
        top: How many, >= 1; all rows where there are fewer.

    Returns:
        int64[min(top, num_rows)].
    """
    top = min(top, len(values))
    if top == 0:
        return np.empty(0, np.int64)
    # A partition finds the last value in linear time; only the chosen rows are sorted
    last = np.partition(values, len(values) - top)[len(values) - top]
    above = np.flatnonzero(values > last)
    chosen = np.concatenate([above, np.flatnonzero(values == last)[: top - len(above)]])
    return chosen[np.lexsort((chosen, -values[chosen]))]


def hardest_of_each(
    values: NDArray[np.float32], labels: NDArray[np.generic], *, top: int
) -> list[NDArray[np.int64]]:
    """Choose the hardest rows of each label, as `hardest_rows` does.

    Args:
        values: float32[num_rows], no nan.
        labels: [num_rows]: Numbers or text.
        top: How many of each label, >= 1.

    Returns:
        For each label that there is, in order, int64[up to top].
    """
    # int64[num_rows]: label by label, within one in the order of rows
    order = np.argsort(labels, kind="stable")
    ordered = labels[order]
    groups = np.split(order, np.flatnonzero(ordered[1:] != ordered[:-1]) + 1)
    return [group[hardest_rows(values[group], top=top)] for group in groups]
