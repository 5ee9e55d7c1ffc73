"""Measure what a prediction needs of a machine and of a model, and keep it as JSON.

A probe of several nodes is one of the first node, with the messages between nodes.
"""

import json
import math
import os
import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch

from dataio.base.atomic import write_json
from dataio.job.launch import LATER_S, join
from dataio.job.memory import keep_freed_memory
from dataio.world import Topology, World, discover_world
from tonari.oracle.clock import Gpu, find_gpu
from tonari.oracle.errors import OracleError
from tonari.oracle.probe.data import DataTimes, data_times, reads, time_data
from tonari.oracle.probe.messages import (
    EXCHANGE,
    LINK_SIZES,
    SIZES,
    MessageTimes,
    group_sizes,
    time_links,
    time_messages,
)
from tonari.oracle.programs import first_like, first_ranks
from tonari.oracle.record import Message, Wait
from tonari.oracle.stopwatch import Timed, time_step
from tonari.trainer.config.config import Config
from tonari.trainer.private.messages import limit_waits_of_groups
from tonari.trainer.run.build import lay_out
from tonari.trainer.run.own import Own

FORMAT = 4


@dataclass(frozen=True, kw_only=True)
class Probe:
    """What was measured with as many ranks on a node as the job has there.

    Attributes:
        torch: Its version.
        cores: That the ranks of a node may use together.
        ranks: Of a node.
        world_size: Of the job whose steps were timed.
        messages: Among the ranks of a node, and between nodes if there were several.
        settings: What of the job's settings decides what a step computes, by section.
        steps: Of the first rank of each kind, by pp coordinate and tile: what it computes where
            nobody else does.
        slowdowns: So many ranks computing at a time, and how many times longer it took them; of
            the laps of ``steps``, the spread is that beside the most of them.
        evaluations: As ``steps``, of a batch that is evaluated; empty if ``data`` is None.
        data: What feeding the ranks takes; None: not measured.
        overrides: That were given with the settings' file, as ``SECTION.KEY=VALUE``.
        nodes: That it was started on.
        gpu: The name of that on which steps were timed; empty: it was the host.
    """

    torch: str
    cores: int
    ranks: int
    world_size: int
    settings: dict[str, str]
    messages: tuple[MessageTimes, ...]
    steps: tuple[Timed, ...]
    slowdowns: tuple[tuple[int, float], ...]
    evaluations: tuple[Timed, ...] = ()
    data: DataTimes | None = None
    overrides: tuple[str, ...] = ()
    nodes: int = 1
    gpu: str = ""

    @property
    def inside(self) -> tuple[MessageTimes, ...]:
        """Messages among the ranks of a node."""
        return tuple(each for each in self.messages if each.nodes == 1)

    @property
    def between(self) -> tuple[MessageTimes, ...]:
        """Messages between nodes."""
        return tuple(each for each in self.messages if each.nodes > 1)


def probe(
    config: Config, *, world_size: int, own: Own | None = None, steps: int = 10,
    sizes: Sequence[int] = SIZES, link_sizes: Sequence[int] = LINK_SIZES,
    data: bool = False, timeout_s: float = 300.0,
) -> Probe:  # fmt: skip
    """Time messages among the ranks of a node and between nodes, and steps of the job. Collective.

    Start as many ranks on a node as the job will have on each; on two nodes or more, if what joins
    them is to be timed too. What a rank computes, and its loader, are timed on the first of them.

    Args:
        config: The job's settings.
        world_size: Ranks of the whole job.
        own: What the caller of `trainer.train` would bring.
        steps: How many to time at once.
        sizes: Of messages in a node, in bytes; empty: time no messages.
        link_sizes: Of those between nodes.
        data: Whether to time the loader too, on the job's data.
        timeout_s: Longest wait for another rank.

    Raises:
        ConfigError: If the settings do not fit such a world.
        OracleError: If nodes have different numbers of ranks, ranks do not lie node by node, are
            more than the job has, or train on GPUs, of which there is none here.
        DataioError: If the data cannot be read.
    """
    with discover_world(timeout_s=timeout_s) as world:
        if world.world_size > world_size:
            raise OracleError(
                f"a probe was started with {world.world_size} ranks, more than the {world_size} of "
                "the whole job; start as many as the job has on a node"
            )
        ranks = count_ranks(world.topology)
        gpu = find_gpu(config, world)
    # Before anything is timed: what does not fit is not worth a wait.
    layout = lay_out(config, world_size)
    # As in a run, where `join` does it: steps here are timed outside of one
    keep_freed_memory()
    of_data: DataTimes | None = None
    if data:
        readers = sum(reads(config, layout, rank, own) for rank in range(ranks))
        with join(device="cpu", timeout_s=timeout_s) as job:
            of_data = time_data(config, job, readers=readers, own=own)
    with discover_world(timeout_s=timeout_s) as world:
        found = _time_steps(config, world, layout.sizes, world_size, own, steps, gpu)
        evaluations: tuple[Timed, ...] = ()
        if data and world.rank == 0:
            evaluations = tuple(
                time_step(
                    config, world_size=world_size, rank=timed.rank, own=own, steps=steps,
                    evaluates=True, gpu=gpu,
                ) for timed in found.steps
            )  # fmt: skip
        world.barrier(doing="timing evaluations")
    messages = probe_messages(
        sizes=sizes, link_sizes=link_sizes, timeout_s=timeout_s, device="cuda" if gpu else "cpu"
    )
    return replace(found, messages=messages, evaluations=evaluations, data=of_data)


