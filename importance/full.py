"""Every row is visible in every epoch: what the other policies are measured against."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from dataio.policies import Scores, Selection


@dataclass(frozen=True)
class Full:
    """Hide nothing."""

    @property
    def uses_scores(self) -> bool:
        """Whether reports change what it selects."""
        return False

    def select(
        self, scores: Scores, *, epoch: int, num_epochs: int | None, rng: np.random.Generator
    ) -> Selection:
        """Select every row."""
        return Selection()

    def due(self, hidden: NDArray[np.int64], *, epoch: int) -> NDArray[np.int64]:
        """Choose none: nothing is hidden."""
        return hidden[:0]
