"""Gather what shows whether a phase was cold or warm, and judge it: cold, warm or unknown."""

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from msgspec.structs import replace
from typing_extensions import Self

from tonari.bench.storage.site.counters import Counters, Moved, join_moved
from tonari.bench.storage.site.record import JsonRecord, Natural
from tonari.bench.storage.site.residency import Residency, evict, resident_bytes
from tonari.bench.storage.site.site import Site

__all__ = [
    "CacheVerdict",
    "Evidence",
    "Residency",
    "Watch",
    "evict",
    "judge",
    "judge_nodes",
    "merge",
    "resident_bytes",
]  # fmt: skip

NOTHING, MOST, ALL = 0.01, 0.9, 0.99
"""Shares of bytes: this much or less is none, this much or more was fetched, is in memory."""
SOME = 0.1
"""Beyond this share fetched, a phase was not served from memory alone."""

BLOCK_BACKED = frozenset("ext2 ext3 ext4 xfs btrfs f2fs bcachefs squashfs overlay".split())
"""What a process reads of these is in its own counter of block reads."""

DIRECT_PASSES_CACHE = frozenset("ext2 ext3 ext4 xfs lustre nfs nfs4".split())
"""Where O_DIRECT goes by the only cache that the client has."""

OF_A_PROCESS = ("asked_read_bytes", "read_calls", "process_read_bytes")
"""Of `Moved`: what each rank of a node has its own of."""


class Evidence(JsonRecord, frozen=True, kw_only=True):
    """What was seen around a phase, of one rank or, merged, of one node.

    Attributes:
        asked_bytes: That the phase read.
        moved: From before the phase until after it.
        direct: Whether it read with O_DIRECT.
        written_by_another: Whether another node wrote the files.
        larger_than_memory: Whether the files are more than this node's memory.
        seconds_evicting: Spent to make it cold; 0 where that was not tried.
    """

    asked_bytes: Natural
    resident_before: Residency
    resident_after: Residency
    moved: Moved
    direct: bool = False
    written_by_another: bool = False
    larger_than_memory: bool = False
    seconds_evicting: float = 0.0


class CacheVerdict(JsonRecord, frozen=True):
    """Whether this node served a phase from its memory. A server's cache is never judged.

    Attributes:
        why: What decided, in a sentence without its stop.
    """

    state: Literal["cold", "warm", "unknown"]
    why: str


class Watch:
    """Gathers the evidence of what happens in its ``with`` block.

    Looking opens the files, before and after: a cold phase is cold in data, while their names and
    attributes may be known to the client. Ranks that read each other's files enter, then wait for
    one another, then read: the last to evict would take pages from under the first to read.
    """

    def __init__(self, paths: Sequence[Path], site: Site, *, cold: bool) -> None:
        """Take what is watched.

        Args:
            paths: The files that the phase reads.
            site: Where they lie.
            cold: Whether to evict them first.
        """
        self.paths = paths
        self.site = site
        self.cold = cold

    def __enter__(self) -> Self:
        started = time.perf_counter()
        if self.cold:
            evict(self.paths)
        self._seconds = time.perf_counter() - started if self.cold else 0.0
        self._before = resident_bytes(self.paths)
        self._counted = Counters.read(self.site)
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is None:
            self._moved = Counters.read(self.site).since(self._counted)
            self._after = resident_bytes(self.paths)

    def evidence(
        self,
        asked_bytes: int,
        *,
        direct: bool = False,
        written_by_another: bool = False,
        larger_than_memory: bool = False,
    ) -> Evidence:
        """Return what was seen; to be called when the block has ended."""
        return Evidence(
            asked_bytes=asked_bytes, resident_before=self._before, resident_after=self._after,
            moved=self._moved, direct=direct, written_by_another=written_by_another,
            larger_than_memory=larger_than_memory, seconds_evicting=self._seconds,
        )  # fmt: skip


def merge(ranks: Sequence[Evidence]) -> Evidence:
    """Put together what the ranks of one node saw of one phase: its counters count for all."""
    return Evidence(
        asked_bytes=sum(rank.asked_bytes for rank in ranks),
        resident_before=_together([rank.resident_before for rank in ranks]),
        resident_after=_together([rank.resident_after for rank in ranks]),
        moved=join_moved([rank.moved for rank in ranks], added=OF_A_PROCESS),
        direct=all(rank.direct for rank in ranks),
        written_by_another=all(rank.written_by_another for rank in ranks),
        larger_than_memory=any(rank.larger_than_memory for rank in ranks),
        seconds_evicting=max(rank.seconds_evicting for rank in ranks),
    )


def judge_nodes(verdicts: Mapping[str, CacheVerdict]) -> CacheVerdict:
    """Judge a phase by the verdicts of its nodes: one state only where all have it."""
    states = {verdict.state for verdict in verdicts.values()}
    first = next(iter(verdicts.values()))
    if len(states) == 1:
        return first
    listed = ", ".join(f"{node} {verdict.state}" for node, verdict in verdicts.items())
    return CacheVerdict("unknown", f"nodes differ: {listed}")


