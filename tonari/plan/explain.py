"""What `tonari plan --explain` prints: a step by simple equations, beside the simulated one."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from tonari.report.tables import Table, figure
from tonari.sizes import format_bytes

if TYPE_CHECKING:
    from tonari.oracle.explain import Explanation
    from tonari.oracle.paradl import RingTimes
    from tonari.oracle.plan import TilePlan

TILES = ("rank", "halos", "bytes", "by links alone", "sums", "bytes", "kept", "read")
HEAD = ("term", "equation", "by it, s", "simulated, s")
NOTES = (
    "By ParaDL's equations (Kahira et al., HPDC 2021): each stage computes what it was timed at "
    "alone, every message is a ring of neighbours, n ranks in all, and nothing overlaps.",
    "Simulated are a mean rank's computing beside the others, and what it waits for messages: "
    "less where they overlap with computing, more where other ranks come later, links are shared, "
    "or the pipeline is empty.",
)


@dataclass(frozen=True)
class ExplainedRow:
    """A term of a step.

    Attributes:
        term: Its name.
        equation: In words and figures.
        by_equation_s: None: the equations leave it out.
        simulated_s: Of the same part; None: the simulation has none.
    """

    term: str
    equation: str
    by_equation_s: float | None
    simulated_s: float | None


def explanation_rows(found: "Explanation", step_s: float) -> list[ExplainedRow]:
    """Lay a step out by its terms, the last of which is the sum.

    Args:
        found: The terms.
        step_s: Of the simulated step.
    """
    terms, simulated_s = found.terms, found.simulated_s
    stage = f"the stage at coordinate {found.pp_rank} of pp, timed alone"
    rows = [ExplainedRow("computing", stage, terms.computation_s, simulated_s.get("compute"))]
    if found.stages > 1:
        share = f"{found.stages - 1} / {found.microbatches}"
        words = f"computing x (pp - 1) / microbatches = x {share}"
        rows.append(ExplainedRow("pipeline bubble", words, terms.bubble_s, None))
    rows += [
        ExplainedRow(ring.name, _equation(ring), ring.seconds, simulated_s.get(ring.name, 0.0))
        for ring in terms.rings
    ]
    rows += [
        ExplainedRow(name, "left out", None, simulated_s[name])
        for name in ("data", "copy", "issuing")
        if name in simulated_s
    ]
    return [*rows, ExplainedRow("a step", "the sum", terms.step_s, step_s)]


def explanation_table(rows: Sequence[ExplainedRow]) -> Table:
    """Lay a step's terms out."""
    cells = [
        [row.term, row.equation, figure(row.by_equation_s, ".4f"), figure(row.simulated_s, ".4f")]
        for row in rows
    ]
    return Table(HEAD, cells, "A step by simple equations")


def tile_table(tiles: Sequence["TilePlan"]) -> Table:
    """Lay out what ranks exchange between tiles of a sample, and hold of one."""
    rows = [
        [
            str(tile.rank), f"{tile.messages:,}", format_bytes(tile.sent_bytes),
            f"{tile.sending_s:.4f} s", f"{tile.sums:,}", format_bytes(tile.summed_bytes),
            format_bytes(round(tile.kept_row_bytes)), format_bytes(round(tile.read_row_bytes)),
        ]
        for tile in tiles
    ]  # fmt: skip
    return Table(TILES, rows, "Between tiles, in a step; and a rank's tile of a sample")


def _equation(ring: "RingTimes") -> str:
    latency = f"{ring.messages:,} x {ring.link.latency_s * 1e6:.3g} us"
    carried = format_bytes(ring.num_bytes)
    rate = f" / {1e-9 / ring.link.byte_s:.3g} GB/s" if ring.link.byte_s else " / any rate"
    if ring.is_between_two:
        return f"({latency} + {carried}{rate}) / 2"
    times = "2 (n - 1)" if ring.kind == "all_reduce" else "(n - 1)"
    return f"{times} ({latency} + {carried} / n{rate}), n = {ring.ranks}"
