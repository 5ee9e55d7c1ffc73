"""`tonari doctor`: is this machine fine for Tonari, and if not, what to do."""

import json as json_module
import resource
import socket
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

import tyro

from dataio.world import World
from tonari.checks import Finding, check_machine, check_torch, check_trainer
from tonari.fabric import (
    check_fabric,
    check_memory_lock,
    check_transport,
    fabric_ports,
    loaded_libraries,
    python_home,
)
from tonari.names_check import check_names
from tonari.pairs import clock_offsets, judge_clocks, judge_pairs, measure_pairs
from tonari.probes import exchange, in_job, join, medium_words, probe_mpi, probe_torch


@dataclass(frozen=True, kw_only=True)
class Doctor:
    """Check this machine: packages, MPI, torch, cache directory, CPUs, limits.

    Each line is fine, look (it works, with a reservation) or broken, with what to do. Under
    mpiexec, srun or torchrun every rank checks its own node, nodes are compared in pairs, and rank
    0 prints. Exit status 1 if anything is broken.
    """

    cache: Path | None = None
    """Cache directory to check: the one that a loader would choose, unless given."""
    ranks: int = 2
    """Ranks to start for the exchange, where no launcher has started any."""
    timeout_s: float = 60.0
    """Longest wait for them."""
    json: bool = False
    """Print one JSON document and nothing else on stdout."""

    def __post_init__(self) -> None:
        if self.ranks < 1:
            raise ValueError(f"--ranks is {self.ranks}, must be >= 1")
        if not self.timeout_s > 0:
            raise ValueError(f"--timeout-s is {self.timeout_s}, must be > 0")


def main(argv: list[str]) -> int:
    """Run the command. Collective under mpiexec and torchrun.

    Raises:
        WorldError: If the ranks of this job do not find one another.
    """
    options = tyro.cli(
        Doctor, args=argv, prog="tonari doctor", config=(tyro.conf.FlagCreatePairsOff,)
    )
    return _status(_show(_job(options) if in_job() else _alone(options), as_json=options.json))


def _alone(options: Doctor) -> Iterator[Finding]:
    yield from _machine(options)
    yield probe_torch(options.ranks, timeout_s=options.timeout_s)
    yield probe_mpi(options.ranks, timeout_s=options.timeout_s)


def _machine(options: Doctor) -> Iterator[Finding]:
    # First, while nothing has imported torch yet.
    yield python_home()
    yield from check_machine(str(options.cache) if options.cache else None)
    yield check_torch()
    yield check_trainer()
    yield check_fabric(fabric_ports())
    yield check_memory_lock(resource.getrlimit(resource.RLIMIT_MEMLOCK)[0], fabric_ports())
    yield check_names()


def _job(options: Doctor) -> Iterator[Finding]:
    """Yield all ranks' findings on rank 0, none on the others. Collective."""
    # Before the ranks meet: a rank that imports for long must not keep the others waiting in MPI.
    before = list(_machine(options))
    with join() as world:
        mine = [
            *before,
            check_transport(medium_words(), loaded_libraries(), fabric_ports()),
            Finding("ranks", "fine", exchange(world)),
        ]
        data = json_module.dumps([asdict(finding) for finding in mine]).encode()
        told = world.allgather(data, doing="gathering what every rank found (doctor)")
        between = list(_between(world))
    if world.rank == 0:
        yield from merge([[Finding(**found) for found in json_module.loads(t)] for t in told])
        yield from between


def _between(world: World) -> Iterator[Finding]:
    """Compare nodes, or ranks where there is one node only. Collective."""
    hosts = world.allgather(socket.gethostname().encode(), doing="naming nodes (doctor)")
    across = world.num_nodes > 1
    places = [ranks[0] for ranks in world.topology.ranks_of_node]
    if not across:
        places = list(range(world.world_size))
    # Simulated nodes share one host's name.
    real = across and len({hosts[place] for place in places}) == len(places)
    names = [hosts[place].decode() if real else f"rank {place}" for place in places]
    yield judge_pairs(measure_pairs(world, places, names), across_nodes=across)
    offsets = clock_offsets(world, places)
    if across and offsets:
        yield judge_clocks(offsets, names)


def merge(by_rank: list[list[Finding]]) -> Iterator[Finding]:
    """Say once what all ranks found alike, and name the ranks where they differ.

    Args:
        by_rank: For each rank, the same checks in the same order.
    """
    for alike in zip(*by_rank, strict=True):
        groups: dict[tuple[str, str], list[int]] = {}
        for rank, finding in enumerate(alike):
            groups.setdefault((finding.verdict, finding.cure), []).append(rank)
        for ranks in groups.values():
            first = alike[ranks[0]]
            where = f" (rank {', '.join(map(str, ranks))})" if len(groups) > 1 else ""
            yield Finding(first.check + where, first.verdict, first.found, first.cure)


def _show(findings: Iterable[Finding], *, as_json: bool) -> list[Finding]:
    shown = []
    for finding in findings:
        shown.append(finding)
        if not as_json:
            cure = f"\n{'':9}-> {finding.cure}" if finding.cure else ""
            print(f"{finding.verdict:<8} {finding.check}: {finding.found}{cure}", flush=True)
    if as_json and shown:
        print(json_module.dumps({"findings": [asdict(finding) for finding in shown]}))
    elif shown:
        print(_verdict(shown))
    return shown


def _verdict(findings: list[Finding]) -> str:
    """Sum up in one line."""
    broken, look = (
        ", ".join(finding.check for finding in findings if finding.verdict == verdict)
        for verdict in ("broken", "look")
    )
    if broken:
        return f"Tonari does not work here yet: mend what is broken ({broken})."
    return f"Tonari works here; look at: {look}." if look else "Tonari works here: all is fine."


def _status(findings: list[Finding]) -> int:
    return int(any(finding.verdict == "broken" for finding in findings))
