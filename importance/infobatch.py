"""Hide a part of the rows of less than mean loss, and weigh the rest of these up."""

import math
from dataclasses import KW_ONLY, dataclass
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray

from dataio.base.checked import Fraction, Share, checked
from dataio.plan.history import QUANTUM, Candidates, ScoreColumn
from dataio.plan.policies import Selection
from importance.schedule import annealing
from importance.threshold import lowest

MOST_LOSS = 2.0**20
"""More counts as this in the mean, so that sums of 2**32 rows stay exact."""


@checked
@dataclass(frozen=True)
class InfoBatch:
    """Hide ``floor(fraction * num_low)`` random rows of those below the mean of all last losses.

    The others below it weigh num_low / (num_low - num_hidden), so that the weighted sum of
    gradients is the full sum in expectation. Hidden rows keep their old loss, and are drawn anew
    with the others: none is passed forward for a new one. Rows that were never reported are not
    below, so nothing is hidden in epoch 0. Near the end nothing is hidden.

    Args:
        fraction: Share of the rows of low loss to hide, in [0, 1).
        delta: Fraction of the run after which every row is visible, in [0, 1].

    Raises:
        ValueError: If a setting is out of range.

    Source: Qin et al., InfoBatch, ICLR 2024, sections 3.2 to 3.4; its rounding errors are left out,
    as weights follow from the numbers that were hidden.
    """

    fraction: Share = 0.5
    _: KW_ONLY
    delta: Fraction = 0.875

    columns: ClassVar[tuple[ScoreColumn, ...]] = ("loss",)
    """The last loss."""

    def select(self, rows: Candidates, *, epoch: int, num_epochs: int | None) -> Selection:
        """Select the rows of one pool for an epoch. Collective where ``rows.total`` is.

        Raises:
            ValueError: If ``delta`` < 1 and the length of the run is not known.
        """
        never = "InfoBatch(delta=1.0), which never goes back to full data"
        if annealing("InfoBatch", epoch, num_epochs, delta=self.delta, otherwise=never):
            return Selection()
        loss = rows.scores["loss"]
        known = np.isfinite(loss)
        # int64[num_slots]: in quanta, so that sums do not depend on how rows lie in pools
        bounded = np.clip(np.where(known, loss, 0), -MOST_LOSS, MOST_LOSS)
        level = np.round(bounded / QUANTUM).astype(np.int64)
        total, num_known = rows.total(np.array([level.sum(), known.sum()])).tolist()
        low = np.flatnonzero(known & (level * num_known < total))
        num_low = int(rows.total(np.array([len(low)]))[0])
        num_hidden = math.floor(self.fraction * num_low)
        places = rows.places[low].astype(np.uint64)
        num_bits = max(rows.num_samples - 1, 1).bit_length()
        chosen = lowest(places, num_hidden, rows.total, num_bits=num_bits)
        weights = np.ones(len(loss), np.float32)
        weights[low] = num_low / max(num_low - num_hidden, 1)
        return Selection(hidden=low[chosen], weights=weights)

    def due(self, hidden: NDArray[np.int64], *, epoch: int) -> NDArray[np.int64]:
        """Choose none: a hidden row keeps its old loss."""
        return hidden[:0]
