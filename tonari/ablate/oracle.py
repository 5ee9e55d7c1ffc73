"""Hide what is known to be wrong: what no policy could know, as the most that one could reach."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from dataio.base.checked import checked
from dataio.plan.history import Candidates, ScoreColumn
from dataio.plan.policies import Selection


@checked
@dataclass(frozen=True)
class Oracle:
    """Hide the rows that a field says to hide, in every epoch.

    Args:
        field: Of one number a sample; rows where it is not 0 are hidden.
    """

    field: str = "is_wrong"

    @property
    def columns(self) -> tuple[ScoreColumn, ...]:
        """None: it knows."""
        return ()

    @property
    def by_fields(self) -> tuple[str, ...]:
        """The field."""
        return (self.field,)

    def select(self, rows: Candidates, *, epoch: int, num_epochs: int | None) -> Selection:
        """Select the rows of one pool."""
        return Selection(hidden=np.flatnonzero(rows.by_field(self.field)[rows.sample_id]))

    def due(self, hidden: NDArray[np.int64], *, epoch: int) -> NDArray[np.int64]:
        """Choose none."""
        return hidden[:0]
