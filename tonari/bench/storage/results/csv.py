"""Results as a table: a line for each operation of each phase, for a spreadsheet."""

from collections.abc import Iterator
from pathlib import Path
from statistics import median

from msgspec.structs import asdict

from tonari.bench.storage.results.results import Operation, Phase, Results
from tonari.report.tables import to_csv

PHASE = (
    "pattern", "tier", "clients", "nodes", "threads", "wanted", "request_bytes", "direct",
)  # fmt: skip
FIGURES = (
    "verdict", "repeats", "bytes_per_s_median", "bytes_per_s_min", "bytes_per_s_max",
    "seconds_median", "bytes",
)  # fmt: skip
OPERATION = ("count", "mean_s", "p50_s", "p90_s", "p99_s", "p999_s", "max_s")
COLUMNS = (*PHASE, *FIGURES, "operation", *OPERATION)


def write_csv(results: Results, path: Path) -> None:
    """Write a line a phase and operation; what was not measured is empty."""
    path.write_text(to_csv(COLUMNS, _lines(results)))


def _lines(results: Results) -> Iterator[dict[str, object]]:
    for phase in results.phases:
        line = _line(phase)
        yield from (line | _figures(operation) for operation in phase.operations)
        if not phase.operations:
            yield line


def _line(phase: Phase) -> dict[str, object]:
    line: dict[str, object] = {k: v for k, v in asdict(phase).items() if k in PHASE}
    if phase.repeats:
        rates = [repeat.bytes_per_s for repeat in phase.repeats]
        states = {repeat.verdict.state for repeat in phase.repeats}
        line |= {
            "verdict": states.pop() if len(states) == 1 else "mixed",
            "repeats": len(rates),
            "bytes_per_s_median": median(rates),
            "bytes_per_s_min": min(rates),
            "bytes_per_s_max": max(rates),
            "seconds_median": median(repeat.seconds for repeat in phase.repeats),
            "bytes": sum(sum(repeat.bytes_of_client) for repeat in phase.repeats),
        }
    return line


def _figures(operation: Operation) -> dict[str, object]:
    return {"operation": operation.name} | {
        k: v for k, v in asdict(operation).items() if k in OPERATION
    }
