"""What a loader measures about itself: a few numbers a batch, spread over ranks once an epoch.

`EpochLine` brings all ranks' together, and writes them to the file of metrics.
"""

import json
import logging
import math
import time
from collections.abc import Callable, Mapping
from dataclasses import astuple, dataclass, field
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from dataio.source import Source
from dataio.world import World

log = logging.getLogger(__name__)

PER_DOUBLING = 8
"""Buckets of a histogram for each doubling: percentiles are right within 7 %."""

SHORTEST_S = 2.0**-20
NUM_BUCKETS = 32 * PER_DOUBLING

BLOCKED = ("source", "disk")
"""Causes that the loop's own thread is blocked on: rows that are read from the source, or ahead
from the node's disk."""
MAKING = ("decode", "copy", "transform", "processes", "feeder")
"""Causes that others work on meanwhile: the fields of rows, decoded or else copied; transforms and
collates; or worker processes, which do not say which, as do feeders on other nodes."""
CAUSES = (*BLOCKED, *MAKING)

PERCENTILES = (50, 95, 99)
NOT_WORTH_S = 1e-4
"""Shorter waits are not divided by their causes: that would take longer than some batches."""


def check_metrics(path: Path) -> None:
    """Find out now, not at the end of the first epoch, that a file cannot be written.

    Raises:
        ValueError: If it cannot.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        _append(path, "")
    except OSError as error:
        raise ValueError(
            f"metrics: {path} cannot be written ({error}); give a file in a directory that can"
        ) from error


def add_figures(path: Path, figures: Mapping[str, object]) -> None:
    """Add an epoch's line; a file that can no longer be written costs a warning."""
    try:
        _append(path, json.dumps(figures) + "\n")
    except OSError as error:
        # Weeks of training are worth more than a line of figures.
        log.warning("[rank 0] %s: the epoch's figures are lost (%s)", path, error)


def _append(path: Path, text: str) -> None:
    with path.open("a") as file:
        file.write(text)


class Waits:
    """A histogram of durations, from a microsecond to an hour."""

    def __init__(self) -> None:
        self._counts = [0] * NUM_BUCKETS
        self.total_s = 0.0

    def add(self, duration_s: float) -> None:
        """Count one."""
        self.total_s += duration_s
        fraction, exponent = math.frexp(duration_s / SHORTEST_S)
        place = (exponent - 1) * PER_DOUBLING + int((fraction - 0.5) * (2 * PER_DOUBLING))
        self._counts[min(max(place, 0), NUM_BUCKETS - 1)] += 1

    def percentile(self, percent: float, *, of: int | None = None) -> float:
        """Seconds that this share of the durations stays below; 0 before the first.

        Args:
            percent: The share.
            of: Durations in all; those that were not added took no time. None: all were added.
        """
        ends = np.cumsum(self._counts)
        num_zero = 0 if of is None else of - ends[-1]
        rank = math.ceil((ends[-1] + num_zero) * percent / 100) - num_zero
        if ends[-1] == 0 or rank <= 0:
            return 0.0
        doubling, part = divmod(int(np.searchsorted(ends, rank)), PER_DOUBLING)
        return float(SHORTEST_S * 2**doubling * (1 + (part + 0.5) / PER_DOUBLING))

    def to_stats(self, name: str, *, of: int | None = None) -> dict[str, float]:
        """Give the total and the percentiles as figures, such as ``wait_s`` and ``wait_p50_s``."""
        shares = {f"{name}_p{p}_s": self.percentile(p, of=of) for p in PERCENTILES}
        return {f"{name}_s": self.total_s, **shares}


