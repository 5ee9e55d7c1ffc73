"""`tonari train CONFIG --dry-run`: what the run would be, as tables or as JSON."""

import json
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from itertools import groupby

from tonari.oracle import Operator, Traffic, trace_step, traffic
from tonari.oracle.programs import first_ranks
from tonari.report.tables import Table
from tonari.sizes import format_bytes
from tonari.trainer.config.config import Config
from tonari.trainer.run.crossings import Crossing
from tonari.trainer.run.deliveries import Delivery
from tonari.trainer.run.dry_run import DryRun, PipelineRank, dry_run

MOST_KINDS = 16
"""Of ways in which replicas are fed; more are not listed."""


def show_dry_run(
    config: Config, *, world_size: int, num_nodes: int, traced: bool, as_json: bool
) -> None:
    """Print a run as it would be.

    Args:
        config: The settings.
        world_size: Ranks.
        num_nodes: Nodes they are on.
        traced: Make a step as the first rank of each coordinate of pp, too.
        as_json: Print one JSON document instead of tables.

    Raises:
        ConfigError: If the settings do not fit such a world.
    """
    found = dry_run(config, world_size=world_size, num_nodes=num_nodes)
    steps = _trace(config, found, world_size) if traced else ()
    if as_json:
        document = asdict(found) | ({"steps": [asdict(step) for step in steps]} if traced else {})
        print(json.dumps(document, indent=1))
        return
    print(_words(config, found))
    if steps:
        print("\n".join(_step_words(steps)))


@dataclass(frozen=True, kw_only=True)
class TracedStep:
    """A step of the first rank at a coordinate of pp.

    Attributes:
        pp_rank: The coordinate.
        rank: Of the job.
        kept_bytes: See `oracle.Trace`, as for the next one.
        peak_bytes: The most at a time.
        flops: Of products, convolutions and attention, what is computed again included.
        operators: Calls of operators.
        traffic: What it sends.
    """

    pp_rank: int
    rank: int
    kept_bytes: int
    peak_bytes: int
    flops: int
    operators: int
    traffic: tuple[Traffic, ...]


def _trace(config: Config, found: DryRun, world_size: int) -> tuple[TracedStep, ...]:
    sizes = [*found.axes.values()]
    steps = []
    for rank in first_ranks(world_size, sizes, num_tiles=math.prod(config.mesh.tiles)):
        trace = trace_step(config, world_size=world_size, rank=rank)
        operators = [event for event in trace.events if isinstance(event, Operator)]
        steps.append(
            TracedStep(
                pp_rank=rank * sizes[0] // world_size,
                rank=rank,
                kept_bytes=trace.kept_bytes,
                peak_bytes=trace.peak_bytes,
                flops=sum(each.flops for each in operators),
                operators=len(operators),
                traffic=traffic(trace, sizes),
            )
        )
    return tuple(steps)


def _step_words(steps: Sequence[TracedStep]) -> list[str]:
    whole = Table(STEP, [_step_row(step) for step in steps], STEP_TITLE)
    sent = [row for step in steps for row in _sent_rows(step)]
    more = ["", *Table(SENT, sent, "What it sends and receives").text()] if sent else []
    return ["", *whole.text(), *more]


def _step_row(step: TracedStep) -> list[str]:
    return [
        str(step.pp_rank), str(step.rank), format_bytes(step.kept_bytes),
        format_bytes(step.peak_bytes), f"{step.flops / 1e9:.3g}", f"{step.operators:,}",
    ]  # fmt: skip


def _sent_rows(step: TracedStep) -> list[list[str]]:
    return [
        [
            str(step.pp_rank), each.kind.replace("_", "-"), " x ".join(each.axes) or "-",
            f"{each.messages:,}", format_bytes(each.num_bytes),
        ]
        for each in step.traffic
    ]  # fmt: skip


