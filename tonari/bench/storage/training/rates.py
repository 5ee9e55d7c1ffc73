"""Choose, of all that was measured, the figures that a prediction starts from. Pure."""

import math
from collections.abc import Sequence

import numpy as np

from tonari.bench.storage.results.results import Phase, Results, Temperature, Tier
from tonari.bench.storage.results.scaling import bandwidth
from tonari.bench.storage.training.predict import Rates, Workload

ONE_SAMPLE = ("random_record", "dataset")
"""Patterns that read a sample at a time from a shard, the plainest first."""
WHOLE_SHARDS = ("sequential_shard", "many_readers")
WRITES = ("checkpoint_burst",)


def choose_rates(
    results: Results,
    workload: Workload,
    *,
    step_s: float,
    dataloader_sample_s: float,
    staging_readers: int,
    null_staging_s: float = 0.0,
    null_staging_bytes: float = 0.0,
) -> Rates:
    """Take the figures of as many readers, and of requests as large, as the ways will have.

    Args:
        results: What was measured of storage and network.
        workload: What will be run.
        step_s: See `Rates`.
        dataloader_sample_s: See `Rates`.
        staging_readers: Of all ranks together.
        null_staging_s: Until null storage had its samples in memory.
        null_staging_bytes: That it read for that.
    """
    sample, nodes = workload.sample_bytes, len(workload.ranks_of_node)
    readers = workload.num_ranks * max(workload.workers, 1)
    phases = results.phases

    def shared(
        patterns: Sequence[str], wanted: Temperature, count: int, size: float
    ) -> float | None:
        chosen = alike(phases, patterns, tier="shared", wanted=wanted, request_bytes=size)
        return at_readers(chosen, count)

    local = alike(phases, ONE_SAMPLE, tier="local", wanted="cold", request_bytes=sample)
    writes = alike(phases, WRITES, tier="local", wanted=None, request_bytes=math.inf)
    staging = shared(WHOLE_SHARDS, "cold", staging_readers, math.inf)
    read_s = null_staging_bytes / staging if staging else null_staging_s
    links = [link.bytes_per_s for link in results.links]
    return Rates(
        step_s=step_s,
        dataloader_sample_s=dataloader_sample_s,
        start_s=max(null_staging_s - read_s, 0.0),
        random_bytes_per_s=shared(ONE_SAMPLE, "cold", readers, sample),
        random_warm_bytes_per_s=shared(ONE_SAMPLE, "warm", readers, sample),
        staging_bytes_per_s=staging,
        local_read_bytes_per_s=_of_node(local, workload.num_ranks, nodes),
        local_write_bytes_per_s=_of_node(writes, workload.num_ranks, nodes),
        link_bytes_per_s=min(links) if links else None,
    )


def alike(
    phases: Sequence[Phase],
    patterns: Sequence[str],
    *,
    tier: Tier,
    wanted: Temperature | None,
    request_bytes: float,
) -> list[Phase]:
    """Find the phases of the first pattern that was measured, of the nearest request size.

    Args:
        phases: All of them.
        patterns: In the order of preference.
        tier: Where.
        wanted: Cold or warm; None: either.
        request_bytes: Of the reads to be predicted; infinite: the largest there are.
    """
    for pattern in patterns:
        found = [
            phase
            for phase in phases
            if phase.pattern == pattern and phase.tier == tier and phase.repeats
            and wanted in (None, phase.wanted) and not phase.direct
        ]  # fmt: skip
        if found:
            sizes = {phase.request_bytes for phase in found}
            nearest = min(sizes, key=lambda size: _distance(size, request_bytes))
            return [phase for phase in found if phase.request_bytes == nearest]
    return []


def at_readers(phases: Sequence[Phase], readers: int) -> float | None:
    """Interpolate the bandwidth of all readers together; beyond those measured, the nearest."""
    points: dict[int, float] = {}
    for phase in phases:
        number = phase.clients * phase.threads
        points[number] = max(bandwidth(phase), points.get(number, 0.0))
    if not points:
        return None
    known = sorted(points)
    return float(np.interp(readers, known, [points[number] for number in known]))


def _of_node(phases: Sequence[Phase], readers: int, nodes: int) -> float | None:
    """Find the rate of one node: each reads and writes its own disk."""
    rate = at_readers([phase for phase in phases if phase.nodes == nodes], readers)
    return None if rate is None else rate / nodes


def _distance(size: int, wanted: float) -> float:
    if math.isinf(wanted):
        return -float(size)
    return abs(math.log(max(size, 1) / max(wanted, 1.0)))
