"""Results in a terminal: what they say first, and a table."""

from collections.abc import Sequence
from statistics import median

from tonari.bench.storage.report.drawing import words
from tonari.bench.storage.report.plots import rates
from tonari.bench.storage.report.report import findings, strip, ways_table
from tonari.bench.storage.results.results import Phase, Results
from tonari.report.tables import UNKNOWN, Table
from tonari.report.units import duration, rate
from tonari.sizes import format_bytes

HEAD = ("pattern", "where", "ranks", "threads", "cold", "warm", "slowest 1 %")
UNPROVED = "?"
NOTE = (
    "A row is a pattern, read by so many ranks at once, of so many threads each. Cold and warm are "
    "what all of them read together. One of a hundred operations, cold, takes longer than the time "
    "under slowest 1 %."
)
NOTE_UNPROVED = f"{UNPROVED}: not proved to be as cold or warm as wanted."


def summary(results: Results) -> list[str]:
    """Describe what was found in lines: first what it means, then all phases as a table."""
    site, local, run = results.site, results.local, results.end_to_end
    table = Table(HEAD, list(map(_row, _groups(results))))
    is_unproved = any(UNPROVED in cell for row in table.rows for cell in row)
    return [
        *findings(results), "",
        f"DIR: {site.path}, {site.name} from {site.mount.server or site.mount.source}, "
        f"{format_bytes(site.free_bytes)} free",
        f"node: {local.path}, {local.name}",
        "", *table.text(), "", NOTE, *([NOTE_UNPROVED] if is_unproved else []),
        *(["", *ways_table(run).text()] if run else []),
        *([""] if results.problems else []),
        *(f"look: {problem}" for problem in results.problems),
    ]  # fmt: skip


def _groups(results: Results) -> list[list[Phase]]:
    """Put the phases together that differ in nothing but their temperature."""
    groups: dict[tuple[object, ...], list[Phase]] = {}
    for phase in results.phases:
        if phase.repeats:
            key = (phase.pattern, phase.tier, phase.clients, phase.threads)
            groups.setdefault(key, []).append(phase)
    return list(groups.values())


def _row(phases: Sequence[Phase]) -> list[str]:
    first, by = phases[0], {phase.wanted: phase for phase in phases}
    where = "DIR" if first.tier == "shared" else "node"
    slowest = [
        f"{duration(operation.p99_s)} {operation.name}"
        for operation in first.operations
        if first.wanted == "cold" and operation.name in ("read", "create")
    ]
    cells = [_bandwidth(by.get("cold")), _bandwidth(by.get("warm")), (slowest or [UNKNOWN])[-1]]
    return [words(first.pattern), where, str(first.clients), str(first.threads), *cells]


def _bandwidth(phase: Phase | None) -> str:
    if phase is None or not any(sum(repeat.bytes_of_client) for repeat in phase.repeats):
        return UNKNOWN
    mark = "" if strip(phase, []).is_as_wanted else f" {UNPROVED}"
    return rate(median(rates(phase))) + mark
