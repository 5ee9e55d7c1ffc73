"""Records of loaders -> medians, ratios, one JSON document, CSV, a table, a plot."""

import statistics
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING

import numpy as np

from tonari.bench.loader.contenders import HEADLINE
from tonari.bench.loader.figures import LoaderJob, LoaderRecord
from tonari.bench.outputs import Json, spread
from tonari.report.machine import describe_machine
from tonari.report.pictures import COLOURS
from tonari.report.tables import UNKNOWN, Table, figure, to_csv

if TYPE_CHECKING:
    from matplotlib.figure import Figure

VERSION = 1


def rates(record: LoaderRecord) -> list[float]:
    """Samples/s of every repeat."""
    return [figures.samples_per_s for figures in record.epochs]


def rate(record: LoaderRecord) -> float:
    """Median samples/s."""
    return statistics.median(rates(record))


def has_figures(record: LoaderRecord) -> bool:
    return bool(record.epochs) and not record.problem


def median_ratio(above: LoaderRecord, below: LoaderRecord) -> float:
    """Median of the ratios within each round."""
    pairs = zip(rates(above), rates(below), strict=False)
    return statistics.median(one / other for one, other in pairs)


def best(records: Iterable[LoaderRecord]) -> LoaderRecord | None:
    """Find the fastest that is exact: to lose samples is not a way to be fast."""
    return max((r for r in records if has_figures(r) and r.is_exact), key=rate, default=None)


def ratios(records: Sequence[LoaderRecord]) -> Json:
    """Compare ours with the limit and the best peer of one case.

    Returns:
        ``ours``, ``limit``, ``best_peer``: whom (name and workers, each at its fastest number);
        ``ratio_to_limit`` and ``ratio_to_best_peer``: None where one of them has no figures. The
        decoder's limit is that of as many threads as ours had.
    """
    ours = best(r for r in records if r.contender == HEADLINE) or best(
        r for r in records if r.kind == "ours"
    )
    limits = [r for r in records if r.kind == "limit"]
    same = [r for r in limits if ours is not None and r.workers == ours.workers]
    limit = best(same) or best(r for r in limits if r.contender == "limit-gather")
    peer = best(r for r in records if r.kind == "peer")

    def against(other: LoaderRecord | None) -> float | None:
        return median_ratio(ours, other) if ours is not None and other is not None else None

    return {
        "ours": _who(ours),
        "limit": _who(limit),
        "best_peer": _who(peer),
        "ratio_to_limit": against(limit),
        "ratio_to_best_peer": against(peer),
    }


def _who(record: LoaderRecord | None) -> Json | None:
    return None if record is None else {"contender": record.contender, "workers": record.workers}


def cases(records: Sequence[LoaderRecord]) -> dict[tuple[str, int, str], list[LoaderRecord]]:
    """Group records that were measured together, in their order."""
    found: dict[tuple[str, int, str], list[LoaderRecord]] = {}
    for record in records:
        key = (record.set_name, record.ranks, record.temperature)
        found.setdefault(key, []).append(record)
    return found


def to_json(job: LoaderJob, records: Sequence[LoaderRecord]) -> Json:
    """Put everything into one document.

    ``sets`` holds, by set, the specification and the ratios of the case that is asked for first:
    warm and one rank where that was measured, else the first. ``cases`` holds the ratios of all,
    ``records`` every contender in every case.
    """
    grouped = cases(records)
    by_case = [
        {"set": name, "ranks": ranks, "temperature": temperature, **ratios(found)}
        for (name, ranks, temperature), found in grouped.items()
    ]
    sets: Json = {}
    for spec in job.sets:
        of_set = [key for key in grouped if key[0] == spec.name]
        key = (spec.name, 1, "warm")
        chosen = key if key in grouped else next(iter(of_set), None)
        sets[spec.name] = {
            "num_samples": spec.num_samples,
            "sample_bytes": spec.sample_bytes,
            "batch_size": spec.batch_size,
            "seed": spec.seed,
            "case": list(chosen[1:]) if chosen else None,
            **ratios(grouped[chosen] if chosen else []),
        }
    return {
        "benchmark": "loader",
        "version": VERSION,
        "question": "samples/s beside other loaders and beside the machine's limits",
        "machine": describe_machine(job.directory),
        "repeats": job.settings.repeats,
        "sets": sets,
        "cases": by_case,
        "records": [row(record) for record in records],
    }


def row(record: LoaderRecord) -> Json:
    """One record in figures; every unit is in the key."""
    looked_at = [*([record.first] if record.first else []), *record.epochs]

    def middle(values: Callable[..., float]) -> float | None:
        return statistics.median(map(values, record.epochs)) if record.epochs else None

    first, taken = looked_at[0] if looked_at else None, rates(record) or None
    return {
        "set": record.set_name,
        "contender": record.contender,
        "kind": record.kind,
        "ranks": record.ranks,
        "workers": record.workers,
        "temperature": record.temperature,
        "versions": record.versions,
        "problem": record.problem or None,
        "exact": record.is_exact if looked_at else None,
        "lost": sum(figures.lost for figures in looked_at),
        "repeated": sum(figures.repeated for figures in looked_at),
        "mismatched": sum(figures.mismatched for figures in looked_at),
        "repeats": len(record.epochs),
        "samples_per_s": taken and spread(taken) | {"values": taken},
        "first_epoch_samples_per_s": first.samples_per_s if first else None,
        "first_batch_s": _first_batch_s(record),
        "pss_bytes": record.first.pss_bytes if record.first else None,
        "cpu_s_per_1000_samples": middle(lambda figures: figures.cpu_s_per_1000),
        "label_spread": middle(lambda figures: figures.label_spread),
        "prepare_s": record.prepare_s,
        "source_bytes": record.source_bytes,
        "cache_bytes": record.cache_bytes,
        "eviction": record.eviction or None,
        "resident_fraction": record.resident_fraction,
    }


