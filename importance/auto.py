"""Look at the first epochs, and leave rows out only where that was measured to win."""

from dataclasses import KW_ONLY, dataclass, replace
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray

from dataio.base.checked import Count, Fraction, Share, checked
from dataio.plan.history import Candidates, ScoreColumn
from dataio.plan.policies import Selection
from importance.keep_agreed import KeepAgreed
from importance.schedule import run_fraction

BEGINS = 0.4
"""Part of the run after which it decides: what `KeepAgreed` was measured to need."""

PROBABILITY = 1 << 20
"""Probabilities are summed in whole parts of so many, so that every world finds the same sum."""


@checked
@dataclass(frozen=True)
class Auto:
    """Choose between `KeepAgreed` and no hidden rows at all, by whether labels can be trusted.

    Where labels are right, a model that calls a row wrong has often thought of its label second;
    a wrong label follows from nothing that the model could have learned. So it decides once, by the
    *second guess*: of the rows called wrong, the part of the probability beside the predicted class
    that goes to the label; over the share of all rows called right; each above what chance gives,
    and each class with the same weight. Among fewer than three classes there is no second guess,
    and all rows stay.

    It is `KeepAgreed` from then on if the second guess is below ``second_guess``, else `Full`. The
    figures ``second_guess`` and ``keeps_agreed`` (1 or 0) say what it saw and chose, every epoch.
    Wrong labels that are always those of the most similar class look right to it.

    Args:
        fraction: Largest share of each class to hide, in [0, 1).
        label: Field of one whole number a sample, its class; the fields of a loader must declare
            it. Reported losses must be cross-entropies, in nats.
        begins: The epoch before which it decides, >= 1; None: that after two fifths of the run.
        second_guess: Least second guess with which labels are trusted, in [0, 1]; as measured on
            right labels and on 10 to 40 % wrong ones, with and without near duplicates
            (``docs/results/selection.md``).
        refresh_every: Hidden rows get a new score at the end of every so many epochs, >= 1; None:
            never.

    Raises:
        ValueError: If a setting is out of range.
    """

    fraction: Share = 0.5
    _: KW_ONLY
    label: str = "label"
    begins: Count | None = None
    second_guess: Fraction = 0.36
    refresh_every: Count | None = 1

    columns: ClassVar[tuple[ScoreColumn, ...]] = ("loss", "confidence", "correct")
    """The last loss, and how the row was predicted."""

    @property
    def by_fields(self) -> tuple[str, ...]:
        """The field of the classes."""
        return (self.label,)

    @property
    def _keep_agreed(self) -> KeepAgreed:
        every = self.refresh_every
        return KeepAgreed(self.fraction, label=self.label, begins=1, refresh_every=every)

    def select(self, rows: Candidates, *, epoch: int, num_epochs: int | None) -> Selection:
        """Select the rows of one pool for an epoch. Collective where ``rows.total`` is.

        Raises:
            ValueError: If labels are not whole numbers, there are too many of them, or ``begins``
                is None and the length of the run is not known.
        """
        if not self._has_begun(epoch, num_epochs):
            return Selection()
        known = {n: rows.before[n] for n in ("second_guess", "keeps_agreed") if n in rows.before}
        note = ""
        if not known:
            seen = self._second_guess(rows)
            if seen is None:  # as after a start without scores: it decides an epoch later
                return Selection()
            keeps = seen < self.second_guess
            known = {"second_guess": seen, "keeps_agreed": float(keeps)}
            note = (
                f"labels are {'not ' if keeps else ''}trusted, as the second guess is {seen:.2f} "
                f"(trusted from {self.second_guess}): "
                f"{'what is called wrong is hidden' if keeps else 'all rows stay'}"
            )
        if not known["keeps_agreed"]:
            return Selection(figures=known, note=note)
        chosen = self._keep_agreed.select(rows, epoch=epoch, num_epochs=num_epochs)
        return replace(chosen, figures={**chosen.figures, **known}, note=note)

    def due(self, hidden: NDArray[np.int64], *, epoch: int) -> NDArray[np.int64]:
        """Choose all hidden slots every ``refresh_every`` epochs, and none in the others."""
        return self._keep_agreed.due(hidden, epoch=epoch)

    def _has_begun(self, epoch: int, num_epochs: int | None) -> bool:
        if self.begins is not None:
            return epoch >= self.begins
        otherwise = "Auto(begins=...), an epoch"
        return epoch > 0 and run_fraction("Auto", epoch, num_epochs, otherwise=otherwise) >= BEGINS

    def _second_guess(self, rows: Candidates) -> float | None:
        """Measure how far labels follow second guesses as they do first ones; see the class.

        Returns:
            About 0 for labels that follow from nothing, 1 where none are called wrong, or there
            are two classes; None if fewer than half of the rows were reported.
        """
        classes, num_classes = self._keep_agreed._classes(rows)
        reported = rows.scores["epoch"] >= 0
        wrong = np.flatnonzero(~rows.scores["correct"] & reported)
        # float64[num_wrong]: what the predicted class leaves to the others, and the label's part
        rest = 1 - rows.scores["confidence"][wrong].astype(np.float64)
        mine = np.minimum(np.exp(-rows.scores["loss"][wrong].astype(np.float64)), rest)

        def by_class(
            slots: NDArray[np.int64], values: NDArray[np.float64] | None = None
        ) -> NDArray[np.int64]:
            whole = None if values is None else np.rint(values * PROBABILITY)
            counts = np.bincount(classes[slots], whole, minlength=num_classes)
            return counts.astype(np.int64)

        sums = [by_class(np.flatnonzero(reported)), by_class(wrong)]
        sums += [by_class(wrong, mine), by_class(wrong, rest)]
        # float64[4, classes there are]
        totals = rows.total(np.concatenate(sums)).reshape(4, -1).astype(np.float64)
        if 2 * totals[0].sum() < rows.num_samples:
            return None
        totals = totals[:, totals[0] > 0]
        # Each class weighs as much: of rare ones, whose label is seldom guessed at all, too
        num_rows, num_wrong, label_part, rest_part = (totals / totals[0]).sum(axis=1)
        if len(totals[0]) < 3 or not rest_part:
            return 1.0
        first = _above_chance(1 - num_wrong / num_rows, len(totals[0]))
        second = _above_chance(label_part / rest_part, len(totals[0]) - 1)
        # Nothing can be said of a model that has learned nothing yet
        return float(max(second, 0.0) / first) if first > 0 else 1.0


def _above_chance(share: float, num_choices: int) -> float:
    """Scale a share so that a draw among the choices has 0, and 1 stays 1."""
    return (share - 1 / num_choices) / (1 - 1 / num_choices)
