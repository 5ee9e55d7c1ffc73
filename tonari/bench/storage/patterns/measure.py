"""Measure a shared directory, the nodes' own, and the network between them."""

import json
import socket
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path

from dataio.source.expand import is_shard
from dataio.source.listing import list_parts
from dataio.world import World, launcher_name
from tonari.bench.errors import BenchError
from tonari.bench.notify import Notify
from tonari.bench.storage.patterns.files import Footprint, agree_name, footprint, leftovers
from tonari.bench.storage.patterns.network import measure_links
from tonari.bench.storage.patterns.options import StorageOptions
from tonari.bench.storage.patterns.patterns import (
    READS,
    CheckpointBurst,
    MetadataStorm,
    Pattern,
    PatternFiles,
)
from tonari.bench.storage.patterns.phase import PhaseJob, PhasePoint, measure_phase
from tonari.bench.storage.patterns.target import OpenTarget, open_target
from tonari.bench.storage.patterns.threads import Deadline
from tonari.bench.storage.patterns.together import agree
from tonari.bench.storage.results.results import MeasuredLink, Phase, Results, Scaling
from tonari.bench.storage.results.scaling import scale
from tonari.report.machine import describe_machine

ON_LOCAL = ("file_per_sample", "sequential_shard", "random_record")
"""What is measured of a node's own disk, where nobody else is."""


def measure_storage(
    world: World, directory: Path, scratch: Path, options: StorageOptions, notify: Notify
) -> Results:
    """Measure the patterns on a shared directory and on each node's own. Collective.

    Each rank writes files into either directory, reads those of another node's ranks, and removes
    its own, however it ends. Nothing is begun after the time limit.

    Args:
        world: All ranks.
        directory: That all see.
        scratch: The node's own.
        options: What to measure.
        notify: Receives progress, on rank 0.

    Returns:
        Everything but the end to end; whole on rank 0 alone.

    Raises:
        TogetherError: On every rank, if one cannot do its part; the message names it.
    """
    notify = notify if world.rank == 0 else lambda line: None
    names = node_names(world)
    until = Deadline(options.time_limit_s)
    spread, counts = agree(world, lambda: _check(world, options), doing="checking options")
    patterns = _patterns(world, options, spread)
    old = agree(world, lambda: [] if world.rank else _leftovers(directory), doing="looking")
    name = agree_name(world)
    job = PhaseJob(
        world=world, nodes=names, until=until, repeats=options.repeats, direct=options.direct,
        seed=options.seed, tag=world.open_channel(),
    )  # fmt: skip
    mib = spread.total_bytes / 2**20
    notify(
        f"writing {mib:.0f} MiB a rank ({world.world_size} ranks) into {directory} and {scratch}"
    )
    opened = partial(open_target, world, name=name, footprint=spread, seed=options.seed)
    with opened(directory, "shared") as shared, opened(scratch, "local") as local:
        measured = _measured(job, shared, local, patterns, counts, options, notify)
        links: list[MeasuredLink] = []
        if world.num_nodes > 1 and not job.over():
            notify("network, between every two nodes")
            links = measure_links(world, names, repeats=options.repeats)
    phases = [phase for phase in measured if phase is not None]
    skipped = len(measured) - len(phases)
    early = any("time limit" in note for phase in phases for note in phase.notes)
    problems = [*old]
    if skipped or early:
        problems.append(
            f"the patterns' time limit of {options.time_limit_s:g} s came first: {skipped} of "
            f"{len(measured)} phases were not measured; give a larger --time-limit"
        )
    return Results(
        environment={} if world.rank else describe_environment(world, names, directory, options),
        site=shared.site, local=local.site, phases=phases, scalings=_scalings(phases), links=links,
        complete=not (skipped or early), problems=problems,
    )  # fmt: skip


def node_names(world: World) -> list[str]:
    """Name the nodes, each by a name of its own: its host's, numbered where several share it.

    Collective.
    """
    received = world.allgather(socket.gethostname().encode(), doing="naming nodes")
    hosts = [received[ranks[0]].decode() for ranks in world.topology.ranks_of_node]
    return [
        host if hosts.count(host) == 1 else f"{host} ({node})" for node, host in enumerate(hosts)
    ]


def describe_environment(
    world: World, nodes: Sequence[str], directory: Path, options: StorageOptions
) -> dict[str, object]:
    """Describe this machine, the job and what was asked for."""
    return {
        **describe_machine(directory),
        "launcher": launcher_name(world.world_size),
        "ranks": world.world_size,
        "nodes": world.num_nodes,
        "ranks_per_node": list(world.replicas_per_node),
        "hosts": list(nodes),
        "options": asdict(options),
    }


