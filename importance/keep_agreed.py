"""Hide what the model, once it has learned a little, still calls wrong: for labels not trusted."""

from dataclasses import KW_ONLY, dataclass
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray

from dataio.base.checked import Count, Share, checked
from dataio.plan.history import Candidates, ScoreColumn
from dataio.plan.policies import Selection
from importance.threshold import key_bits, loss_keys, lowest_of_each

MOST_CLASSES = 1 << 16


@checked
@dataclass(frozen=True)
class KeepAgreed:
    """Hide rows that were predicted wrong at last, at most ``fraction`` of the rows of each class.

    Early in training a network agrees with labels that follow from what it sees, and only later
    learns wrong ones by heart. So of the rows whose label it does not predict those of the highest
    loss are left out; each is passed forward again, and comes back once the model agrees. On
    data with few wrong labels this leaves out the rows that teach most: `docs/importance.md` says
    how far it was measured to win.

    Nothing is hidden before epoch ``begins``, nor a row that was never reported. Gradients are not
    weighted, and steps that not all replicas fill are padded, not topped up with hidden rows.

    Args:
        fraction: Largest share of each class to hide, in [0, 1).
        label: Field of one whole number a sample, such as its class; the fields of a loader must
            declare it. None: the share is that of all rows, whatever class they are of.
        begins: First epoch that hides rows, >= 1.
        refresh_every: Hidden rows get a new score at the end of every so many epochs, >= 1; None:
            never, and they stay hidden.

    Raises:
        ValueError: If a setting is out of range.

    Source: Arpit et al., A Closer Look at Memorization, ICML 2017, section 4, on what is learned
    first; Shen and Sanghavi, Learning with Bad Training Data via Iterative Trimmed Loss
    Minimization, ICML 2019, algorithm 1, on leaving out by loss and scoring again.
    """

    fraction: Share = 0.5
    _: KW_ONLY
    label: str | None = "label"
    begins: Count = 2
    refresh_every: Count | None = 1

    columns: ClassVar[tuple[ScoreColumn, ...]] = ("loss", "correct")
    """The last loss, and whether the row was predicted right."""

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
        classes, num_classes = self._classes(rows)
        sizes = rows.total(np.bincount(classes, minlength=num_classes))
        most = np.floor(self.fraction * sizes).astype(np.int64)
        slots = np.flatnonzero(~rows.scores["correct"] & (rows.scores["epoch"] >= 0))
        wrong = rows.of(slots)
        # The highest losses have the lowest of these
        keys = np.uint64((1 << key_bits(wrong)) - 1) - loss_keys(wrong)
        chosen = lowest_of_each(keys, classes[slots], most, rows.total, num_bits=key_bits(wrong))
        return Selection(hidden=slots[chosen], figures={"called_wrong": float(len(slots))})

    def due(self, hidden: NDArray[np.int64], *, epoch: int) -> NDArray[np.int64]:
        """Choose all hidden slots every ``refresh_every`` epochs, and none in the others."""
        due = self.refresh_every is not None and epoch % self.refresh_every == 0
        return hidden if due else hidden[:0]

    def _classes(self, rows: Candidates) -> tuple[NDArray[np.int64], int]:
        """int64[num_slots]: Each row's class, from 0; and how many there are at most."""
        if self.label is None:
            return np.zeros(len(rows.sample_id), np.int64), 1
        labels = rows.by_field(self.label)
        if labels.dtype.kind not in "iub":
            raise ValueError(
                f"KeepAgreed: the field {self.label!r} is {labels.dtype}, expected whole numbers, "
                "such as a class; name another, or give label=None"
            )
        first, last = int(labels.min()), int(labels.max())
        if last - first >= MOST_CLASSES:
            raise ValueError(
                f"KeepAgreed: the field {self.label!r} goes from {first} to {last}, expected at "
                f"most {MOST_CLASSES} classes; number them from 0, or give label=None"
            )
        return labels[rows.sample_id].astype(np.int64) - first, last - first + 1