def _words(config: Config, found: DryRun) -> str:
    axes = " x ".join(f"{name} {size}" for name, size in found.axes.items())
    schedule = (
        f", schedule {config.mesh.schedule} of {found.microbatches} microbatches"
        if found.axes["pp"] > 1
        else f", {found.microbatches} microbatches" * (found.microbatches > 1)
    )
    hidden = found.deliveries[MOST_KINDS:]
    num_hidden = sum(len(each.replicas) for each in hidden)
    return "\n".join(
        [
            f"mesh: {axes}, on {found.num_nodes} nodes{schedule}",
            f"model: {config.model.kind}, {found.parameters:,} parameters, "
            f"{found.flops_per_row / 1e9:.3g} GFLOP a sample forward; "
            f"{found.global_batch_size} samples a step",
            *(_crossing_words(each, tiles=bool(config.mesh.tiles)) for each in found.crossings),
            "",
            *Table(HELD, [_held_row(rank) for rank in found.pipeline_ranks], HELD_TITLE).text(),
            "",
            *Table(
                MEMORY, [_memory_row(rank) for rank in found.pipeline_ranks], MEMORY_TITLE
            ).text(),
            *([OFFLOADED] if config.mesh.offload else []),
            *([TILED] if config.mesh.tiles else []),
            "",
            *Table(
                FED, [_fed_row(each) for each in found.deliveries[:MOST_KINDS]], FED_TITLE
            ).text(),
            *([f"... and {num_hidden} replicas more, fed in other ways"] if hidden else []),
        ]
    )


CURES = {
    "tp": "mesh.tp={0} lies within one",
    "tiles": "{0} tiles lie within one",
    "cp": "mesh.cp={0}, or a smaller mesh.tp, lies within one",
    "dp_shard": "mesh.dp_shard={0} lies within one, with mesh.dp_replicate for the rest (HSDP), if "
    "its memory allows",
}
"""By axis, how to keep its messages in a node."""


def _crossing_words(each: Crossing, *, tiles: bool) -> str:
    axis = "tiles" if tiles and each.axis == "cp" else each.axis
    return (
        f"links: a group of mesh.{axis}={each.ranks} spans {each.nodes} nodes, so that its "
        f"messages in every block leave the node; {CURES[axis].format(each.ranks_within)}"
    )


HELD_TITLE = "Who holds what (of the ranks at one coordinate of pp, the fullest)"
HELD = ("pp", "stages", "blocks", "ends", "parameters", "a rank's")
OFFLOADED = (
    "mesh.offload: of it parameters, gradients and the optimizer's state lie in the host's memory"
)
TILED = (
    "mesh.tiles: activations are a tile's part of the whole, without halos; --trace counts these, "
    "and their messages (docs/tiles.md)"
)
MEMORY_TITLE = "Its memory, in bytes; activations are estimated (docs/train.md), buffers left out"
MEMORY = (
    "pp",
    "parameters",
    "gathered",
    "gradients",
    "optimizer",
    "activations",
    "copies",
    "total",
)
STEP_TITLE = (
    "A step without data, as the first rank at each pp coordinate (with each tile); bytes without "
    "the batch"
)
STEP = ("pp", "rank", "kept", "most", "GFLOP", "operators")
SENT = ("pp", "message", "along", "times", "bytes")
FED_TITLE = "How batches come to the ranks (of the first of the replicas that are fed alike)"
FED = ("replicas", "reads", "maps", "receives", "nothing", "scores")


def _held_row(rank: PipelineRank) -> list[str]:
    ends = [name for name, has in (("stem", rank.has_stem), ("head", rank.has_head)) if has]
    return [
        str(rank.pp_rank), _ranges(rank.stages), _ranges(rank.blocks), " and ".join(ends) or "-",
        f"{rank.parameters:,}", f"{rank.rank_parameters:,}",
    ]  # fmt: skip


def _memory_row(rank: PipelineRank) -> list[str]:
    memory = rank.memory
    return [str(rank.pp_rank), *map(format_bytes, (*asdict(memory).values(), memory.total_bytes))]


def _fed_row(each: Delivery) -> list[str]:
    reads = f"rank {each.reader}"
    if each.target_reader is not None:
        reads += f", targets: rank {each.target_reader}"
    return [
        _ranges(each.replicas), reads, _ranges(each.maps), _ranges(each.receives),
        _ranges(each.nothing), f"rank {each.scorer}",
    ]  # fmt: skip


def _ranges(numbers: Sequence[int]) -> str:
    """Shorten 0, 1, 2, 5 to "0-2, 5"."""
    runs = groupby(enumerate(sorted(numbers)), key=lambda pair: pair[1] - pair[0])
    ends = [[number for _, number in run] for _, run in runs]
    shown = [str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in ends]
    return ", ".join(shown) or "-"
