"""Hide random rows and weigh the others up: the control for policies that look at scores."""

import math
from dataclasses import KW_ONLY, dataclass
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray

from dataio.base.checked import Fraction, Share, checked
from dataio.plan.history import Candidates, ScoreColumn
from dataio.plan.policies import Selection
from importance.schedule import annealing


@checked
@dataclass(frozen=True)
class RandomPrune:
    """Hide ``floor(fraction * num_samples)`` random rows of all pools, and none near the end.

    They are drawn anew each epoch, by their places. The visible ones weigh num_samples /
    num_visible, so that the weighted sum of gradients is the full sum in expectation, however the
    share was rounded; the learning rate stays as it is.

    Args:
        fraction: Share of the rows to hide, in [0, 1).
        delta: Fraction of the run after which every row is visible, in [0, 1].

    Raises:
        ValueError: If a setting is out of range.

    Source: rescaling and annealing of InfoBatch, Qin et al., ICLR 2024, without its criterion.
    """

    fraction: Share = 0.3
    _: KW_ONLY
    delta: Fraction = 0.875

    columns: ClassVar[tuple[ScoreColumn, ...]] = ()
    """No reports change what it selects."""

    def select(self, rows: Candidates, *, epoch: int, num_epochs: int | None) -> Selection:
        """Select the rows of one pool for an epoch.

        Raises:
            ValueError: If ``delta`` < 1 and the length of the run is not known.
        """
        num_hidden = math.floor(self.fraction * rows.num_samples)
        never = "RandomPrune(delta=1.0), which never goes back to full data"
        at_the_end = annealing("RandomPrune", epoch, num_epochs, delta=self.delta, otherwise=never)
        if num_hidden == 0 or at_the_end:
            return Selection()
        weight = rows.num_samples / (rows.num_samples - num_hidden)
        return Selection(
            hidden=np.flatnonzero(rows.places < num_hidden),
            weights=np.full(len(rows.places), weight, np.float32),
        )

    def due(self, hidden: NDArray[np.int64], *, epoch: int) -> NDArray[np.int64]:
        """Choose none: the next selection does not look at scores."""
        return hidden[:0]
