r"""How right `tonari plan` is about slow sources: under quotas, and when staging has paid.

    python -m benchmarks.lab.plan_of_sources --train cifar10-test.parquet      # FUSE

A loader alone, whose steps are pauses: what else this machine does matters little. The source is a
directory behind `tests/slowfs.py`. The plan knows the loader's step from an epoch of a staged
dataset at full speed, and the slow rate from a cluster's file; nothing is fitted. "Streamed" is
webdataset beneath torch's DataLoader, which reads every tar file in every epoch and keeps none;
what is beside it is of the same files. `--bytes` counts what is read, without a clock.
"""

import argparse
import contextlib
import math
import tempfile
import time
import unittest.mock
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import torch
import webdataset

import dataio
from benchmarks.lab.plan_of_epochs import ROWS, EpochStudy
from dataio import Int, Loader, NodeCache, Reports, Workers
from dataio.source import open_source
from dataio.store.streaming import Streaming
from tests.slowfs import slowfs
from tonari.oracle.cluster.cluster import Cluster, Level, StorageRates
from tonari.oracle.epoch import PlannedEpoch
from tonari.oracle.feeds import lay_rows
from tonari.oracle.plan import plan_step
from tonari.oracle.probe.data import DataTimes
from tonari.oracle.probe.pieces import count_pieces
from tonari.oracle.probe.probe import Probe, step_settings
from tonari.oracle.stopwatch import Timed
from tonari.report.tables import Table, markdown_row
from tonari.trainer.config.config import load_config

BATCH = 64
EPOCHS = 3
STEP_S = 0.1
FIELDS: dict[str, dataio.Field] = {"image": dataio.Image("png"), "label": Int("cls")}
QUOTAS = (10_000_000, 8_000_000, 6_000_000, 4_000_000)
SLOW = ((10_000_000, 12.0), (10_000_000, 4.0), (10_000_000, 2.0), (6_000_000, 8.0))
"""Quotas, and what the source sends, in 1e6 bytes/s."""
PER_STEP = (2.4, 1.6, 1.4, 1.2, 1.05)
"""How long an epoch's bytes take to be read, over its steps, where staging is to pay."""


@dataclass(frozen=True, kw_only=True)
class SourceRun:
    """What a loader did.

    Attributes:
        epochs_s: Of each.
        staging_s: Before the first.
        row_bytes: As they lie in the cache.
        source_row_bytes: Read while they were staged, for each.
        resident_rows: That stay.
        windows: Of the last epoch.
        read_bytes: From the source in the last epoch.
    """

    epochs_s: tuple[float, ...]
    staging_s: float
    row_bytes: float
    source_row_bytes: float
    resident_rows: float
    windows: int
    read_bytes: float


def load_epochs(
    directory: Path, *, quota: int | None = None, epochs: int = EPOCHS, step_s: float = STEP_S
) -> SourceRun:
    """Let a loader stage, and go through epochs."""
    windows = 0
    read = Streaming._read

    def counted(streaming: Streaming, *given: Any) -> bool:
        nonlocal windows
        windows += 1
        return read(streaming, *given)

    times = []
    with (
        tempfile.TemporaryDirectory() as cache,
        unittest.mock.patch.object(Streaming, "_read", counted),
        Loader(
            [str(path) for path in sorted(directory.iterdir())], fields=FIELDS, batch_size=BATCH,
            cache=NodeCache(cache, quota=quota), workers=Workers(threads=1),
            reports=Reports(progress=False),
        ) as loader,
    ):  # fmt: skip
        staged = loader.stats()
        began_s = time.perf_counter()
        for _ in loader.epochs(epochs):
            before, windows = loader.stats()["source_bytes"], 0
            for _ in loader:
                time.sleep(step_s)
            read_bytes = loader.stats()["source_bytes"] - before
            ended_s = time.perf_counter()
            times.append(ended_s - began_s)
            began_s = ended_s
    resident = staged["resident_fraction"] * ROWS
    return SourceRun(
        epochs_s=tuple(times), staging_s=staged["staging_s"],
        row_bytes=staged["disk_bytes_written"] / resident,
        source_row_bytes=staged["staging_bytes"] / resident, resident_rows=resident,
        windows=windows, read_bytes=read_bytes,
    )  # fmt: skip


