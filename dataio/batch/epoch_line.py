"""An epoch's line of figures: all ranks' brought together, and written to the file of metrics."""

from collections.abc import Callable, Mapping
from pathlib import Path

from dataio.batch.figures import EpochFigures, Figures, add_figures, summarise
from dataio.source import Source
from dataio.world import World


class EpochLine:
    """Sums up the running epoch over all ranks.

    Args:
        figures: What this rank measures.
        source: What it reads is counted.
        world: All ranks; rank 0 writes.
        metrics: The file that gets a line an epoch; None: no file does.

    Attributes:
        last: The line of the last epoch that ended, empty before.
        num_padded: Rows of all ranks that became padding in the part of it that this start trained.
    """

    def __init__(
        self, figures: Figures, source: Source, *, world: World, metrics: Path | None
    ) -> None:
        self._figures = figures
        self._source = source
        self._world = world
        self._metrics = metrics
        self.last: dict[str, float] = {}
        self.num_padded = 0
        self._epoch = self._first_step = 0
        self._earlier: Mapping[str, float] | None = None

    def begin(
        self, epoch: int, *, num_steps: int, earlier: Mapping[str, float] | None = None
    ) -> None:
        """Take notice that an epoch begins, or goes on.

        Args:
            epoch: The epoch.
            num_steps: Its steps that were trained before, which the line leaves out.
            earlier: Their line, where a save kept it: then the line includes them.
        """
        self._epoch, self._earlier = epoch, earlier or None
        self._first_step = 0 if earlier else num_steps

    def end(self) -> EpochFigures:
        """Take notice that the epoch ends, and return this rank's part of its line."""
        return self._figures.end_epoch(source_bytes=self._source.bytes_read)

    def write(
        self, mine: EpochFigures, doing: str, *, stats: Callable[[], Mapping[str, float]]
    ) -> None:
        """Bring the ranks' figures of the epoch together; rank 0 writes for all. Collective.

        Args:
            mine: This rank's, as `end` returned them.
            doing: What the ranks meet for, for messages.
            stats: Returns rank 0's figures since construction.
        """
        self.last = self._sum_up(mine, doing)
        self._earlier = None
        if self._world.rank == 0 and self._metrics is not None:
            add_figures(self._metrics, self.last | {"rank_0": stats()})

    def so_far(self) -> dict[str, float]:
        """Make the running epoch's line up to now. Collective."""
        mine = self._figures.epoch_so_far(source_bytes=self._source.bytes_read)
        return self._sum_up(mine, "add up the epoch so far")

    def _sum_up(self, mine: EpochFigures, doing: str) -> dict[str, float]:
        ranks = self._world.allgather_array(mine.to_array(), doing=doing)
        self.num_padded = int(ranks[:, -1].sum())
        return summarise(self._epoch, ranks, first_step=self._first_step, earlier=self._earlier)