def probe_messages(
    *, sizes: Sequence[int] = SIZES, link_sizes: Sequence[int] = LINK_SIZES,
    timeout_s: float = 300.0, device: str = "cpu",
) -> tuple[MessageTimes, ...]:  # fmt: skip
    """Time messages among the ranks of the first node, and between nodes. Collective.

    To be called after steps are timed, not before: once large messages were freed, glibc gives no
    memory back to the system, and a step is faster than in a run, where it does so every time.

    Args:
        sizes: Of messages in a node, in bytes; empty: time none at all.
        link_sizes: Of those between nodes.
        timeout_s: Longest wait for another rank.
        device: ``"cuda"``: between GPUs.
    """
    if not sizes:
        return ()
    limit_waits_of_groups(timedelta(seconds=timeout_s + LATER_S))
    with join(device=device, timeout_s=timeout_s) as job:
        ranks = count_ranks(job.world.topology)
        messages = time_messages(sizes=sizes, ranks=ranks, device=job.device)
        if job.world.num_nodes > 1:
            messages += time_links(job.world, ranks=ranks, sizes=link_sizes, device=job.device)
    if device == "cpu":
        return tuple(messages)
    # A host waits for its GPU in a spin, and would as well do something else
    return tuple(
        each if each.kind == EXCHANGE else replace(each, cores=(0.0,) * len(each.cores))
        for each in messages
    )


def count_ranks(topology: Topology) -> int:
    """Count the ranks of each node.

    Raises:
        OracleError: If nodes differ, or ranks do not lie in it node by node.
    """
    layout, nodes = topology.layout, topology.num_nodes
    if len(set(layout)) > 1:
        counts = ", ".join(map(str, layout))
        raise OracleError(
            f"the probe's {nodes} nodes have {counts} ranks, expected as many on each; start it "
            f"with srun -N{nodes} --ntasks-per-node={max(layout)} or mpiexec -ppn {max(layout)}"
        )
    if list(topology.node_of_rank) != sorted(topology.node_of_rank):
        numbers = ", ".join(map(str, topology.node_of_rank))
        raise OracleError(
            f"the probe's ranks lie on nodes {numbers}, expected one node's ranks side by side, as "
            "a plan takes them to lie; start it with srun --distribution=block or mpiexec -ppn "
            f"{layout[0]}"
        )
    return layout[0]


