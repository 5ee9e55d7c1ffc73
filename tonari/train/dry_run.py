"""`tonari train CONFIG --dry-run`: what the run would be, as tables or as JSON."""

import json
from collections.abc import Iterable, Sequence
from dataclasses import asdict
from itertools import groupby

from tonari.sizes import format_bytes
from trainer.config.config import Config
from trainer.run.deliveries import Delivery
from trainer.run.dry_run import DryRun, PipelineRank, dry_run

MOST_KINDS = 16
"""Of ways in which replicas are fed; more are not listed."""


def show_dry_run(config: Config, *, world_size: int, num_nodes: int, as_json: bool) -> None:
    """Print a run as it would be.

    Args:
        config: The settings.
        world_size: Ranks.
        num_nodes: Nodes they are on.
        as_json: Print one JSON document instead of tables.

    Raises:
        ConfigError: If the settings do not fit such a world.
    """
    found = dry_run(config, world_size=world_size, num_nodes=num_nodes)
    if as_json:
        print(json.dumps(asdict(found), indent=1))
        return
    print(_words(config, found))


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
            "",
            "Who holds what (of the ranks at one coordinate of pp, the fullest)",
            *_table(HELD, [_held_row(rank) for rank in found.pipeline_ranks]),
            "",
            "Its memory, in bytes; activations are estimated (docs/train.md), buffers left out",
            *_table(MEMORY, [_memory_row(rank) for rank in found.pipeline_ranks]),
            "",
            "How batches come to the ranks (of the first of the replicas that are fed alike)",
            *_table(FED, [_fed_row(each) for each in found.deliveries[:MOST_KINDS]]),
            *([f"... and {num_hidden} replicas more, fed in other ways"] if hidden else []),
        ]
    )


HELD = ("pp", "stages", "blocks", "ends", "parameters", "a rank's")
MEMORY = ("pp", "parameters", "gathered", "gradients", "optimizer", "activations", "total")
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


def _table(names: Iterable[str], rows: Iterable[Sequence[str]]) -> list[str]:
    lines = [tuple(names), *(tuple(row) for row in rows)]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    return [
        "  " + "  ".join(cell.rjust(width) for cell, width in zip(line, widths, strict=True))
        for line in lines
    ]
