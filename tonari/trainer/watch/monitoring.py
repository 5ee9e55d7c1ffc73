"""What a run did, for monitoring: a file for Prometheus on each rank, and OpenTelemetry."""

import importlib
import logging
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Self

from dataio.base.errors import install_command
from dataio.metrics import Metric, loader_metrics, number, prometheus_text, replace_text
from tonari.trainer.errors import ConfigError
from tonari.trainer.watch.metrics import Line

if TYPE_CHECKING:
    from opentelemetry.metrics import CallbackOptions, Observation
    from opentelemetry.sdk.metrics import MeterProvider
    from opentelemetry.sdk.metrics.export import MetricExporter, MetricReader

logger = logging.getLogger(__name__)

Stats = Callable[[], Mapping[str, float]]
SHUTDOWN_MS = 5000
"""How long the end of a run waits for a collector that does not answer."""


class Monitored:
    """The newest line of each kind, and this rank's loader. For one rank.

    Lines are of all ranks together, so rank 0 alone shows them.

    Args:
        stats: Returns the loader's figures.
        labels: Which rank of which run this is: ``run``, ``node``, ``rank``, ``replica``.
    """

    def __init__(self, stats: Stats, labels: Mapping[str, str | int]) -> None:
        self.labels = labels
        self._stats = stats
        self._lines: dict[str, Line] = {}

    def keep(self, line: Line) -> None:
        """Show a line from now on, in place of the one before of its kind."""
        if self.labels["rank"] == 0:
            self._lines[str(line["kind"])] = line

    def metrics(self) -> Iterator[Metric]:
        """Name all that is known now."""
        yield from loader_metrics(self._stats())
        steps = max((int(line["step"] or 0) for line in self._lines.values()), default=None)
        if steps is not None:
            yield Metric(
                name="tonari_steps_total", kind="counter", help="Optimizer steps of the run.",
                values={("", ()): steps},
            )  # fmt: skip
        for kind, line in self._lines.items():
            for key, value in line.items():
                if isinstance(value, int | float) and key != "step":
                    yield from number(kind, key, value)


class PrometheusFile:
    """Replaces a file at each line, for node_exporter's textfile collector. For one rank.

    Args:
        path: The rank is put before its suffix: ``run.prom`` is ``run-0.prom`` on rank 0.
        monitored: What it shows.

    Raises:
        ConfigError: If the path does not end in ``.prom``, or its directory is not there.
    """

    def __init__(self, path: Path, monitored: Monitored) -> None:
        check_prometheus(path)
        self.path = path.with_stem(f"{path.stem}-{monitored.labels['rank']}")
        self._monitored = monitored
        self._failed = False

    def write(self, line: Line) -> None:
        """Show a line."""
        self._monitored.keep(line)
        monitored = self._monitored
        text = prometheus_text(monitored.metrics(), monitored.labels)
        try:
            replace_text(self.path, text)
        except OSError as error:
            # Figures are to be looked at: no run ends for a disk that is full of them.
            if not self._failed:
                logger.warning(
                    "[rank %s] %s: cannot be written (%s); training goes on without it: make room, "
                    "and the next line writes it again",
                    monitored.labels["rank"], self.path, error,
                )  # fmt: skip
            self._failed = True
        else:
            self._failed = False


def check_prometheus(path: Path) -> None:
    """Refuse a file that node_exporter would pass over.

    Raises:
        ConfigError: If the path does not end in ``.prom``, or its directory is not there.
    """
    if path.suffix != ".prom" or not path.absolute().parent.is_dir():
        raise ConfigError(
            f"run.prometheus is {str(path)!r}, expected a file that ends in .prom, in a directory "
            "that is there; give one in the directory of node_exporter's textfile collector"
        )


class Telemetry:
    """Sends the figures by OpenTelemetry to where its own OTEL_... variables say. For one rank.

    Args:
        monitored: What it sends.
        reader: Where to; None: by OTLP over HTTP, every OTEL_METRIC_EXPORT_INTERVAL milliseconds.

    Raises:
        ConfigError: If OpenTelemetry is not installed.
    """

    def __init__(self, monitored: Monitored, reader: "MetricReader | None" = None) -> None:
        self._monitored = monitored
        self._provider = _make_provider(monitored, reader)
        self._meter = self._provider.get_meter("tonari")
        self._known: set[str] = set()
        self._newest: dict[str, float] = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._provider.shutdown(timeout_millis=SHUTDOWN_MS)

    def write(self, line: Line) -> None:
        """Send a line from now on."""
        self._monitored.keep(line)
        for metric in self._monitored.metrics():
            for (suffix, own), value in metric.values.items():
                name = metric.name + suffix + "".join(f"_p{float(q) * 100:g}" for _, q in own)
                self._newest[name] = value
                if name not in self._known:
                    self._observe(name, metric, counts=metric.kind == "counter" or bool(suffix))

    def _observe(self, name: str, metric: Metric, *, counts: bool) -> None:
        from opentelemetry.metrics import Observation

        def newest(_: "CallbackOptions") -> "Iterator[Observation]":
            # Replaced as a whole by the thread that trains, read by the one that sends.
            yield Observation(self._newest[name])

        meter = self._meter
        make = meter.create_observable_counter if counts else meter.create_observable_gauge
        make(name, callbacks=[newest], description=metric.help)
        self._known.add(name)


def import_exporter() -> "type[MetricExporter]":
    """Import what sends by OTLP.

    Raises:
        ConfigError: If OpenTelemetry is not installed.
    """
    try:
        module = importlib.import_module("opentelemetry.exporter.otlp.proto.http.metric_exporter")
        importlib.import_module("opentelemetry.sdk.metrics.export")
    except ImportError as error:
        raise ConfigError(
            f"run.otel is true, but OpenTelemetry cannot be imported ({error}); "
            f"{install_command('otel')}, or set run.otel=false: metrics.jsonl has the same figures"
        ) from error
    exporter: type[MetricExporter] = module.OTLPMetricExporter
    return exporter


def _make_provider(monitored: Monitored, reader: "MetricReader | None") -> "MeterProvider":
    exporter = import_exporter() if reader is None else None
    from opentelemetry.sdk.metrics import MeterProvider
    from opentelemetry.sdk.metrics.export import PeriodicExportingMetricReader
    from opentelemetry.sdk.resources import Resource

    labels = {f"tonari.{name}": value for name, value in monitored.labels.items()}
    # What OTEL_RESOURCE_ATTRIBUTES and OTEL_SERVICE_NAME say comes before ours.
    resource = Resource.create({"service.name": "tonari", **labels})
    if reader is None:
        assert exporter is not None, "imported above"
        reader = PeriodicExportingMetricReader(exporter())
    return MeterProvider([reader], resource=resource)
