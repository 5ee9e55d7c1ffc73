"""Hide random rows and weigh the others up: the control for policies that look at scores."""

import math
from dataclasses import KW_ONLY, dataclass

import numpy as np
from numpy.typing import NDArray

from dataio.policies import Scores, Selection
from importance.schedule import check_fraction, run_fraction


@dataclass(frozen=True)
class RandomPrune:
    """Hide ``floor(fraction * num_slots)`` random rows of each pool, and none near the end.

    They are drawn anew each epoch. The visible ones weigh num_slots / num_visible, so that a pool's
    weighted sum of gradients is the full sum in expectation, however the share was rounded; the
    learning rate stays as it is.

    Args:
        fraction: Share of a pool to hide, in [0, 1).
        delta: Fraction of the run after which every row is visible, in [0, 1].

    Raises:
        ValueError: If a setting is out of range.

    Source: rescaling and annealing of InfoBatch, Qin et al., ICLR 2024, without its criterion.
    """

    fraction: float = 0.3
    _: KW_ONLY
    delta: float = 0.875

    def __post_init__(self) -> None:
        check_fraction("RandomPrune: fraction", self.fraction, below_one=True)
        check_fraction("RandomPrune: delta", self.delta)

    @property
    def uses_scores(self) -> bool:
        """Whether reports change what it selects."""
        return False

    def select(
        self, scores: Scores, *, epoch: int, num_epochs: int | None, rng: np.random.Generator
    ) -> Selection:
        """Select the rows of one pool for an epoch; of the scores only their number matters.

        Raises:
            ValueError: If ``delta`` < 1 and the length of the run is not known.
        """
        num_slots = len(scores)
        num_hidden = math.floor(self.fraction * num_slots)
        if num_hidden == 0 or self._annealing(epoch, num_epochs):
            return Selection()
        weight = num_slots / (num_slots - num_hidden)
        return Selection(
            hidden=rng.choice(num_slots, num_hidden, replace=False),
            weights=np.full(num_slots, weight, np.float32),
        )

    def due(self, hidden: NDArray[np.int64], *, epoch: int) -> NDArray[np.int64]:
        """Choose none: the next selection does not look at scores."""
        return hidden[:0]

    def _annealing(self, epoch: int, num_epochs: int | None) -> bool:
        if self.delta == 1:
            return False
        otherwise = "RandomPrune(delta=1.0), which never goes back to full data"
        return run_fraction("RandomPrune", epoch, num_epochs, otherwise=otherwise) >= self.delta
