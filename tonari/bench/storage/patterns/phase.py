"""One phase: a pattern, run some times by some ranks, with the evidence of what was cold."""

import contextlib
import os
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec
import numpy as np
from numpy.typing import NDArray

from dataio.base.seeding import generator, key
from dataio.world import Topology, World
from tonari.bench.storage.patterns.calls import TimedCalls
from tonari.bench.storage.patterns.patterns import (
    READS,
    SHARED_BY_ALL,
    FilePart,
    Pattern,
    ShardReads,
    read_files,
)
from tonari.bench.storage.patterns.target import OpenTarget
from tonari.bench.storage.patterns.threads import Deadline, TimedReads
from tonari.bench.storage.patterns.together import agree, gather
from tonari.bench.storage.results.results import Phase, Repeat, Temperature
from tonari.bench.storage.results.timing import summarise
from tonari.bench.storage.site.counters import add_nodes
from tonari.bench.storage.site.evidence import (
    Evidence,
    Watch,
    judge,
    judge_nodes,
    merge,
    resident_bytes,
)
from tonari.bench.storage.site.record import JsonRecord

LEAST_S = 0.2
"""A warm phase is repeated for so long at least: ranks begin milliseconds apart."""

MOST_FILLS = 8
"""Times that files are read to make them warm."""

Ops = Mapping[str, NDArray[np.float32]]


@dataclass(frozen=True, kw_only=True)
class PhaseJob:
    """What all phases of a run share.

    Attributes:
        nodes: Their names, by number.
        until: When to begin nothing new.
        direct: Whether to read cold with O_DIRECT, where that is taken.
        tag: For outcomes on their way to rank 0.
    """

    world: World
    nodes: Sequence[str]
    until: Deadline
    repeats: int
    direct: bool
    seed: int
    tag: int

    def over(self) -> bool:
        """Whether the time limit has passed for any rank. Collective."""
        passed = np.array([self.until.passed])
        return bool(self.world.allreduce(passed, op="max", doing="looking at the time")[0])


@dataclass(frozen=True, kw_only=True)
class PhasePoint:
    """Where a phase is measured.

    Attributes:
        clients: Ranks that take part, spread over nodes.
        threads: Of each.
        wanted: What is tried to make of the client's cache.
    """

    clients: int
    threads: int
    wanted: Temperature


@dataclass(frozen=True)
class _Outcome:
    """What one client reports."""

    num_bytes: int
    seconds: float
    whole: bool
    evidence: Evidence
    ops: Ops


def choose_clients(topology: Topology, clients: int) -> list[int]:
    """Choose ranks on as many nodes as there are, the first of each node before any second."""
    ranks = range(topology.world_size)
    order = sorted(ranks, key=lambda rank: (topology.local_rank(rank), topology.node_of_rank[rank]))
    return sorted(order[:clients])


def measure_phase(
    job: PhaseJob, target: OpenTarget, pattern: Pattern, point: PhasePoint
) -> Phase | None:
    """Run a phase. Collective.

    Returns:
        What was found, the same shape on every rank, but whole on rank 0 alone; None if there was
        no time for any repeat.

    Raises:
        TogetherError: If a client could not read or write.
    """
    ranks = choose_clients(job.world.topology, point.clients)
    direct = job.direct and target.takes_direct and point.wanted == "cold" and pattern.name in READS
    outcomes = []
    for number in range(job.repeats):
        if job.over():
            break
        part = _part(job, pattern, ranks, point, direct, number)
        outcomes.append(_repeat(job, target, pattern, part, point.wanted))
    if not outcomes:
        return None
    notes = _notes(job, target, pattern, point, outcomes)
    repeats = [_judged(job, target, ranks, outcome) for outcome in outcomes if outcome]
    return Phase(
        pattern=pattern.name, tier=target.tier, clients=len(ranks), threads=point.threads,
        nodes=len({job.world.topology.node_of_rank[rank] for rank in ranks}),
        wanted=point.wanted, request_bytes=pattern.request_bytes(target.files), direct=direct,
        repeats=repeats, notes=notes,
        operations=[summarise(name, parts) for name, parts in _joined(outcomes).items()],
    )  # fmt: skip


def _part(
    job: PhaseJob, pattern: Pattern, ranks: list[int], point: PhasePoint, direct: bool, number: int
) -> FilePart | None:
    if job.world.rank not in ranks:
        return None
    stream = key(job.seed, f"bench-io {pattern.name}", epoch=number, replica=job.world.rank)
    return FilePart(
        client=ranks.index(job.world.rank), clients=len(ranks), threads=point.threads,
        direct=direct, rng=generator(stream),
    )  # fmt: skip


def _repeat(
    job: PhaseJob, target: OpenTarget, pattern: Pattern, part: FilePart | None, wanted: Temperature
) -> list[_Outcome]:
    """Run a phase once. Collective.

    Returns:
        On rank 0 what each client did; elsewhere nothing.
    """
    doing = f"{pattern.name} ({target.tier})"
    stack = contextlib.ExitStack()

    def prepare() -> Watch | None:
        if part is None:
            return None
        paths = pattern.paths(target.files, part)
        if wanted == "warm":
            fill(paths)
        return stack.enter_context(Watch(paths, target.site, cold=wanted == "cold"))

    watch = agree(job.world, prepare, doing=f"preparing {doing}")

    def work() -> TimedReads | None:
        if part is None:
            return None
        with stack:
            least_s = LEAST_S if wanted == "warm" else 0.0
            return pattern.run(target.files, part, until=job.until, least_s=least_s)

    timed = agree(job.world, work, doing=doing)
    packed = b""
    if part is not None and timed is not None and watch is not None:
        packed = _pack(timed, _evidence(job, target, pattern, part, watch, timed))
    received = gather(job.world, np.frombuffer(packed, np.uint8), doing=f"gathering {doing}",
                  tag=job.tag)  # fmt: skip
    return [_unpack(text) for text in received if text]