def _check(world: World, options: StorageOptions) -> tuple[Footprint, list[int]]:
    counts = options.client_counts(world.world_size)
    if counts[-1] > world.world_size:
        raise BenchError(
            f"{counts[-1]} clients: found {world.world_size} ranks, expected at least as many; "
            "start more, or ask for fewer"
        )
    try:
        spread = footprint(
            options.size_bytes, sample_bytes=options.sample_bytes, world_size=world.world_size
        )
    except ValueError as error:
        raise BenchError(f"{error}; give a larger --size, or smaller samples") from error
    return spread, counts


def _patterns(world: World, options: StorageOptions, spread: Footprint) -> list[Pattern]:
    known: dict[str, Pattern] = {**READS, "checkpoint_burst": CheckpointBurst()}
    patterns = [known[name] for name in options.patterns]
    if options.metadata_storm:
        patterns.append(MetadataStorm())
    if options.dataset is not None:
        found = agree(
            world, lambda: [] if world.rank else dataset_files(options.dataset or ()),
            doing="finding the dataset",
        )  # fmt: skip
        # One rank asks for the names of what may be millions of files.
        text = json.dumps([str(path) for path in found]).encode() if not world.rank else b""
        listed = json.loads(world.allgather(text, doing="listing the dataset")[0])
        patterns.insert(0, PatternFiles([Path(path) for path in listed], spread.total_bytes))
    return patterns


def dataset_files(patterns: Sequence[str]) -> list[Path]:
    """List the files of a dataset, whatever a loader opens, or of a directory of any files.

    Raises:
        BenchError: If it is not on a filesystem, or holds no file.
        SourceError: If shards are missing.
    """
    found: list[Path] = []
    for pattern in patterns:
        if "://" in pattern:
            raise BenchError(
                f"{pattern}: is a URL, expected files of a filesystem; name a path that this node "
                "has mounted"
            )
        path = Path(pattern).expanduser()
        is_plain = path.is_dir() and not any(is_shard(child.name) for child in path.iterdir())
        for part in [path] if is_plain else list_parts(pattern):
            found += files_below(Path(part))
    if not found:
        raise BenchError(f"{', '.join(patterns)}: holds no file, expected a dataset; name another")
    return [path.absolute() for path in found]


def files_below(path: Path) -> list[Path]:
    """List the files of a directory and of those in it; of a file, itself."""
    below = path.expanduser().rglob("*") if path.is_dir() else [path]
    return sorted(file for file in below if file.is_file())


def _leftovers(directory: Path) -> list[str]:
    return [
        f"{path} was there before: another run is under way, or one was killed; if none is, remove "
        "it"
        for path in leftovers(directory)
    ]


def _points(
    target: OpenTarget, patterns: Sequence[Pattern], counts: Sequence[int], options: StorageOptions
) -> Iterator[tuple[Pattern, PhasePoint]]:
    for pattern in patterns:
        if target.tier == "local" and pattern.name not in ON_LOCAL:
            continue
        for clients in counts if target.tier == "shared" else counts[-1:]:
            for threads in sorted(set(options.threads)):
                for wanted in options.temperatures:
                    if wanted in pattern.temperatures:
                        yield pattern, PhasePoint(clients=clients, threads=threads, wanted=wanted)


def _measured(
    job: PhaseJob, shared: OpenTarget, local: OpenTarget, patterns: Sequence[Pattern],
    counts: Sequence[int], options: StorageOptions, notify: Notify,
) -> list[Phase | None]:  # fmt: skip
    points = [
        (target, *point)
        for target in (shared, local)
        for point in _points(target, patterns, counts, options)
    ]
    measured = []
    for number, (target, pattern, point) in enumerate(points, 1):
        if not job.until.passed:
            notify(
                f"{number} of {len(points)}: {pattern.name} ({target.tier}), {point.wanted}, "
                f"ranks {point.clients}, threads {point.threads}"
            )
        measured.append(measure_phase(job, target, pattern, point))
    return measured


def _scalings(phases: Sequence[Phase]) -> list[Scaling]:
    groups: dict[tuple[str, str], list[Phase]] = {}
    for phase in phases:
        if phase.tier == "shared":
            groups.setdefault((phase.pattern, phase.wanted), []).append(phase)
    scalings = [scale(group) for group in groups.values()]
    return [scaling for scaling in scalings if scaling is not None]