class WaitCauses:
    """Divides waits by what was waited for.

    A batch waits for what blocks its own thread; of the rest each cause has the share that it had
    in making batches since the wait before.
    """

    def __init__(self) -> None:
        self._waits: dict[str, Waits] = {}
        self._before: Mapping[str, float] = dict.fromkeys(CAUSES, 0.0)

    def add(self, wait_s: float, spent: Mapping[str, float]) -> None:
        """Divide a wait.

        Args:
            wait_s: Its length.
            spent: Seconds by cause since the loader was made: those that blocked, and those of
                making batches, on all threads; absent is 0.
        """
        left, before, self._before = wait_s, self._before, spent
        parts = {name: spent.get(name, 0.0) - before.get(name, 0.0) for name in CAUSES}
        for name in BLOCKED:
            parts[name] = min(parts[name], left)
            left -= parts[name]
        made_s = sum(parts[name] for name in MAKING)
        for name in MAKING:
            parts[name] *= left / made_s if made_s > 0 else 0.0
        if made_s <= 0:
            parts["copy"] = left
        for name, part_s in parts.items():
            if part_s > 0:
                self._waits.setdefault(name, Waits()).add(part_s)

    def to_stats(self, *, batches: int) -> dict[str, float]:
        """Give the figures of the causes that there were, such as ``wait_decode_p95_s``."""
        found: dict[str, float] = {}
        for name in CAUSES:
            if name in self._waits:
                found |= self._waits[name].to_stats(f"wait_{name}", of=batches)
        return found


@dataclass
class Figures:
    """Totals since the loader was made."""

    batches: int = 0
    rows: int = 0
    epoch_end_s: float = 0.0
    exchanged_rows: int = 0
    exchanged_bytes: int = 0
    exchanged_raw_bytes: int = 0
    exchange_messages: int = 0
    exchange_blocked_s: float = 0.0
    exchange_cpu_s: float = 0.0
    exchange_overlap_fraction: float = 0.0
    waits: Waits = field(default_factory=Waits)
    causes: WaitCauses = field(default_factory=WaitCauses)
    steps: Waits = field(default_factory=Waits)
    started: float = 0.0
    disk_bytes_before: int = field(default_factory=lambda: disk_bytes_read())
    padded: int = 0
    _ended: tuple[float, float, int, int, int] = field(
        default_factory=lambda: (time.perf_counter(), 0.0, 0, 0, 0)
    )

    def to_stats(self, *, cache_bytes: int, pulled_bytes: int = 0) -> dict[str, float]:
        """Everything as plain numbers; seconds, bytes, rows.

        Args:
            cache_bytes: Of the rows that batches were made of.
            pulled_bytes: Of the rows that came from other nodes outside of an exchange.
        """
        stats = {
            name: value for name, value in vars(self).items() if isinstance(value, (int, float))
        }
        del stats["started"], stats["disk_bytes_before"], stats["padded"]
        disk = max(disk_bytes_read() - self.disk_bytes_before, 0)
        return stats | {
            **self.waits.to_stats("wait"),
            **self.causes.to_stats(batches=self.batches),
            "samples_per_s": self.rows / (time.perf_counter() - self.started),
            "disk_bytes": disk,
            "page_cache_bytes": max(cache_bytes - disk, 0),
            "peer_bytes": self.exchanged_bytes + pulled_bytes,
        }

    def add_batch(
        self, wait_s: float, rows: int, spent: Callable[[], Mapping[str, float]] = dict
    ) -> None:
        """Count a batch that was waited for.

        Args:
            wait_s: For so long.
            rows: Its samples.
            spent: Says what making batches took: see `WaitCauses.add`.
        """
        self.started = self.started or time.perf_counter() - wait_s
        self.waits.add(wait_s)
        if wait_s >= NOT_WORTH_S:
            self.causes.add(wait_s, spent())
        self.batches += 1
        self.rows += rows

    def end_epoch(self, *, source_bytes: int) -> "RankFigures":
        """Say what came since the last call."""
        figures = self.epoch_so_far(source_bytes=source_bytes)
        self._ended = self._now(source_bytes)
        return figures

    def epoch_so_far(self, *, source_bytes: int) -> "RankFigures":
        """Say what came since the last call of `end_epoch`."""
        now = zip(self._now(source_bytes), self._ended, strict=True)
        duration_s, wait_s, rows, source, padded = (a - b for a, b in now)
        return RankFigures(duration_s, wait_s, int(rows), int(source), int(padded))

    def _now(self, source_bytes: int) -> tuple[float, float, int, int, int]:
        return time.perf_counter(), self.waits.total_s, self.rows, source_bytes, self.padded

    def take_in(self, exchange: Mapping[str, float]) -> None:
        """Add what an epoch's exchange did."""
        self.exchanged_rows += int(exchange["rows"])
        self.exchanged_bytes += int(exchange["sent_bytes"])
        self.exchanged_raw_bytes += int(exchange.get("raw_bytes", exchange["sent_bytes"]))
        self.exchange_messages += int(exchange["messages"])
        self.exchange_blocked_s += exchange["blocked_s"]
        self.exchange_cpu_s += exchange.get("cpu_s", 0.0)
        self.exchange_overlap_fraction = exchange["overlap_fraction"]


