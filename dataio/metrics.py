"""A loader's figures for monitoring: as Prometheus's text format has them, in a file that is whole.

The names follow Prometheus's conventions: base units spelt out, `_total` behind what only grows, a
summary of the waits.
"""

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

UNITS = {"_per_s": "_per_second", "_s": "_seconds", "_fraction": "_ratio"}
"""Our suffixes, in Prometheus's words; those of bytes are the same."""

COUNTERS = frozenset(
    """batches rows epoch_end_s exchanged_rows exchanged_bytes exchanged_raw_bytes
    exchange_messages exchange_blocked_s exchange_cpu_s disk_bytes peer_bytes
    page_cache_bytes disk_bytes_written staging_s staging_bytes staged_rows pulled_rows
    source_bytes streamed_rows streamed_bytes streamed_s window_wait_s skipped_rows
    lost_reports feeder_rows feeder_sent_bytes feeder_received_bytes feeder_lost_parts""".split()
)
"""Of `dataio.stats`, what only grows while a loader lives."""

QUANTILES = {"wait_p50_s": "0.5", "wait_p95_s": "0.95", "wait_p99_s": "0.99"}

HELP = {
    "batches": "Batches delivered.",
    "rows": "Samples delivered.",
    "wait_s": "Blocked on a batch.",
    "source_bytes": "Read from the source, indexes included.",
    "disk_bytes": "Read from a disk by this process.",
    "peer_bytes": "Exchanged with other nodes.",
    "queue_depth": "Batches ready now.",
}

Kind = Literal["counter", "gauge", "summary"]
Labelled = tuple[str, tuple[tuple[str, str], ...]]
"""What distinguishes a metric's values: a suffix of the name, and labels of its own."""


@dataclass(frozen=True, kw_only=True)
class Metric:
    """One metric and its values.

    Attributes:
        name: Without the unit and ``_total``, such as ``"tonari_loader_disk_bytes"``.
        kind: As Prometheus has it.
        help: What it counts or measures.
        values: The numbers.
    """

    name: str
    kind: Kind
    help: str
    values: Mapping[Labelled, float]


def loader_metrics(stats: Mapping[str, float]) -> Iterator[Metric]:
    """Name a loader's figures; those that are not finite are left out.

    Args:
        stats: Of `Loader.stats`.
    """
    if "wait_s" in stats:
        name = metric_name("loader", "wait_s")
        values: dict[Labelled, float] = {
            ("", (("quantile", of),)): stats[key] for key, of in QUANTILES.items()
        }
        values["_sum", ()], values["_count", ()] = stats["wait_s"], stats["batches"]
        yield Metric(name=name, kind="summary", help=HELP["wait_s"], values=values)
    for key, value in stats.items():
        if key not in ("wait_s", *QUANTILES):
            yield from number("loader", key, value, counts=key in COUNTERS)


def number(subject: str, key: str, value: float, *, counts: bool = False) -> Iterator[Metric]:
    """Name one number, or nothing if it is not finite.

    Args:
        subject: Of what: ``"loader"``, ``"step"``, ``"epoch"`` ...
        key: Its name with us.
        value: The number.
        counts: Whether it only grows.
    """
    if math.isfinite(value):
        what = HELP.get(key, f"{key} of the {subject}.")
        name = metric_name(subject, key) + ("_total" if counts else "")
        kind: Kind = "counter" if counts else "gauge"
        yield Metric(name=name, kind=kind, help=what, values={("", ()): value})


def metric_name(subject: str, key: str) -> str:
    """Name a figure as Prometheus would, without ``_total``."""
    for ours, theirs in UNITS.items():
        if key.endswith(ours):
            key = key.removesuffix(ours) + theirs
            break
    base, is_bytes, rest = key.partition("_bytes_")
    key = f"{base}_{rest}_bytes" if is_bytes else key
    return f"tonari_{key}" if f"{key}_".startswith(f"{subject}_") else f"tonari_{subject}_{key}"


def prometheus_text(metrics: Iterable[Metric], labels: Mapping[str, object]) -> str:
    """Write metrics in Prometheus's text format.

    Args:
        metrics: Of distinct names.
        labels: Of every value, such as ``{"run": "resnet", "rank": 0}``.
    """
    lines: list[str] = []
    for metric in metrics:
        lines += [f"# HELP {metric.name} {metric.help}", f"# TYPE {metric.name} {metric.kind}"]
        for (suffix, own), value in metric.values.items():
            given = ",".join(f'{k}="{_escaped(v)}"' for k, v in {**labels, **dict(own)}.items())
            braced = f"{{{given}}}" if given else ""
            lines.append(f"{metric.name}{suffix}{braced} {float(value)!r}")
    return "\n".join(lines) + "\n"


def write_prometheus(path: str | Path, stats: Mapping[str, float], **labels: object) -> None:
    """Replace a file for the textfile collector of node_exporter; no reader sees half of one.

    Call it every so often, on each rank with a path of its own.

    Args:
        path: Ends in ``.prom``, in the collector's directory.
        stats: Of `Loader.stats`.
        labels: Of every value: ``run="resnet", rank=loader.world.rank``.
    """
    replace_text(Path(path), prometheus_text(loader_metrics(stats), labels))


def replace_text(path: Path, text: str) -> None:
    """Replace a text file that all may read; it need not outlive a power cut."""
    temporary = path.with_name(path.name + ".partial")
    temporary.write_text(text)
    temporary.replace(path)


def _escaped(value: object) -> str:
    return str(value).replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n")
