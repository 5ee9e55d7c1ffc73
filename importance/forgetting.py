"""Hide the rows that are right and were least often forgotten."""

import math
from dataclasses import KW_ONLY, dataclass
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray

from dataio.base.checked import Count, Share, checked
from dataio.plan.history import Candidates, ScoreColumn
from dataio.plan.policies import Selection
from importance.threshold import count_keys, lowest


@checked
@dataclass(frozen=True)
class Forgetting:
    """Hide ``floor(fraction * num_samples)`` rows that are right, the least often forgotten ones.

    A row is forgotten each time that it is reported wrong after it was right. Rows that are wrong
    at last are never hidden, so fewer are where not so many are right; of rows that were forgotten
    equally often those of lower places go first, drawn anew each epoch. Gradients are not weighted,
    the learning rate stays as it is, and steps that not all replicas fill are padded.

    The paper counts over a whole run and trains a second one on what is left; here the counts are
    those up to now, as in the comparisons of dynamic pruning.

    Args:
        fraction: Largest share of the rows to hide, in [0, 1).
        begins: First epoch that hides rows, >= 1: before, few could have been forgotten.
        refresh_every: Hidden rows get a new score at the end of every so many epochs, >= 1; None:
            never, and they are not forgotten as long as they are hidden.

    Raises:
        ValueError: If a setting is out of range.

    Source: Toneva et al., An Empirical Study of Example Forgetting during Deep Neural Network
    Learning, ICLR 2019, section 3 and algorithm 1.
    """

    fraction: Share = 0.3
    _: KW_ONLY
    begins: Count = 2
    refresh_every: Count | None = 1

    columns: ClassVar[tuple[ScoreColumn, ...]] = ("correct", "forgotten")
    """How often it was forgotten, and whether it was predicted right at last."""

    def select(self, rows: Candidates, *, epoch: int, num_epochs: int | None) -> Selection:
        """Select the rows of one pool for an epoch. Collective where ``rows.total`` is."""
        if epoch < self.begins:
            return Selection()
        right = np.flatnonzero(rows.scores["correct"])
        keys, num_bits = count_keys(rows.of(right), rows.scores["forgotten"][right])
        num_hidden = math.floor(self.fraction * rows.num_samples)
        return Selection(hidden=right[lowest(keys, num_hidden, rows.total, num_bits=num_bits)])

    def due(self, hidden: NDArray[np.int64], *, epoch: int) -> NDArray[np.int64]:
        """Choose all hidden slots every ``refresh_every`` epochs, and none in the others."""
        due = self.refresh_every is not None and epoch % self.refresh_every == 0
        return hidden if due else hidden[:0]
