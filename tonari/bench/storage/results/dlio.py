"""Results as the ``summary.json`` of the DLIO benchmark, one for each way to feed training.

Sites that keep summaries of DLIO, or of MLPerf Storage which runs it, read these with the same
tools. See docs/dlio.md for what its figures mean.
"""

import json
import math
from collections.abc import Iterator
from pathlib import Path
from statistics import fmean, pstdev

from tonari.bench.storage.results.results import EndToEnd, Results, TrainingWay

MIB, GIB = 2**20, 2**30
EXPECTED_AU = 90.0
"""Per cent of accelerator utilisation that MLPerf Storage asks for; of cosmoflow it asks for 70."""


def dlio_summaries(results: Results) -> Iterator[tuple[str, dict[str, object]]]:
    """Make a summary of each way, by its name; none if nothing was trained."""
    found = results.end_to_end
    for way in found.ways if found is not None else ():
        assert found is not None, "it has ways"
        yield way.name, _summary(results, found, way)


def write_summaries(results: Results, directory: Path) -> None:
    """Write ``WAY/summary.json`` below a directory for each way."""
    for name, summary in dlio_summaries(results):
        (directory / name).mkdir(parents=True, exist_ok=True)
        (directory / name / "summary.json").write_text(json.dumps(summary, indent=4) + "\n")


def utilisation_percent(found: EndToEnd, way: TrainingWay, *, num_ranks: int) -> list[float]:
    """Accelerator utilisation as MLPerf Storage defines it, by epoch.

    The emulated compute over the time that passed. Nothing of an epoch is left out, where DLIO
    leaves out the first step; and barriers count as waiting, as there.
    """
    steps = [
        math.ceil(math.ceil(samples / num_ranks) / found.batch_size)
        for samples in way.samples_of_epoch
    ]
    return [
        100 * count * found.step_s / epoch_s if epoch_s else 0.0
        for count, epoch_s in zip(steps, way.epoch_s, strict=True)
    ]


def _summary(results: Results, found: EndToEnd, way: TrainingWay) -> dict[str, object]:
    of, num_ranks = results.environment, int(results.environment["ranks"])
    num_hosts = int(of["nodes"])
    au = utilisation_percent(found, way, num_ranks=num_ranks)
    rates = [
        samples / epoch_s if epoch_s else 0.0
        for samples, epoch_s in zip(way.samples_of_epoch, way.epoch_s, strict=True)
    ]
    host_gib = found.num_samples * found.sample_bytes / num_hosts / GIB
    memory_gib = of["memory_bytes"] / GIB
    return {
        "start": of["date"],
        "num_accelerators": num_ranks,
        "num_hosts": num_hosts,
        "hostname": of["hosts"][0],
        "host_cpu_count": [of["cores"]] * num_hosts,
        "host_memory_GB": [memory_gib] * num_hosts,
        "data_size_per_host_GB": host_gib,
        "potential_caching": [int(host_gib < memory_gib)] * num_hosts,
        "epochs": len(way.epoch_s),
        "metric": {
            "train_au_percentage": au,
            "train_au_mean_percentage": fmean(au),
            "train_au_stdev_percentage": pstdev(au),
            "train_au_meet_expectation": "success" if fmean(au) >= EXPECTED_AU else "fail",
            "train_throughput_samples_per_second": rates,
            "train_throughput_mean_samples_per_second": fmean(rates),
            "train_throughput_stdev_samples_per_second": pstdev(rates),
            # As with DLIO, not what was read: samples times their stored size.
            "train_io_mean_MB_per_second": fmean(rates) * found.sample_bytes / MIB,
            "train_io_stdev_MB_per_second": pstdev(rates) * found.sample_bytes / MIB,
        },
        "tonari": {
            "way": way.name,
            "step_s": found.step_s,
            "staging_s": way.staging_s,
            "epoch_s": list(way.epoch_s),
            "utilisation_fraction": way.utilisation_fraction,
            "moved_bytes": dict(way.moved_bytes),
        },
    }
