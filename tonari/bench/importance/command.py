"""`tonari bench importance`: what leaving samples out costs."""

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Literal

import tyro

from tonari.bench.importance.questions import QUESTIONS, QuestionSettings
from tonari.bench.notify import notify_on_stderr
from tonari.bench.outputs import DocumentOutputs
from tonari.report.machine import describe_machine


@dataclass(frozen=True, kw_only=True)
class BenchImportance:
    """Measure selection, thresholds over several pools, and feedback.

    "selection" is the time that a policy takes over all rows of one rank, once an epoch.
    "threshold" compares the rows that several pools choose together with those that sorting all
    their scores gives: `lowest` must choose the same, percentiles come near. "feedback" is an
    epoch's time a step with outcome and report, over that of the same steps without, measured
    alternately. A step sleeps, or on a GPU multiplies matrices as long.

    `tonari bench importance --rows 1000000` gives an impression in a minute.

    Exit status: 0; 1 if pools chose other rows than sorting would.
    """

    questions: tuple[Literal["selection", "threshold", "feedback"], ...] = (
        "selection", "threshold", "feedback",
    )  # fmt: skip
    """What to measure."""
    settings: tyro.conf.OmitArgPrefixes[QuestionSettings] = field(default_factory=QuestionSettings)
    outputs: tyro.conf.OmitArgPrefixes[DocumentOutputs] = field(default_factory=DocumentOutputs)

    def __post_init__(self) -> None:
        of = self.settings
        if min(of.repeats, of.pools, of.steps) < 1 or not of.step_s > 0:
            raise ValueError("--repeats, --pools and --steps must be >= 1, and --step > 0")
        if of.rows < max(10, of.pools):
            raise ValueError(f"--rows is {of.rows}, must be >= 10, and a row for every pool")


def bench_importance(options: BenchImportance) -> int:
    """Run the command."""
    options.outputs.check()
    settings = options.settings
    settings.directory.mkdir(parents=True, exist_ok=True)
    found: list[Mapping[str, object]] = []
    try:
        for question in options.questions:
            notify_on_stderr(f"measuring {question}")
            found += QUESTIONS[question](settings)
    finally:
        # An interrupted run keeps what it finished.
        document = {"machine": describe_machine(settings.directory), "results": found}
        options.outputs.write(document, partial(table, found))
    wrong = [figures for figures in found if figures.get("lowest_wrong_rows")]
    for figures in wrong:
        sys.stderr.write(
            f"tonari bench: pools chose {figures['lowest_wrong_rows']} rows otherwise than sorting "
            f"all scores, expected none; report it as a bug\n"
        )
    return 1 if wrong else 0


def table(found: Sequence[Mapping[str, object]]) -> str:
    """Write each result in a line."""
    return "\n".join(_LINES[str(figures["question"])].format(**figures) for figures in found)


_LINES = {
    "selection": (
        "select    {policy:<19} {rows:,} rows in {select_s:.3f} s [{select_s_p10:.3f}, "
        "{select_s_p90:.3f}], CPU {select_cpu_s:.3f} s; hidden {hidden_fraction:.3f}"
    ),
    "threshold": (
        "threshold {pools} pools, {rows:,} rows: {lowest_wrong_rows} wrong, {lowest_totals} totals "
        "of {lowest_bytes:,} bytes together; percentiles within {percentiles_error:.1e}, "
        "{percentiles_bytes:,} bytes"
    ),
    "feedback": (
        "feedback  {device}: {ratio:.4f} x a step without [{ratio_p10:.4f}, {ratio_p90:.4f}]; "
        "outcome and report {report_cpu_us:.0f} CPU us [{report_cpu_us_p10:.0f}, "
        "{report_cpu_us_p90:.0f}] of a step of {reported_step_ms:.2f} ms"
    ),
}