def judge(evidence: Evidence, site: Site) -> CacheVerdict:
    """Judge whether this node served a phase from its memory, by what was seen and nothing else.

    Cold: nothing of the files was in memory before, and a counter that sees this filesystem shows
    that what was asked for was fetched; or it was read past the only cache. Warm: all was in
    memory, or nothing was fetched by a counter that would have shown it. Else unknown, and why.
    """
    asked, before = evidence.asked_bytes, evidence.resident_before
    if asked <= 0:
        return CacheVerdict("unknown", "no data was asked for")
    if before.bytes_in_files <= 0:
        return CacheVerdict("unknown", "the files are empty")
    if site.client_cache == "pagepool":
        return CacheVerdict(
            "unknown", f"{site.name} keeps data in its pagepool, which nothing shows"
        )
    if site.client_cache == "unknown":
        return CacheVerdict("unknown", f"where {site.name}'s client keeps data is not known")
    counter = _counter(evidence, site)
    if evidence.direct and site.name in DIRECT_PASSES_CACHE:
        return _judge_direct(evidence, site, counter)
    if before.bytes_resident is None:
        if counter.is_its_own and counter.share(asked) <= NOTHING:
            return CacheVerdict(
                "warm", f"{counter.shown(asked)}; what was in memory cannot be seen"
            )
        return CacheVerdict("unknown", f"what was in memory cannot be seen; {counter.shown(asked)}")
    if before.bytes_resident <= NOTHING * min(asked, before.bytes_in_files):
        return _judge_evicted(evidence, site, counter)
    return _judge_resident(evidence, before.bytes_resident, counter)


@dataclass(frozen=True)
class _Counter:
    """What saw this filesystem's traffic.

    Attributes:
        moved: Bytes; None: there is no such counter.
        is_its_own: Whether it counts all of this filesystem's traffic for us, and nothing else.
    """

    name: str
    moved: int | None
    is_its_own: bool

    def share(self, asked_bytes: int) -> float:
        """Moved of asked; between nothing and all where there is no counter."""
        return 0.5 if self.moved is None else self.moved / asked_bytes

    def shown(self, asked_bytes: int) -> str:
        if self.moved is None:
            return f"no counter here sees this filesystem ({self.name})"
        return f"{self.name}: {self.share(asked_bytes):.1%} of what was asked for was fetched"


def _counter(evidence: Evidence, site: Site) -> _Counter:
    moved = evidence.moved
    if site.name in BLOCK_BACKED:
        # An overlay's lower layer may be on anything.
        return _Counter("own block reads", moved.process_read_bytes, site.name != "overlay")
    if moved.client_read_bytes is not None:
        return _Counter(f"{site.name} client", moved.client_read_bytes, True)
    if site.name in ("fuse", "fuseblk", "virtiofs") and site.mount.server is None:
        return _Counter("pages filled that stayed", _filled(evidence), False)
    if site.is_shared:
        links = [moved.network_received_bytes, moved.rdma_received_bytes]
        known = [link for link in links if link is not None]
        return _Counter("network links", sum(known) if known else None, False)
    return _Counter("none for its kind", None, False)


def _filled(evidence: Evidence) -> int | None:
    before = evidence.resident_before.bytes_resident
    after = evidence.resident_after.bytes_resident
    if evidence.direct or before is None or after is None:
        return None
    return max(after - before, 0)


def _judge_direct(evidence: Evidence, site: Site, counter: _Counter) -> CacheVerdict:
    asked = evidence.asked_bytes
    if counter.moved is not None and counter.share(asked) < MOST:
        return CacheVerdict("unknown", f"read with O_DIRECT, but {counter.shown(asked)}")
    return CacheVerdict(
        "cold", f"read with O_DIRECT; {counter.shown(asked)}{_beside(evidence, site)}"
    )


def _judge_evicted(evidence: Evidence, site: Site, counter: _Counter) -> CacheVerdict:
    asked = evidence.asked_bytes
    if counter.share(asked) >= MOST:
        why = f"nothing was in the page cache before; {counter.shown(asked)}"
        return CacheVerdict("cold", f"{why}{_beside(evidence, site)}")
    return CacheVerdict(
        "unknown", f"nothing was in the page cache before, but {counter.shown(asked)}"
    )


def _judge_resident(evidence: Evidence, resident: int, counter: _Counter) -> CacheVerdict:
    asked, in_files = evidence.asked_bytes, evidence.resident_before.bytes_in_files
    was = f"{resident / in_files:.1%} of the files was in the page cache before"
    # Others' traffic may go over the links, too: only as much as was asked for speaks against it.
    fetched = counter.moved is not None and counter.share(asked) > (
        SOME if counter.is_its_own else MOST
    )
    if resident >= ALL * in_files and not fetched and not evidence.direct:
        return CacheVerdict("warm", was)
    if counter.is_its_own and counter.share(asked) <= NOTHING:
        return CacheVerdict("warm", f"{was}; {counter.shown(asked)}")
    read = "read with O_DIRECT; " if evidence.direct else ""
    return CacheVerdict("unknown", f"{read}{was}; {counter.shown(asked)}")


def _beside(evidence: Evidence, site: Site) -> str:
    parts = [
        "; another node wrote the files" if evidence.written_by_another else "",
        "; they are more than this node's memory" if evidence.larger_than_memory else "",
        "; the server's cache cannot be seen" if site.is_shared else "",
        ", nor one in the client's process" if site.mount.fstype.startswith("fuse") else "",
    ]
    return "".join(parts)


def _together(ranks: Sequence[Residency]) -> Residency:
    resident = [rank.bytes_resident for rank in ranks if rank.bytes_resident is not None]
    in_files = sum(rank.bytes_in_files for rank in ranks)
    if len(resident) < len(ranks):
        return Residency(bytes_in_files=in_files, bytes_resident=None, said_by="none")
    return replace(ranks[0], bytes_in_files=in_files, bytes_resident=sum(resident))