def write_tars(shards: Path, directory: Path) -> int:
    """Write the rows of Parquet files as tar files, and count their bytes."""
    directory.mkdir()
    for path in sorted(shards.glob("*.parquet")):
        target = directory / f"{path.stem}.tar"
        with webdataset.TarWriter(str(target)) as writer:
            for number, row in enumerate(pq.read_table(path, columns=["png", "cls"]).to_pylist()):
                writer.write({"__key__": f"{path.stem}-{number}", **row})
    return sum(path.stat().st_size for path in directory.iterdir())


def stream_epochs(directory: Path, *, epochs: int = 2) -> tuple[float, ...]:
    """Go through epochs without a cache, batches made in a process of their own."""
    paths = [str(path) for path in sorted(directory.glob("*.tar"))]
    dataset = webdataset.WebDataset(paths, shardshuffle=len(paths), empty_check=False)
    rows = dataset.shuffle(BATCH).decode("rgb8").to_tuple("png", "cls").batched(BATCH)
    loader = torch.utils.data.DataLoader(
        rows, batch_size=None, num_workers=1, prefetch_factor=2, persistent_workers=True,
        multiprocessing_context="forkserver",
    )  # fmt: skip
    times = []
    for _ in range(epochs):
        began_s, steps = time.perf_counter(), 0
        for _ in loader:
            time.sleep(STEP_S)
            steps += 1
        times.append(time.perf_counter() - began_s)
        if steps != math.ceil(ROWS / BATCH):
            raise RuntimeError(f"{steps} batches were streamed of {ROWS} rows")
    return tuple(times)


class SourcePlans:
    """Plans a job of one rank from an epoch at full speed.

    Args:
        settings: Of a run.
        source: What it reads.
        base: That epoch.
    """

    def __init__(self, settings: Path, source: Path, base: SourceRun) -> None:
        self._settings, self._source = settings, source
        step_s = min(base.epochs_s[1:]) / math.ceil(ROWS / BATCH)
        opened = open_source([str(path) for path in sorted(source.iterdir())])
        timed = Timed(rank=0, events=(), laps_s=((step_s,),), step_s=(step_s,))
        self.data = DataTimes(
            readers=1, num_rows=ROWS, evaluated_rows=0, row_bytes=base.row_bytes,
            source_row_bytes=base.source_row_bytes, batch_s=1e-3, batch_cores=1.0,
            staging_bytes_per_s=1e12, epoch_end_s=0.0, write_bytes_per_s=0.0,
            pieces=count_pieces(opened, FIELDS, source_row_bytes=base.source_row_bytes),
            guessed_row_bytes=opened.total_bytes / opened.num_samples,
        )  # fmt: skip
        self._probe = Probe(
            torch=torch.__version__, cores=2, ranks=1, world_size=1, settings={}, messages=(),
            steps=(timed,), slowdowns=((1, 1.0),), evaluations=(timed,), data=self.data,
        )  # fmt: skip

    def _config(self, quota: int | None) -> Any:
        given = [f"data.cache.quota={quota}"] if quota else []
        return load_config(self._settings, [f"data.train={self._source}", *given])

    def rows(self, quota: int) -> Any:
        """Lay out rows under a quota."""
        return lay_rows(self._config(quota), self.data, readers=(0,), node_of=(0,))

    def epoch(self, rate: float, *, quota: int | None = None) -> PlannedEpoch:
        """Plan an epoch by the source's rate, in 1e6 bytes/s."""
        config = self._config(quota)
        storage = StorageRates(read_gbyte_s=rate / 1e3)
        cluster = Cluster(name="slow", level=(Level(name="node", units=1),), storage=storage)
        probe = replace(self._probe, settings=step_settings(config))
        epoch = plan_step(config, probe, cluster=cluster).epoch
        assert epoch is not None
        return epoch


def _table(heads: Sequence[str]) -> str:
    return "\n".join(Table(heads, [["0"] * len(heads)]).markdown()[:2])


