"""Pass all rows forward and only some backward: the higher the loss, the likelier."""

from dataclasses import KW_ONLY, dataclass
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray

from dataio.base.checked import Count, Share, checked
from dataio.plan.history import Candidates, ScoreColumn
from dataio.plan.policies import Selection
from importance.threshold import loss_keys, percentiles


@checked
@dataclass(frozen=True)
class SelectiveBackprop:
    """Show a row with probability percentile(last loss) ** beta, beta = fraction / (1 - fraction).

    So a share of about ``fraction`` is hidden; hidden rows are only passed forward, at the epoch's
    end. Losses are those of the epoch before. Gradients are not weighted, so they favour rows of
    high loss. Rows that were never reported are shown.

    Args:
        fraction: Share of the rows to hide, about, in [0, 1).
        refresh_every: Hidden rows get a new score at the end of every so many epochs, >= 1; None:
            never, they stay as unlikely as they are.

    Raises:
        ValueError: If a setting is out of range.

    Source: Jiang et al., Accelerating Deep Learning by Focusing on the Biggest Losers, 2019,
    section 3.2, with losses of the epoch before as in its section 3.3 (StaleSB).
    """

    fraction: Share = 0.5
    _: KW_ONLY
    refresh_every: Count | None = 1

    columns: ClassVar[tuple[ScoreColumn, ...]] = ("loss",)
    """The last loss."""

    def select(self, rows: Candidates, *, epoch: int, num_epochs: int | None) -> Selection:
        """Select the rows of one pool for an epoch. Collective where ``rows.total`` is."""
        beta = self.fraction / (1 - self.fraction)
        shown = percentiles(rows, rows.total) ** beta
        draw = (rows.places + 0.5) / rows.num_samples
        hidden = np.flatnonzero((draw >= shown) & (rows.scores["epoch"] >= 0))
        keys = loss_keys(rows)[hidden]
        return Selection(hidden=hidden[np.argsort(keys)], top_up=True)

    def due(self, hidden: NDArray[np.int64], *, epoch: int) -> NDArray[np.int64]:
        """Choose all hidden slots every ``refresh_every`` epochs, and none in the others."""
        due = self.refresh_every is not None and epoch % self.refresh_every == 0
        return hidden if due else hidden[:0]
