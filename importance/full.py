"""Every row is visible in every epoch: what the other policies are measured against."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from dataio.base.checked import checked
from dataio.plan.history import Candidates, ScoreColumn
from dataio.plan.policies import Selection


@checked
@dataclass(frozen=True)
class Full:
    """Hide nothing.

    Args:
        columns: What to remember of every row all the same, for ``tonari hardest``.

    Raises:
        ValueError: If there is no such column.
    """

    columns: tuple[ScoreColumn, ...] = ()

    def select(self, rows: Candidates, *, epoch: int, num_epochs: int | None) -> Selection:
        """Select every row."""
        return Selection()

    def due(self, hidden: NDArray[np.int64], *, epoch: int) -> NDArray[np.int64]:
        """Choose none: nothing is hidden."""
        return hidden[:0]
