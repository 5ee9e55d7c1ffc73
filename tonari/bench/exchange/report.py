"""Epochs of an exchange benchmark -> medians, ratios to local, JSON, CSV, a table, a plot."""

import csv
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

from tonari.bench.exchange.exchange import SETS, Case, ExchangeSettings
from tonari.bench.exchange.task import Epoch, Step
from tonari.bench.loader.report import Json, spread
from tonari.report.machine import describe_machine

VERSION = 1
GOALS = (("100k", 0.1, 1.03), ("100k", 0.3, 1.08), ("100k-20", 0.1, 1.05))
"""Set, Q, and how many times the local epoch it may last, with a sleeping step and 2 ranks."""

STEPS = ("sleep", "product")
WAYS = ("local", "exchange", "get", "reread")

Name = tuple[str, float]


def rows(case: Case) -> list[Json]:
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


def _row(case: Case, epochs: list[Epoch], local: Mapping[int, Epoch]) -> Json:
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
        "epoch_s": spread([e.epoch_s for e in epochs]),
        "ratio_to_local": spread([epoch.epoch_s / base.epoch_s for epoch, base in pairs]),
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
    settings: ExchangeSettings, cases: Sequence[Case], bandwidth: Sequence[Mapping[str, object]]
) -> Json:
    """Put everything into one document."""
    found = [row for case in cases for row in rows(case)]
    return {
        "benchmark": "exchange",
        "version": VERSION,
        "question": "epoch time on fresh samples, against epochs on a node's own samples",
        "machine": describe_machine(settings.directory),
        "step_s": settings.step_s,
        "shared_bytes_per_s": settings.shared_bytes_per_s,
        "calibrated": [{"set": c.spec.name, "ranks": c.ranks, **c.step} for c in cases],
        "records": found,
        "goals": goals(found),
        "bandwidth": list(bandwidth),
    }


def write_csv(cases: Sequence[Case], path: Path) -> None:
    """Write a line a way, step and case; spreads as median, p10 and p90."""
    flat = [_flat(row) for case in cases for row in rows(case)]
    with open(path, "w", newline="") as file:
        writer = csv.DictWriter(file, list(flat[0]) if flat else ["set"])
        writer.writeheader()
        writer.writerows(flat)


def _flat(row: Json) -> Json:
    flat: Json = {}
    for name, value in row.items():
        if name in ("epoch_s", "ratio_to_local"):
            of = value if isinstance(value, dict) else {}
            flat |= {f"{name}_{part}": of.get(part) for part in ("median", "p10", "p90")}
        else:
            flat[name] = value
    return flat


def table(cases: Sequence[Case], bandwidth: Sequence[Mapping[str, object]] = ()) -> str:
    """Write a table a case and step, the goals, and the bandwidth's records as they are."""
    lines: list[str] = []
    for case in cases:
        found = rows(case)
        for step in dict.fromkeys(row["step"] for row in found):
            lines += [
                f"{case.spec.name}: {case.ranks} ranks, {case.spec.num_steps} steps an epoch, "
                f"step: {step}",
                f"  {'':10}{'Q':>6}{'epoch s':>9}{'p10':>8}{'p90':>8}{'x local':>9}{'end ms':>9}"
                f"{'MB/s':>8}{'MB':>8}{'messages':>10}{'overlap':>9}{'CPU s/GB':>10}",
            ]
            lines += [_line(_flat(row)) for row in found if row["step"] == step]
            lines.append("")
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


def _line(row: Json) -> str:
    def show(name: str, form: str, factor: float = 1.0, absent: str = "-") -> str:
        value = row[name]
        width = int(form.split(".")[0].lstrip(">").rstrip(","))
        return (
            f"{value * factor:{form}}" if isinstance(value, (int, float)) else absent.rjust(width)
        )

    fraction = f"{row['fraction']:g}" if row["way"] in ("exchange", "get") else ""
    wrong = "" if row["exact"] else "  WRONG: samples were lost or repeated"
    return (
        f"  {row['way']:10}{fraction:>6}{show('epoch_s_median', '>9.3f')}"
        f"{show('epoch_s_p10', '>8.3f')}{show('epoch_s_p90', '>8.3f')}"
        f"{show('ratio_to_local_median', '>9.3f')}{show('epoch_end_s', '>9.1f', 1e3)}"
        f"{show('rate_bytes_per_s', '>8.1f', 1e-6)}{show('sent_bytes_per_rank', '>8.0f', 1e-6)}"
        f"{show('messages_per_rank', '>10.0f')}{show('overlap_fraction', '>9.2f')}"
        f"{show('cpu_s_per_gb', '>10.2f')}{wrong}"
    )


def plot(cases: Sequence[Case], path: Path) -> None:
    """Draw epoch time over Q with p10 and p90, beside the other ways."""
    from matplotlib.figure import Figure

    panels = [
        (case, step, [_flat(row) for row in rows(case) if row["step"] == step])
        for case in cases
        for step in dict.fromkeys(epoch.step for epoch in case.epochs)
    ]
    figure = Figure(figsize=(6.5, 3 * max(len(panels), 1)), layout="constrained")
    axes = figure.subplots(max(len(panels), 1), 1, squeeze=False)
    for (case, step, found), (axis,) in zip(panels, axes, strict=False):
        for way, color in (("exchange", "tab:blue"), ("get", "tab:orange")):
            shown = [row for row in found if row["way"] == way]
            # float[3, points]
            low, middle, high = np.array(
                [[row[f"ratio_to_local_{p}"] for row in shown] for p in ("p10", "median", "p90")],
                float,
            )
            axis.errorbar(
                [row["fraction"] for row in shown], middle, yerr=[middle - low, high - middle],
                marker="o", capsize=3, color=color, label=way,
            )  # fmt: skip
        for row in found:
            if row["way"] == "reread":
                axis.axhline(row["ratio_to_local_median"], color="tab:red", ls=":", label="reread")
        axis.axhline(1.0, color="gray", lw=0.8)
        axis.set_title(
            f"{case.spec.name}: {case.ranks} ranks, {case.spec.num_steps} steps, {step}", loc="left"
        )
        axis.set_xlabel("exchanged fraction Q")
        axis.set_ylabel("epoch time / local")
        axis.legend()
    figure.savefig(path)
