"""Hide what the model called wrong in most epochs so far: for labels that are not trusted."""

from dataclasses import KW_ONLY, dataclass

import numpy as np
from numpy.typing import NDArray

from dataio.base.checked import checked
from dataio.plan.candidates import Candidates
from dataio.plan.history import MOST_TIMES, ScoreColumn
from dataio.plan.policies import Selection
from importance.keep_agreed import KeepAgreed
from importance.schedule import check_begins, check_fraction
from importance.threshold import count_keys, lowest_of_each


@checked
@dataclass(frozen=True)
class OftenWrong:
    """Hide rows that were wrong in over half of the epochs, at most ``fraction`` of each class.

    `KeepAgreed` goes by the last prediction, this by all of them: a wrong label that has been
    learned by heart was wrong for long, and a right one that is missed once was not. The most often
    wrong go first, of equal ones those of lower places. Hidden rows are passed forward at the end
    of every epoch, so that each epoch counts; a row comes back once the model has agreed with it in
    half of all epochs. Where reports are missing, as after a start without scores, fewer are
    hidden.

    Nothing is hidden before epoch ``begins``. Gradients are not weighted, and steps that not all
    replicas fill are padded, not topped up with hidden rows.

    Args:
        fraction: Largest share of each class to hide, in [0, 1).
        label: Field of one whole number a sample, such as its class; the fields of a loader must
            declare it. None: the share is that of all rows, whatever class they are of.
        begins: First epoch that hides rows, >= 1.

    Raises:
        ValueError: If a setting is out of range.

    Source: the correctness of Swayamdipta et al., Dataset Cartography, EMNLP 2020, section 2, which
    counts over a whole run; here the counts are those up to now.
    """

    fraction: float = 0.5
    _: KW_ONLY
    label: str | None = "label"
    begins: int = 2

    def __post_init__(self) -> None:
        check_fraction("OftenWrong: fraction", self.fraction, below_one=True)
        check_begins("OftenWrong", self.begins)

    @property
    def columns(self) -> tuple[ScoreColumn, ...]:
        """How often it was reported wrong."""
        return ("wrong",)

    @property
    def by_fields(self) -> tuple[str, ...]:
        """The field of the classes."""
        return () if self.label is None else (self.label,)

    def select(self, rows: Candidates, *, epoch: int, num_epochs: int | None) -> Selection:
        """Select the rows of one pool for an epoch. Collective where ``rows.total`` is.

        Raises:
            ValueError: If labels are not whole numbers, or there are too many of them.
        """
        if epoch < self.begins:
            return Selection()
        classes, num_classes = KeepAgreed(label=self.label)._classes(rows)
        sizes = rows.total(np.bincount(classes, minlength=num_classes))
        most = np.floor(self.fraction * sizes).astype(np.int64)
        slots = np.flatnonzero(rows.scores["wrong"].astype(np.int64) * 2 > epoch)
        # The most often wrong have the lowest of these
        keys, num_bits = count_keys(rows.of(slots), MOST_TIMES - rows.scores["wrong"][slots])
        chosen = lowest_of_each(keys, classes[slots], most, rows.total, num_bits=num_bits)
        return Selection(hidden=slots[chosen], figures={"often_wrong": float(len(slots))})

    def due(self, hidden: NDArray[np.int64], *, epoch: int) -> NDArray[np.int64]:
        """Choose all hidden slots: each epoch counts."""
        return hidden
