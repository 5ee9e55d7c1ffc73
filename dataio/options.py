"""Options of a `Loader` in groups: where rows lie, how they come there, who works, what is shown.

The same objects in Python, in a run's TOML file and on the command line.
"""

import os
from dataclasses import KW_ONLY, dataclass
from typing import Literal

from dataio.base.checked import Count, NotNegative, Whole, checked
from dataio.base.filesystem import check_path
from dataio.base.sizes import parse_bytes
from dataio.rows.whole import Check
from dataio.source.wrap.transformed import StageTransform

Verify = Literal["once", "always", "never"]
"""When a row is compared with its checksum: the first time that it is read, each time, or never."""


@checked
@dataclass(frozen=True)
class NodeCache:
    """The directory in which a node keeps its rows.

    Args:
        path: Directory of this node; ``"auto"`` is TONARI_CACHE, else a node-local directory.
        quota: Bytes that this node's cache of the dataset may take, such as ``"200GB"``; not that
            of an evaluation. Rows that do not fit are read from the source in every epoch, ahead of
            their batches, which are the same ones. None: as much as the rows need.
        copies: Nodes that hold each row: with 2, the rows of a node that is lost come from another
            one and not from the source. Twice the storage, and up to twice the bytes of an
            exchange. Not of an evaluation; without effect where every node holds every row, and on
            one node or nodes of unequally many ranks.
        verify: When a row's checksum is checked: ``"once"``, as this process first reads the row,
            and of every 256 batches one again: most damage that comes later is trained unseen.
            ``"always"`` finds it, each time that a row is read. ``"never"`` finds none; so does
            ``"once"`` where a field has a `RandomPatch`, as no row is read whole.

    Raises:
        ValueError: If the quota is no size, or is given with copies; or if the path is a URL.
    """

    path: str | os.PathLike[str] = "auto"
    _: KW_ONLY
    quota: str | int | None = None
    copies: Literal[1, 2] = 1
    verify: Verify = "once"

    def __post_init__(self) -> None:
        check_path(self.path, "NodeCache: path")
        if self.quota_bytes is not None and self.copies > 1:
            raise ValueError(
                "NodeCache: copies=2 and a quota exclude one another, because each copy takes the "
                "room of a row that is then read from the source in every epoch; give copies=1 or "
                "no quota"
            )

    @property
    def quota_bytes(self) -> int | None:
        """The quota in bytes."""
        if self.quota is None:
            return None
        try:
            return parse_bytes(str(self.quota))
        except ValueError as error:
            raise ValueError(f"NodeCache: quota: {error}") from None


@checked
@dataclass(frozen=True, kw_only=True)
class Staging:
    """How a node's rows come from the source into its cache.

    Args:
        when: ``"before"``: training begins when the pool is staged. ``"overlap"``: it begins with
            the first of 16 groups of rows; epoch 0 is then shuffled group by group, whether or not
            the cache was warm, so that its order stays a function of the seed.
        readers: Shards that each rank reads at once, >= 1.
        bandwidth: Bytes/s that this node may read from the source, >= 0, or a size such as
            ``"500MB"``; 0: as fast as it can.
        check: How a picture that is kept compressed is looked at, so that a part that is missing
            is found now: ``"markers"``: by its marks and sizes, and decoded if these leave doubt;
            ``"decode"``: every one is decoded; ``"none"``: not before a batch needs it.
        transform: ``sample -> sample`` on decoded arrays, applied once, as rows are staged; what it
            returns is stored in place of the loader's fields. See `TransformedSource`.

    Raises:
        ValueError: If a number is out of range, or the bandwidth is no size.
    """

    when: Literal["before", "overlap"] = "before"
    readers: Count = 2
    bandwidth: NotNegative | str = 0.0
    check: Check = "markers"
    transform: StageTransform | None = None

    def __post_init__(self) -> None:
        _ = self.bytes_per_s

    @property
    def bytes_per_s(self) -> float:
        """The bandwidth in bytes/s; 0: no limit."""
        if not isinstance(self.bandwidth, str):
            return self.bandwidth
        try:
            return float(parse_bytes(self.bandwidth))
        except ValueError as error:
            raise ValueError(f"Staging: bandwidth: {error}") from None


@checked
@dataclass(frozen=True, kw_only=True)
class Workers:
    """Who decodes and transforms samples, and how far ahead.

    Args:
        threads: Threads that decode and transform, >= 0; None: the rank's part of the cores.
        processes: Processes that do so instead, >= 0, for transforms that hold the interpreter, or
            draw from global generators.
        prefetch: Batches made ahead, >= 0.
        feeders: Directory in which processes on other nodes are found that decode and transform
            beside the threads, where that saves these time: those of `tonari feed DIR`. It is this
            user's alone (0700), on a filesystem that all nodes see. None: there are none.

    Raises:
        ValueError: If a number is out of range; from a loader, if it has feeders without threads,
            or with processes, or with nothing made ahead.
    """

    threads: Whole | None = None
    processes: Whole = 0
    prefetch: Whole = 2
    feeders: str | os.PathLike[str] | None = None

    def num_threads(self, *, local_size: int) -> int:
        """Count the threads of each of a node's ranks."""
        if self.threads is not None:
            return self.threads
        return max(len(os.sched_getaffinity(0)) // local_size, 1)


@checked
@dataclass(frozen=True, kw_only=True)
class Reports:
    """What a loader writes of its work.

    Args:
        metrics: File to which rank 0 adds a line of JSON at the end of each epoch: of all its
            steps, also after `Loader.restore`; else from its ``first_step`` on.
        progress: Whether rank 0 says on standard error how far staging is: on a terminal in one
            line, in a log every 30 s and at the end.
        rows: Directory, on a filesystem that all nodes see, for a log of which rows are trained
            when, which `tonari rows` reads: a line an epoch, and what a policy hides in it.
        accumulate: Batches of an optimizer step, >= 1, for that log.
    """

    metrics: str | os.PathLike[str] | None = None
    progress: bool = True
    rows: str | os.PathLike[str] | None = None
    accumulate: Count = 1

    def __post_init__(self) -> None:
        for name, path in (("metrics", self.metrics), ("rows", self.rows)):
            check_path(path, f"Reports: {name}")
            if path == "":
                raise ValueError(f"Reports: {name} is empty, expected a path; give one, or None")
