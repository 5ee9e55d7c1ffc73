"""Hide the rows whose loss has stopped changing its course: what they taught, the model has."""

from dataclasses import KW_ONLY, dataclass
from typing import Annotated, ClassVar

import numpy as np
from numpy.typing import NDArray

from dataio.base.checked import Count, Range, checked
from dataio.plan.history import EARLIER, Candidates, ScoreColumn
from dataio.plan.policies import Selection
from importance.threshold import BLOCK


@checked
@dataclass(frozen=True)
class StoppedLearning:
    """Hide rows of which the last three second differences of the loss are near 0.

    The second difference at an epoch is its loss, less twice the one before, plus the one before
    that. Rows whose last three have a mean absolute value below ``below`` are left out, each is
    passed forward again, and comes back once its loss moves. Each row is judged by itself: no
    pool need know of another's. So nothing is hidden in the first five epochs, and how much is
    follows from the losses. Gradients are not weighted, the learning rate stays as it is, and steps
    that not all replicas fill are padded.

    Losses are kept as multiples of 1/1024, so a ``below`` of one thousandth means that the three
    absolute values sum to at most three of these. The published code waits for one difference more
    before it hides a row, and takes its default twice as high for CIFAR-100.

    Args:
        below: The mean absolute second difference from which on a row stays, > 0.
        refresh_every: Hidden rows get a new score at the end of every so many epochs, >= 1; None:
            never, and they stay hidden.

    Raises:
        ValueError: If a setting is out of range.

    Source: Yuan et al., Instance-dependent Early Stopping, ICLR 2025, section 3.
    """

    below: Annotated[float, Range(0, np.inf, "()")] = 1e-3
    _: KW_ONLY
    refresh_every: Count | None = 1

    columns: ClassVar[tuple[ScoreColumn, ...]] = EARLIER
    """The last five losses."""

    def select(self, rows: Candidates, *, epoch: int, num_epochs: int | None) -> Selection:
        """Select the rows of one pool for an epoch."""
        still = np.empty(len(rows.scores), np.bool_)
        for start in range(0, len(still), BLOCK):
            part = rows.scores[start : start + BLOCK]
            # float32[5, block], then [3, block]; infinite where there were no five reports
            losses = np.stack([part[name] for name in EARLIER])
            with np.errstate(invalid="ignore"):
                bends = np.abs(np.diff(losses, n=2, axis=0))
            # What is no number is below nothing
            still[start : start + BLOCK] = bends.sum(axis=0) < len(bends) * self.below
        return Selection(hidden=np.flatnonzero(still))

    def due(self, hidden: NDArray[np.int64], *, epoch: int) -> NDArray[np.int64]:
        """Choose all hidden slots every ``refresh_every`` epochs, and none in the others."""
        due = self.refresh_every is not None and epoch % self.refresh_every == 0
        return hidden if due else hidden[:0]
