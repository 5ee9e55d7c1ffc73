"""Hide what is known to be wrong: what no policy could know, as the most that one could reach."""

from dataclasses import dataclass
from functools import cache
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray

from dataio import Int, open_source
from dataio.base.checked import checked
from dataio.plan.history import Candidates, ScoreColumn
from dataio.plan.policies import Selection


@checked
@dataclass(frozen=True)
class Oracle:
    """Hide the rows that a field of the data says to hide, in every epoch.

    Args:
        data: What is trained on, such as ``data.train``; the field is read from it.
        field: Of one whole number a sample; rows where it is not 0 are hidden.
    """

    data: str
    field: str = "is_wrong"

    columns: ClassVar[tuple[ScoreColumn, ...]] = ()
    """None: it knows."""

    def select(self, rows: Candidates, *, epoch: int, num_epochs: int | None) -> Selection:
        """Select the rows of one pool.

        Raises:
            DataioError: If the data has no such field.
        """
        is_wrong = is_not_zero(self.data, self.field)
        return Selection(hidden=np.flatnonzero(is_wrong[rows.sample_id]))

    def due(self, hidden: NDArray[np.int64], *, epoch: int) -> NDArray[np.int64]:
        """Choose none."""
        return hidden[:0]


@cache
def is_not_zero(data: str | tuple[str, ...], field: str) -> NDArray[np.bool_]:
    """Read a field of whole numbers: bool[num_samples], by sample id.

    Raises:
        DataioError: If the data cannot be read, or has no such field.
    """
    source = open_source(data)
    parts = source.read(np.arange(source.num_samples), {"field": Int(field)})
    values = np.concatenate([part.fixed[0].reshape(-1) for part in parts]).view("<i8")
    found: NDArray[np.bool_] = values != 0
    return found
