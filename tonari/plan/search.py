"""What `tonari plan --search` prints: the fastest settings of the mesh, as a table and commands."""

from typing import TYPE_CHECKING

from tonari.plan.table import lay_table
from tonari.sizes import format_bytes

if TYPE_CHECKING:
    from oracle.search.search import Candidate, Plans

NEXT = (
    "An estimate by equations, without loading data: docs/plan.md says what it leaves out. "
    "`tonari probe` and `tonari plan --probe` time the few that are worth it."
)


def search_words(found: "Plans") -> list[str]:
    """Describe what a search found, in lines.

    Args:
        found: With one candidate at least.
    """
    best = found.candidates[0]
    lines = [
        f"{found.legal:,} configurations are legal for {found.global_batch_size:,} samples a step: "
        f"{found.priced:,} priced, {found.unfit:,} do not fit into memory, {found.pruned:,} have a "
        "bound above the last one's time",
        "",
        *lay_table(HEAD, search_rows(found)),
        "",
        f"the first, in parts of its step: {_parts(best)}",
        f"  {' '.join(best.settings)}",
    ]
    for number, (settings, why) in enumerate(search_notes(found)[1:], 2):
        lines += [f"{number}. {why}", f"  {settings}"]
    return [*lines, "", NEXT]


HEAD = (
    "", "step", "samples/s", "memory", "node hours", "pp", "dp", "shard", "cp", "tp",
    "microbatches", "schedule", "recomputes", "sp",
)  # fmt: skip


def search_rows(found: "Plans") -> list[list[str]]:
    """Lay the candidates out below `HEAD`."""
    return [_row(number, each) for number, each in enumerate(found.candidates, 1)]


def search_notes(found: "Plans") -> list[tuple[str, str]]:
    """Give each candidate's settings, and why it is slower than the first."""
    first, *rest = found.candidates
    others = [(" ".join(each.settings), each.why_slower or "It is as fast.") for each in rest]
    return [(" ".join(first.settings), ""), *others]


def _row(number: int, each: "Candidate") -> list[str]:
    settings = dict(setting.removeprefix("mesh.").split("=") for setting in each.settings)
    virtual = settings.get("virtual")
    return [
        str(number), f"{each.step_s:.3f} s", f"{each.samples_per_s:,.1f}",
        format_bytes(each.memory_bytes), f"{each.node_hours:,.1f}", settings["pp"],
        settings["dp_replicate"], settings["dp_shard"], settings["cp"], settings["tp"],
        settings["microbatches"], settings["schedule"] + (f" {virtual}" if virtual else ""),
        settings["checkpointing"], "yes" if settings["sequence_parallel"] == "true" else "-",
    ]  # fmt: skip


def _parts(each: "Candidate") -> str:
    largest = sorted(each.parts_s.items(), key=lambda part: -part[1])
    return ", ".join(f"{name} {seconds / each.step_s:.1%}" for name, seconds in largest if seconds)