def _first_batch_s(record: LoaderRecord) -> float | None:
    # Warm: only the first epoch begins with a loader just opened. Cold: every one does.
    opened = [record.first] if record.first else record.epochs
    return statistics.median(figures.first_batch_s for figures in opened) if opened else None


COLUMNS = (
    "set", "ranks", "temperature", "contender", "workers", "samples_per_s", "p10", "p90",
    "first_epoch_samples_per_s", "first_batch_s", "pss_bytes", "cpu_s_per_1000_samples",
    "label_spread", "prepare_s", "source_bytes", "cache_bytes", "exact", "lost", "repeated",
    "mismatched", "problem",
)  # fmt: skip


def records_csv(records: Sequence[LoaderRecord]) -> str:
    """Write a line a record."""
    return to_csv(COLUMNS, map(_flat, records))


def _flat(record: LoaderRecord) -> Json:
    taken = spread(rates(record)) if record.epochs else {}
    return {**row(record), **taken, "samples_per_s": taken.get("median")}


HEADS = (
    "", "w", "samples/s", "p10", "p90", "epoch 1", "first s", "PSS MB", "CPU ms", "spread", "MB", ""
)  # fmt: skip


def table(records: Sequence[LoaderRecord]) -> str:
    """Write a table a case, the fastest first, and what ours is beside limit and best peer."""
    lines: list[str] = []
    for key, found in cases(records).items():
        ordered = sorted(found, key=lambda r: rate(r) if has_figures(r) else 0.0, reverse=True)
        lines += Table(HEADS, [_cells(record) for record in ordered], _title(*key)).text()
        lines += [f"  {_verdict(ratios(found))}", ""]
    return "\n".join(lines)


def _title(name: str, ranks: int, temperature: str) -> str:
    return f"{name}, {ranks} rank{'s' if ranks > 1 else ''}, {temperature}"


def _cells(record: LoaderRecord) -> list[str]:
    begin = [record.contender, str(record.workers)]
    if not has_figures(record):
        return [*begin, *[UNKNOWN] * 9, record.problem or "no time was left"]
    of = _flat(record)
    wrong = f"WRONG: {of['lost']} lost, {of['repeated']} repeated, {of['mismatched']} mismatched"
    return [
        *begin,
        figure(of["samples_per_s"], ",.0f"),
        figure(of["p10"], ",.0f"),
        figure(of["p90"], ",.0f"),
        figure(of["first_epoch_samples_per_s"], ",.0f"),
        figure(of["first_batch_s"], ".3f"),
        figure(of["pss_bytes"], ",.0f", of=1e6),
        figure(of["cpu_s_per_1000_samples"], ".2f", of=1e-3),
        figure(of["label_spread"], ".2f"),
        figure(of["cache_bytes"], ",.0f", of=1e6),
        "" if record.is_exact else wrong,
    ]


def _verdict(found: Json) -> str:
    def against(name: str) -> str:
        whom, ratio = found[name], found[f"ratio_to_{name}"]
        if not isinstance(whom, dict) or not isinstance(ratio, float):
            return f"no {name.replace('_', ' ')}"
        return f"{ratio:.2f} x {whom['contender']} ({whom['workers']} workers)"

    ours = found["ours"]
    who = f"{ours['contender']}, {ours['workers']} threads" if isinstance(ours, dict) else "ours"
    return f"{who}: {against('limit')}; {against('best_peer')}"


def drawn_cases(records: Sequence[LoaderRecord]) -> dict[str, list[LoaderRecord]]:
    """Choose, by title, the cases that there is something to draw of."""
    found = {_title(*key): list(filter(has_figures, case)) for key, case in cases(records).items()}
    return {title: case for title, case in found.items() if case}


def inches(records: Sequence[LoaderRecord]) -> tuple[float, float]:
    """Find the size of what `draw` draws."""
    return 9, max(sum(0.25 * len(case) + 1 for case in drawn_cases(records).values()), 2)


def draw(drawn: "Figure", records: Sequence[LoaderRecord]) -> None:
    """Draw the medians of every case as bars, with p10 and p90."""
    found = drawn_cases(records)
    colours = dict(zip(("limit", "ours", "peer"), (COLOURS[4], COLOURS[1], "#8d949b"), strict=True))
    heights = [len(case) + 2 for case in found.values()] or [1]
    grid = drawn.subplots(len(heights), 1, squeeze=False, height_ratios=heights)
    for (title, case), (axes,) in zip(found.items(), grid, strict=False):
        ordered = sorted(case, key=rate)
        # float[3, bars]
        low, middle, high = np.array([np.percentile(rates(r), [10, 50, 90]) for r in ordered]).T
        axes.barh(
            [f"{r.contender}, {r.workers}" for r in ordered], middle,
            xerr=[middle - low, high - middle], color=[colours[r.kind] for r in ordered],
        )  # fmt: skip
        axes.set_title(title)
        axes.set_xlabel("samples/s, median, p10 to p90; the number is of workers or threads")
