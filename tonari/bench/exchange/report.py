"""Epochs of an exchange benchmark -> medians, ratios to local, JSON, CSV, a table, a plot."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np

from tonari.bench.exchange.exchange import SETS, ExchangeJobs, MeasuredExchange
from tonari.bench.exchange.task import Epoch, Step
from tonari.bench.outputs import Json, spread
from tonari.report.machine import describe_machine
from tonari.report.pictures import COLOURS, LIGHT
from tonari.report.tables import Table, figure, to_csv

if TYPE_CHECKING:
    from matplotlib.figure import Figure

VERSION = 1
GOALS = (("100k", 0.1, 1.03), ("100k", 0.3, 1.08), ("100k-20", 0.1, 1.05))
"""Set, Q, and how many times the local epoch it may last, with a sleeping step and 2 ranks."""

STEPS = ("sleep", "product")
WAYS = ("local", "exchange", "get", "reread")

Name = tuple[str, float]


def rows(case: MeasuredExchange) -> list[Json]:
    """Summarise every way and step of a case; every unit is in the key.

    ``ratio_to_local`` is the median of ratios within a repeat. ``cpu_s_per_gb`` is the processor
    time beyond that of the local epoch of the same repeat, over the bytes sent by all ranks.
    ``rate_bytes_per_s`` is what a rank sends, over the time of a local epoch.
    """
    found: dict[tuple[Step, Name], list[Epoch]] = {}
    for epoch in case.epochs:
        found.setdefault((epoch.step, (epoch.way, epoch.fraction)), []).append(epoch)
    return [
        _row(case, epochs, {e.repeat: e for e in found.get((step, ("local", 0.0)), [])})
        for (step, _), epochs in sorted(found.items(), key=lambda item: _place(*item[0]))
    ]


def _place(step: Step, name: Name) -> tuple[int, int, float]:
    return STEPS.index(step), WAYS.index(name[0]), name[1]


def _row(case: MeasuredExchange, epochs: list[Epoch], local: Mapping[int, Epoch]) -> Json:
    pairs = [(epoch, local[epoch.repeat]) for epoch in epochs if epoch.repeat in local]
    moved = [(epoch, base) for epoch, base in pairs if epoch.sent_bytes]
    first = epochs[0]

    def middle(values: Sequence[float]) -> float | None:
        return float(np.median(values)) if len(values) else None

    return {
        "set": case.spec.name,
        "ranks": case.ranks,
        "steps_per_epoch": case.spec.num_steps,
        "step": first.step,
        "way": first.way,
        "fraction": first.fraction,
        "repeats": len(epochs),
        "epoch_s": _spread([e.epoch_s for e in epochs]),
        "ratio_to_local": _spread([epoch.epoch_s / base.epoch_s for epoch, base in pairs]),
        "epoch_end_s": middle([e.epoch_end_s for e in epochs]),
        "blocked_s": middle([e.blocked_s for e in epochs]),
        "overlap_fraction": middle([e.overlap_fraction for e, _ in moved]),
        "sent_bytes_per_rank": middle([e.sent_bytes / case.ranks for e in epochs]),
        "messages_per_rank": middle([e.messages for e in epochs]),
        "rate_bytes_per_s": middle([e.sent_bytes / case.ranks / b.epoch_s for e, b in moved]),
        "cpu_s": middle([e.cpu_s for e in epochs]),
        "cpu_s_per_gb": middle([(e.cpu_s - b.cpu_s) / (e.sent_bytes / 1e9) for e, b in moved]),
        "exact": all(e.exact for e in epochs),
    }


def _spread(values: list[float]) -> Json | None:
    return {**spread(values), "values": values} if values else None


def goals(found: Sequence[Json]) -> list[Json]:
    """Compare with what is aimed at, where it was measured."""
    reached: list[Json] = []
    for name, fraction, most in GOALS:
        for row in found:
            asked = (row["set"], row["fraction"], row["step"], row["ranks"], row["way"])
            ratio = row["ratio_to_local"]
            if row["steps_per_epoch"] != SETS[name].num_steps:
                continue  # The goal is for the whole set.
            if asked == (name, fraction, "sleep", 2, "exchange") and isinstance(ratio, dict):
                reached.append({
                    "set": name, "fraction": fraction, "goal": most, "ratio": ratio["median"],
                    "reached": ratio["median"] <= most,
                })  # fmt: skip
    return reached


def to_json(
    jobs: ExchangeJobs,
    cases: Sequence[MeasuredExchange],
    bandwidth: Sequence[Mapping[str, object]],
) -> Json:
    """Put everything into one document."""
    found = [row for case in cases for row in rows(case)]
    return {
        "benchmark": "exchange",
        "version": VERSION,
        "question": "epoch time on fresh samples, against epochs on a node's own samples",
        "machine": describe_machine(jobs.directory),
        "step_s": jobs.settings.step_s,
        "shared_bytes_per_s": jobs.settings.shared_rate * 1e6,
        "calibrated": [{"set": c.spec.name, "ranks": c.ranks, **c.step} for c in cases],
        "records": found,
        "goals": goals(found),
        "bandwidth": list(bandwidth),
    }


def epochs_csv(cases: Sequence[MeasuredExchange]) -> str:
    """Write a line a way, step and case; spreads as median, p10 and p90."""
    flat = [_flat(row) for case in cases for row in rows(case)]
    return to_csv(list(flat[0]) if flat else ["set"], flat)


def _flat(row: Json) -> Json:
    flat: Json = {}
    for name, value in row.items():
        if name in ("epoch_s", "ratio_to_local"):
            of = value if isinstance(value, dict) else {}
            flat |= {f"{name}_{part}": of.get(part) for part in ("median", "p10", "p90")}
        else:
            flat[name] = value
    return flat


HEADS = (
    "", "Q", "epoch s", "p10", "p90", "x local", "end ms", "MB/s", "MB", "messages", "overlap",
    "CPU s/GB", "",
)  # fmt: skip


def table(cases: Sequence[MeasuredExchange], bandwidth: Sequence[Mapping[str, object]] = ()) -> str:
    """Write a table a case and step, the goals, and the bandwidth's records as they are."""
    lines: list[str] = []
    for case in cases:
        found = rows(case)
        for step in dict.fromkeys(row["step"] for row in found):
            cells = [_cells(_flat(row)) for row in found if row["step"] == step]
            title = f"{case.spec.name}: {case.ranks} ranks, {case.spec.num_steps} steps an epoch"
            lines += [*Table(HEADS, cells, f"{title}, step: {step}").text(), ""]
    for goal in goals([row for case in cases for row in rows(case)]):
        verdict = "reached" if goal["reached"] else "NOT reached"
        lines.append(
            f"{goal['set']}, Q={goal['fraction']}: {goal['ratio']:.3f} x local, goal "
            f"{goal['goal']}: {verdict}"
        )
    lines += [_words(record) for record in bandwidth]
    return "\n".join(lines)


