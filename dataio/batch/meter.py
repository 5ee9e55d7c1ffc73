"""What rows cost on this rank, as the parts of a loader measure it."""

import numpy as np
from numpy.typing import NDArray

from dataio.batch.figures import Figures
from dataio.batch.gather import Gather
from dataio.plan.costs import SpentCosts
from dataio.store.pool import Pool


class CostsMeter:
    """Brings together what is measured of rows, for policies that go by it.

    Args:
        pool: Reads rows that do not stay.
        gather: Makes batches.
        figures: Times steps.
    """

    def __init__(self, pool: Pool, gather: Gather, figures: Figures) -> None:
        self._pool = pool
        self._gather = gather
        self._figures = figures

    def spent(self) -> SpentCosts:
        """Say what this rank spent since the loader was made, or its dataset grew."""
        streamed, steps = self._pool.streamed, self._figures.steps
        total_s = self._figures.waits.total_s + steps.total_s
        return SpentCosts(
            streamed.read_s,
            streamed.bytes,
            self._gather.busy_s,
            self._gather.num_bytes,
            steps.percentile(50),
            streamed.wait_s,
            total_s,
        )

    def row_bytes(self) -> tuple[NDArray[np.int64], NDArray[np.bool_]]:
        """Find each row's bytes, 0 where unknown, and whether it is read from the source."""
        return self._pool.row_bytes()