def disk_bytes_read() -> int:
    """Bytes that this process made the disk read so far; 0 where the kernel does not count them."""
    try:
        text = Path("/proc/self/io").read_text()
    except OSError:
        return 0
    counted = dict(line.split(": ") for line in text.splitlines())
    return int(counted.get("read_bytes", 0))


ADDED_UP = ("duration_s", "samples", "skipped_rows", "source_bytes", "wait_mean_s", "wait_max_s")
"""Figures of an epoch's line that both parts of an interrupted epoch add to."""


@dataclass(frozen=True)
class RankFigures:
    """One epoch on one rank, as the ranks send them to one another at its end.

    Attributes:
        duration_s: From the first batch to the epoch's end.
        wait_s: Of it, blocked on batches.
        rows: Delivered, padding not counted.
        source_bytes: Read from the source.
        padded: Of the rows, those that could not be read and became padding.
    """

    duration_s: float
    wait_s: float
    rows: int
    source_bytes: int
    padded: int = 0

    def to_array(self) -> NDArray[np.float64]:
        """float64[5]: In the order of the attributes."""
        return np.array(astuple(self), np.float64)


def summarise(
    epoch: int,
    ranks: NDArray[np.float64],
    *,
    first_step: int = 0,
    earlier: Mapping[str, float] | None = None,
) -> dict[str, float]:
    """Turn float64[world_size, 5] of all ranks' `RankFigures` into one epoch's line.

    A *straggler* is the rank that made the others wait: under synchronous training all take as long
    as the slowest, who waits most for its batches.

    Args:
        epoch: The epoch.
        ranks: Of all ranks, in rank order.
        first_step: Steps of the epoch before the first that the line covers.
        earlier: The line of these steps, where a save kept it: then the result covers both parts,
            and times are added up.
    """
    duration, wait, rows, source, padded = ranks.T
    line = {
        "epoch": epoch,
        "first_step": first_step,
        "duration_s": float(duration.max()),
        "samples": float(rows.sum()),
        "skipped_rows": float(padded.sum()),
        "samples_per_s": 0.0,
        "source_bytes": float(source.sum()),
        "wait_mean_s": float(wait.mean()),
        "wait_max_s": float(wait.max()),
        "straggler_rank": int(wait.argmax()),
    }
    if earlier is not None:
        line["first_step"] = earlier["first_step"]
        if earlier["wait_max_s"] > line["wait_max_s"]:
            line["straggler_rank"] = earlier["straggler_rank"]
        for name in ADDED_UP:
            line[name] += earlier[name]
    line["samples_per_s"] = line["samples"] / max(line["duration_s"], 1e-9)
    return line


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

    def end(self) -> RankFigures:
        """Take notice that the epoch ends, and return this rank's part of its line."""
        return self._figures.end_epoch(source_bytes=self._source.bytes_read)

    def write(
        self, mine: RankFigures, doing: str, *, stats: Callable[[], Mapping[str, float]]
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

    def _sum_up(self, mine: RankFigures, doing: str) -> dict[str, float]:
        ranks = self._world.allgather_array(mine.to_array(), doing=doing)
        self.num_padded = int(ranks[:, -1].sum())
        return summarise(self._epoch, ranks, first_step=self._first_step, earlier=self._earlier)