def _time_steps(
    config: Config, world: World, sizes: Sequence[int], world_size: int, own: Own | None,
    steps: int, gpu: Gpu | None,
) -> Probe:  # fmt: skip
    def together(ranks: Sequence[int]) -> list[Timed]:
        """Let as many processes as there are ranks each be one, and hand out what all timed."""
        found = b""
        team = world.part(range(len(ranks))) if world.rank < len(ranks) else None
        if team is not None:
            timed = time_step(
                config, world_size=world_size, rank=ranks[world.rank], own=own, steps=steps,
                ready=lambda: team.barrier(doing="timing steps"), gpu=gpu,
            )  # fmt: skip
            found = json.dumps(_to_json(timed)).encode()
        parts = world.allgather(found, doing="timing steps")
        return [_timed(json.loads(part)) for part in parts if part]

    firsts = first_ranks(world_size, sizes, num_tiles=math.prod(config.mesh.tiles))
    alone = {rank: together([rank])[0] for rank in firsts}
    like = {rank: first_like(rank, firsts, world_size, sizes) for rank in range(world_size)}
    slowdowns = [(1, 1.0)]
    steps_of: dict[int, Timed] = {}
    for count in group_sizes(count_ranks(world.topology))[1:]:
        ranks = [number * world_size // count for number in range(count)]
        timed = together(ranks)
        shares = [
            each.core_s / alone[like[rank]].core_s for rank, each in zip(ranks, timed, strict=True)
        ]  # fmt: skip
        steps_of |= {like[each.rank]: each for each in reversed(timed)}
        slowdowns.append((count, max(sum(shares) / count, 1.0)))
    return Probe(
        torch=torch.__version__,
        cores=len(os.sched_getaffinity(0)),
        ranks=count_ranks(world.topology),
        nodes=world.num_nodes,
        world_size=world_size,
        settings=step_settings(config),
        messages=(),
        steps=tuple(
            as_fast_as(alone[first], steps_of.get(first, alone[first])) for first in firsts
        ),
        slowdowns=tuple(slowdowns),
        gpu=gpu.name if gpu else "",
    )


def step_settings(config: Config) -> dict[str, str]:
    """Write down what of a job's settings decides what a step computes, by section."""
    data = config.data
    return {
        "data": repr((
            data.kind, data.batch_size, data.sequence_length, data.image_size, data.channels
        )),
        **{
            name: repr(getattr(config, name))
            for name in ("model", "text", "augment", "optimizer", "mesh")
        },
    }  # fmt: skip


def joined(rounds: Sequence[Probe]) -> Probe:
    """Make one probe of several of the same settings, by the steps of all of them.

    Args:
        rounds: At least one, of as many ranks each; the loader's times are those of the first.
    """
    first = rounds[0]
    return replace(
        first,
        steps=tuple(
            replace(
                same[0],
                laps_s=tuple(lap for each in same for lap in each.laps_s),
                issuing_s=tuple(lap for each in same for lap in each.issuing_s),
                step_s=tuple(step for each in same for step in each.step_s),
            )
            for same in zip(*(each.steps for each in rounds), strict=True)
        ),
        slowdowns=tuple(
            (same[0][0], statistics.mean(value for _, value in same))
            for same in zip(*(each.slowdowns for each in rounds), strict=True)
        ),
    )


def as_fast_as(alone: Timed, beside: Timed) -> Timed:
    """Take the spread of laps from a rank that had company, and their sum from one that had not."""
    scale = alone.computing_s / beside.computing_s
    laps_s = tuple(tuple(part * scale for part in lap) for lap in beside.laps_s)
    return replace(alone, laps_s=laps_s)


def save_probe(found: Probe, path: Path) -> None:
    """Write a probe as JSON."""
    document = {
        "format": FORMAT,
        **asdict(found),
        "steps": [_to_json(each) for each in found.steps],
        "evaluations": [_to_json(each) for each in found.evaluations],
    }  # fmt: skip
    write_json(path, document)


def load_probe(path: Path) -> Probe:
    """Read a probe.

    Raises:
        OracleError: If it is none, or of another torch.
    """
    if not path.exists():
        raise OracleError(f"{path}: no such file; make it with tonari probe TOML --out {path}")
    try:
        document = json.loads(path.read_text())
        if document.pop("format") != FORMAT:
            raise KeyError("format")
        document["messages"] = tuple(MessageTimes(**_tuples(each)) for each in document["messages"])
        document["overrides"] = tuple(document["overrides"])
        for name in ("steps", "evaluations"):
            document[name] = tuple(_timed(each) for each in document[name])
        document["data"] = document["data"] and data_times(document["data"])
        document["slowdowns"] = tuple((count, value) for count, value in document["slowdowns"])
        found = Probe(**document)
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise OracleError(
            f"{path}: not a probe of this version ({type(error).__name__}: {error}); make one with "
            "tonari probe"
        ) from error
    if found.torch != torch.__version__:
        raise OracleError(
            f"{path}: a probe of torch {found.torch}, and this is {torch.__version__}, which may "
            "compute faster or slower; make a new one with tonari probe"
        )
    return found


def _tuples(document: dict[str, Any]) -> dict[str, Any]:
    return {key: tuple(v) if isinstance(v, list) else v for key, v in document.items()}


def _to_json(timed: Timed) -> dict[str, Any]:
    return {
        "rank": timed.rank,
        "events": [
            asdict(event) if isinstance(event, Message) else event.message for event in timed.events
        ],
        **{name: getattr(timed, name) for name in ("laps_s", "step_s", "issuing_s", "copy_s")},
    }


def _timed(document: dict[str, Any]) -> Timed:
    return Timed(
        rank=document["rank"],
        events=tuple(
            Wait(event) if isinstance(event, int)
            else Message(**{**event, "ranks": tuple(event["ranks"])})
            for event in document["events"]
        ),
        laps_s=tuple(map(tuple, document["laps_s"])),
        step_s=tuple(document["step_s"]),
        issuing_s=tuple(map(tuple, document["issuing_s"])),
        copy_s=document["copy_s"],
    )  # fmt: skip