def fill(paths: Sequence[Path]) -> None:
    """Read files until no more of them comes into memory: some clients keep a part of each read."""
    held = -1
    for _ in range(MOST_FILLS):
        for _ in read_files(TimedCalls(1 << 20), paths=paths):
            pass
        seen = resident_bytes(paths)
        if seen.bytes_resident is None or not held < seen.bytes_resident < seen.bytes_in_files:
            return
        held = seen.bytes_resident


def _evidence(
    job: PhaseJob, target: OpenTarget, pattern: Pattern, part: FilePart, watch: Watch,
    timed: TimedReads,
) -> Evidence:  # fmt: skip
    world = job.world
    nodes = world.topology.node_of_rank
    own = pattern.name != "dataset" and target.tier == "shared"
    one_for_all = isinstance(pattern, ShardReads) and pattern.one_for_all
    writer = SHARED_BY_ALL if one_for_all else target.files.theirs
    in_files = sum(path.stat().st_size for path in watch.paths)
    memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return watch.evidence(
        timed.num_read, direct=part.direct,
        written_by_another=own and nodes[writer] != world.node,
        larger_than_memory=in_files * world.local_size > memory,
    )  # fmt: skip


def _judged(
    job: PhaseJob, target: OpenTarget, ranks: Sequence[int], outcomes: Sequence[_Outcome]
) -> Repeat:
    seen: defaultdict[int, list[Evidence]] = defaultdict(list)
    for rank, outcome in zip(ranks, outcomes, strict=True):
        seen[job.world.topology.node_of_rank[rank]].append(outcome.evidence)
    merged = {node: merge(evidence) for node, evidence in seen.items()}
    verdicts = {
        job.nodes[node]: judge(evidence, target.sites[node]) for node, evidence in merged.items()
    }
    return Repeat(
        seconds=max(outcome.seconds for outcome in outcomes),
        bytes_of_client=[outcome.num_bytes for outcome in outcomes],
        seconds_of_client=[outcome.seconds for outcome in outcomes],
        verdict=judge_nodes(verdicts), verdict_of_node=verdicts,
        moved=add_nodes([evidence.moved for evidence in merged.values()]),
    )  # fmt: skip


def _notes(
    job: PhaseJob,
    target: OpenTarget,
    pattern: Pattern,
    point: PhasePoint,
    outcomes: Sequence[list[_Outcome]],
) -> list[str]:
    notes = []
    if job.direct and point.wanted == "cold" and not target.takes_direct:
        notes.append(f"{target.site.name} does not take O_DIRECT: read through the cache")
    if len(outcomes) < job.repeats:
        notes.append(f"{len(outcomes)} of {job.repeats} repeats: the time limit came")
    if not all(outcome.whole for repeat in outcomes for outcome in repeat):
        notes.append("the time limit came before all was read: what was read counts")
    if pattern.name == "checkpoint_burst":
        notes.append("bytes are those written and those read beside it")
    return notes


def _joined(outcomes: Sequence[Sequence[_Outcome]]) -> Mapping[str, list[NDArray[np.float32]]]:
    """Put together what clients timed: by operation, an array for each repeat."""
    joined: defaultdict[str, list[NDArray[np.float32]]] = defaultdict(list)
    for repeat in outcomes:
        for name in dict.fromkeys(name for outcome in repeat for name in outcome.ops):
            parts = [outcome.ops[name] for outcome in repeat if name in outcome.ops]
            joined[name].append(np.concatenate(parts))
    return joined


class _Header(JsonRecord, frozen=True, kw_only=True):
    """What a rank reports of its part of a phase, the durations of its operations apart."""

    num_bytes: int
    seconds: float
    whole: bool
    evidence: Evidence
    ops: dict[str, int]


def _pack(timed: TimedReads, evidence: Evidence) -> bytes:
    """Lay out a header of JSON and its length, then the durations."""
    header = msgspec.json.encode(
        _Header(
            num_bytes=timed.num_bytes, seconds=timed.seconds, whole=timed.whole, evidence=evidence,
            ops={name: len(seconds) for name, seconds in timed.ops.items()},
        )
    )  # fmt: skip
    return b"".join(
        [len(header).to_bytes(8, "little"), header, *(ops.tobytes() for ops in timed.ops.values())]
    )


def _unpack(packed: bytes) -> _Outcome:
    at = 8 + int.from_bytes(packed[:8], "little")
    header = msgspec.json.decode(packed[8:at], type=_Header)
    ops = {}
    for name, count in header.ops.items():
        ops[name] = np.frombuffer(packed, np.float32, count, at)
        at += 4 * count
    return _Outcome(header.num_bytes, header.seconds, header.whole, header.evidence, ops)
