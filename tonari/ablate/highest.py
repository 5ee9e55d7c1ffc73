"""Drop the highest losses: what a policy for junk has to be better than."""

import math
from dataclasses import KW_ONLY, dataclass

import numpy as np
from numpy.typing import NDArray

from dataio.base.checked import checked
from dataio.plan.history import Candidates, ScoreColumn
from dataio.plan.policies import Selection
from importance.schedule import check_fraction, check_refresh
from importance.threshold import key_bits, loss_keys, lowest


@checked
@dataclass(frozen=True)
class HighestLoss:
    """Hide the ``floor(fraction * num_samples)`` rows of the highest last losses.

    Args:
        fraction: Share of all rows to hide, in [0, 1).
        begins: First epoch that hides rows.
        refresh_every: Hidden rows get a new score at the end of every so many epochs; None: never.

    Raises:
        ValueError: If a setting is out of range.
    """

    fraction: float = 0.5
    _: KW_ONLY
    begins: int = 1
    refresh_every: int | None = 1

    def __post_init__(self) -> None:
        check_fraction("HighestLoss: fraction", self.fraction, below_one=True)
        check_refresh("HighestLoss", self.refresh_every)

    @property
    def columns(self) -> tuple[ScoreColumn, ...]:
        """The last loss."""
        return ("loss",)

    def select(self, rows: Candidates, *, epoch: int, num_epochs: int | None) -> Selection:
        """Select the rows of one pool for an epoch. Collective where ``rows.total`` is."""
        if epoch < self.begins:
            return Selection()
        num_bits = key_bits(rows)
        # The highest losses have the lowest of these
        keys = np.uint64((1 << num_bits) - 1) - loss_keys(rows)
        count = math.floor(self.fraction * rows.num_samples)
        return Selection(hidden=lowest(keys, count, rows.total, num_bits=num_bits))

    def due(self, hidden: NDArray[np.int64], *, epoch: int) -> NDArray[np.int64]:
        """Choose all hidden slots every ``refresh_every`` epochs, and none in the others."""
        due = self.refresh_every is not None and epoch % self.refresh_every == 0
        return hidden if due else hidden[:0]