def count_bytes(study: EpochStudy) -> Iterator[str]:
    """Write the table of what a node reads from the source in an epoch, counted and planned."""
    base = load_epochs(study.shards, epochs=2, step_s=0)
    plans = SourcePlans(study.settings, study.shards, base)
    yield _table(
        ("quota, MB", "rows that stay", "planned", "passes", "planned", "MB read", "planned")
    )
    for quota in QUOTAS:
        run, planned = load_epochs(study.shards, quota=quota, epochs=1, step_s=0), plans.rows(quota)
        runs = list(planned.quota.runs())
        passes = sum(count for count, *_ in runs)
        read = sum(count * num_bytes for count, _, num_bytes in runs)
        yield markdown_row([
            f"{quota / 1e6:g}", f"{run.resident_rows:,.0f}", f"{planned.quota.resident_rows:,}",
            str(run.windows), str(passes), f"{run.read_bytes / 1e6:.1f}",
            f"{read / 1e6:.1f} ({read / run.read_bytes - 1:+.0%})",
        ])  # fmt: skip


def time_epochs(study: EpochStudy) -> Iterator[str]:
    """Write the tables of epochs under quotas, and of when staging has paid."""
    base = load_epochs(study.shards)
    plans = SourcePlans(study.settings, study.shards, base)
    yield f"an epoch at full speed: {', '.join(f'{s:.2f}' for s in base.epochs_s)} s"
    yield _table(
        ("quota, MB", "source, MB/s", "measured, s", "again", "planned, s", "error", "no data path")
    )
    under_quotas = [plans.epoch(rate, quota=quota) for quota, rate in SLOW]
    for (quota, rate), expected in zip(SLOW, under_quotas, strict=True):
        with slowfs(study.shards, bytes_per_s=rate * 1e6, cache="direct_io") as slow:
            _, first_s, second_s = load_epochs(slow.path, quota=quota).epochs_s
        planned_s = expected.epoch_s
        mean_s = (first_s + second_s) / 2
        yield markdown_row([
            f"{quota / 1e6:g}", f"{rate:g}", f"{first_s:.2f}", f"{second_s / first_s - 1:+.1%}",
            f"{planned_s:.2f}", f"{planned_s / mean_s - 1:+.1%}",
            f"{min(base.epochs_s[1:]) / mean_s - 1:+.1%}",
        ])  # fmt: skip
    tars = study.shards.parent / "tars"
    num_bytes = write_tars(study.shards, tars)
    base = load_epochs(tars)
    plans = SourcePlans(study.settings, tars, base)
    epoch_s = min(base.epochs_s[1:])
    yield f"\n{num_bytes / 1e6:.1f} MB of tar files; an epoch at full speed: {epoch_s:.2f} s"
    yield _table((
        "source, MB/s", "staging, s", "planned", "staged epoch, s", "planned", "streamed, s",
        "planned", "paid after", "planned",
    ))  # fmt: skip
    rates = [num_bytes / 1e6 / (epoch_s * times) for times in PER_STEP]
    for rate, planned in zip(rates, [plans.epoch(rate) for rate in rates], strict=True):
        with slowfs(tars, bytes_per_s=rate * 1e6, cache="direct_io") as slow:
            run = load_epochs(slow.path, epochs=2)
            streamed_s = stream_epochs(slow.path)[-1]
        own_s = run.epochs_s[-1]
        saved_s = streamed_s - own_s
        paid = math.ceil(run.staging_s / saved_s) if saved_s > 0 else None
        cells = [f"{rate:.2f}"]
        for measured_s, planned_s in (
            (run.staging_s, planned.staging_s), (own_s, planned.epoch_s),
            (streamed_s, planned.unstaged_s),
        ):  # fmt: skip
            cells += [f"{measured_s:.2f}", f"{planned_s:.2f} ({planned_s / measured_s - 1:+.1%})"]
        yield markdown_row([*cells, str(paid), str(planned.pays_after)])


def main() -> None:
    """Print the tables."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--train", type=Path, required=True, help="CIFAR-10 as Parquet")
    parser.add_argument("--bytes", action="store_true", help="count bytes alone")
    given = parser.parse_args()
    with contextlib.ExitStack() as stack:
        out = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        study = EpochStudy(given.train, out)
        for line in (count_bytes if given.bytes else time_epochs)(study):
            print(line, flush=True)


if __name__ == "__main__":
    main()