def _words(record: Mapping[str, object]) -> str:
    parts = [f"bandwidth: {record.get('set')}"]
    for name, value in record.items():
        figure = value["median"] if isinstance(value, dict) and "median" in value else value
        if isinstance(figure, (int, float)):
            parts.append(f"{name} {figure:.4g}")
    return ", ".join(parts)


def _cells(row: Json) -> list[str]:
    return [
        str(row["way"]),
        f"{row['fraction']:g}" if row["way"] in ("exchange", "get") else "",
        figure(row["epoch_s_median"], ".3f"),
        figure(row["epoch_s_p10"], ".3f"),
        figure(row["epoch_s_p90"], ".3f"),
        figure(row["ratio_to_local_median"], ".3f"),
        figure(row["epoch_end_s"], ".1f", of=1e-3),
        figure(row["rate_bytes_per_s"], ".1f", of=1e6),
        figure(row["sent_bytes_per_rank"], ".0f", of=1e6),
        figure(row["messages_per_rank"], ".0f"),
        figure(row["overlap_fraction"], ".2f"),
        figure(row["cpu_s_per_gb"], ".2f"),
        "" if row["exact"] else "WRONG: samples were lost or repeated",
    ]


def inches(cases: Sequence[MeasuredExchange]) -> tuple[float, float]:
    """Find the size of what `draw` draws."""
    return 6.5, 3 * max(len(_panels(cases)), 1)


def draw(drawn: "Figure", cases: Sequence[MeasuredExchange]) -> None:
    """Draw epoch time over Q with p10 and p90, beside the other ways."""
    panels = _panels(cases)
    grid = drawn.subplots(max(len(panels), 1), 1, squeeze=False)
    for (title, found), (axes,) in zip(panels.items(), grid, strict=False):
        for way, colour in (("exchange", COLOURS[1]), ("get", COLOURS[4])):
            shown = [row for row in found if row["way"] == way]
            # float[3, points]
            low, middle, high = np.array(
                [[row[f"ratio_to_local_{p}"] for row in shown] for p in ("p10", "median", "p90")],
                float,
            )
            axes.errorbar(
                [row["fraction"] for row in shown], middle, yerr=[middle - low, high - middle],
                marker="o", capsize=3, color=colour, label=way,
            )  # fmt: skip
        for row in found:
            if row["way"] == "reread":
                axes.axhline(row["ratio_to_local_median"], color=COLOURS[0], ls=":", label="reread")
        axes.axhline(1.0, color=LIGHT["text"], lw=0.8)
        axes.set(title=title, xlabel="exchanged fraction Q", ylabel="epoch time / local")
        axes.legend()


def _panels(cases: Sequence[MeasuredExchange]) -> dict[str, list[Json]]:
    return {
        f"{case.spec.name}: {case.ranks} ranks, {case.spec.num_steps} steps, {step}": [
            _flat(row) for row in rows(case) if row["step"] == step
        ]
        for case in cases
        for step in dict.fromkeys(epoch.step for epoch in case.epochs)
    }
