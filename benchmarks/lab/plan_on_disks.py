r"""How right `tonari plan` is about an epoch whose rows come from slow node disks.

    python -m benchmarks.lab.plan_on_disks --out DIR      # root, a loop device, control groups (v1)

Two ranks are two nodes, pretended, each in control groups of its own: one lets it read so many
bytes a second from the device on which the caches lie, the other gives it less memory than it needs
to keep its cache there. Rows are pictures of noise, of 110 kB. Each case trains in rounds, each
with a probe that knows no limit: the plan gets the disks' rate from a cluster's file. What is read
is counted by the kernel, of the rank on the first node. What is measured is kept in DIR.
"""

import argparse
import contextlib
import io
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from PIL import Image

from benchmarks.lab.plan_of_epochs import MEMORY_GBYTE_S, RANKS, SETTINGS, TIMEOUT_S
from dataio.store.files.reader import MEMORY_FRACTION
from tests.slowfs import ROOT
from tonari.mpi import mpiexec_command
from tonari.oracle.cluster.cluster import Cluster, Host, Level, StorageRates
from tonari.oracle.epoch import PlannedEpoch
from tonari.oracle.feeds import lay_rows
from tonari.oracle.plan import plan_step
from tonari.oracle.probe.probe import load_probe
from tonari.report.tables import Table
from tonari.trainer.config.config import load_config

GROUPS = Path("/sys/fs/cgroup")
COLUMNS = ("disk, MB/s", "MB read", "planned", "measured, s", "again", "planned, s", "error")
RATES_MB_S = (0, 40, 20, 12)
"""Of each node's disk, in 1e6 bytes/s; 0: as fast as it is."""
SHARDS, ROWS_OF_SHARD, GROUP_ROWS, PIXELS = 20, 500, 50, 192

ENTER = """
for kind in memory blkio; do echo $$ > {groups}/$kind/{name}-$PMI_RANK/cgroup.procs || exit; done
exec "$@"
"""


@dataclass
class DiskNodes:
    """A control group for each rank's memory, and for what it reads from a device.

    Attributes:
        name: Of the groups, which are removed at the end.
        device: ``"major:minor"``.
        memory_bytes: Of each.
    """

    name: str
    device: str
    memory_bytes: int

    def __enter__(self) -> "DiskNodes":
        for directory in self._directories():
            directory.mkdir()
            if "memory" in directory.parts:
                (directory / "memory.limit_in_bytes").write_text(f"{self.memory_bytes}")
        return self

    def __exit__(self, *_: object) -> None:
        for directory in self._directories():
            _remove(directory)

    def _directories(self) -> list[Path]:
        kinds = "memory", "blkio"
        return [GROUPS / kind / f"{self.name}-{rank}" for kind in kinds for rank in range(RANKS)]

    def limit(self, bytes_per_s: float) -> None:
        """Let each rank read so much from the device; 0: no limit."""
        for directory in self._directories():
            if "blkio" in directory.parts:
                limit = directory / "blkio.throttle.read_bps_device"
                limit.write_text(f"{self.device} {bytes_per_s:.0f}")

    @property
    def enter(self) -> list[str]:
        """Begin the command line of a rank."""
        return ["sh", "-c", ENTER.format(groups=GROUPS, name=self.name), "sh"]


def _remove(directory: Path) -> None:
    # A process that has ended leaves its group a moment later
    deadline = time.monotonic() + 10
    while (directory / "cgroup.procs").read_text() and time.monotonic() < deadline:
        time.sleep(0.1)
    directory.rmdir()


@contextlib.contextmanager
def disk(directory: Path, num_bytes: int) -> Iterator[tuple[Path, str]]:
    """Make a filesystem on a device of its own: where it is mounted, and its number."""
    image, mounted = directory / "disk.img", directory / "disk"
    with image.open("wb") as file:
        file.truncate(num_bytes)
    mounted.mkdir()
    device = _call("losetup", "--find", "--show", str(image)).strip()
    try:
        _call("mkfs.ext4", "-q", device)
        _call("mount", device, str(mounted))
        try:
            number = Path(device).stat().st_rdev
            yield mounted, f"{os.major(number)}:{os.minor(number)}"
        finally:
            _call("umount", str(mounted))
    finally:
        _call("losetup", "--detach", device)


def _call(*command: str) -> str:
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


class DiskStudy:
    """Measures, and compares with plans.

    Args:
        out: What was measured.
        memory_bytes: Of each node.
    """

    def __init__(self, out: Path, memory_bytes: int) -> None:
        self._out, self._memory_bytes = out, memory_bytes
        self._runs = out / "runs.jsonl"
        self._settings = out / "run.toml"
        self._settings.write_text(SETTINGS)
        self._shards = out / "shards"
        if not self._shards.exists():
            self._shards.mkdir()
            rng = np.random.default_rng(0)
            for number in range(SHARDS):
                images = [_noise(rng) for _ in range(ROWS_OF_SHARD)]
                classes = rng.integers(0, 10, ROWS_OF_SHARD)
                table = pa.table({"png": images, "cls": classes})
                path = self._shards / f"{number:03}.parquet"
                pq.write_table(table, path, row_group_size=GROUP_ROWS, compression="none")

    def measure(self, number: int) -> None:
        """Probe, and train all cases that are missing in a round."""
        measured = {run["case"] for run in self._found() if run["round"] == number}
        probe = self._probe(number)
        with contextlib.ExitStack() as stack:
            scratch = Path(stack.enter_context(tempfile.TemporaryDirectory()))
            mounted, device = stack.enter_context(disk(scratch, 8 << 30))
            nodes = stack.enter_context(DiskNodes(scratch.name, device, self._memory_bytes))
            env = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
            for at, rate in enumerate([None, *RATES_MB_S]):
                if probe.exists() if rate is None else _name(rate) in measured:
                    continue
                job = {
                    "case": "" if rate is None else _name(rate), "round": number,
                    "out": str(probe), "settings": str(self._settings), "pretends": True,
                    "overrides": [
                        f"data.train={self._shards}/*.parquet", f"run.directory={scratch}/{at}",
                        f"data.cache.path={mounted}/{at}",
                    ],
                }  # fmt: skip
                nodes.limit((rate or 0) * 1e6)
                command = [
                    *mpiexec_command(RANKS), *([] if rate is None else nodes.enter),
                    sys.executable, "-W", "ignore", "-m", "benchmarks.lab.train_case",
                    json.dumps(job), str(self._runs),
                ]  # fmt: skip
                subprocess.run(command, check=True, env=env, timeout=TIMEOUT_S)
                for left in mounted.glob(f"{at}*"):
                    _call("rm", "-rf", str(left))

    def _found(self) -> list[dict[str, Any]]:
        if not self._runs.exists():
            return []
        return [json.loads(line) for line in self._runs.read_text().splitlines()]

    def _probe(self, number: int) -> Path:
        return self._out / f"probe-{number}.json"

    def _plan(self, rate_mb_s: float, run: dict[str, Any]) -> tuple[PlannedEpoch, float]:
        """Predict a case by the probe of its round; and the bytes that a node reads in an epoch.

        A node is taken to have the memory that is left for its rows, and what a loader would not
        count on beside it.
        """
        found = load_probe(self._probe(run["round"]))
        left_bytes = self._memory_bytes - run["epochs"][-1]["own_bytes"]
        host = Host(memory_gib=left_bytes / MEMORY_FRACTION / 2**30)
        levels = (
            Level(name="node", units=1),
            Level(name="switch", units=RANKS, gbyte_s=MEMORY_GBYTE_S, latency_us=0),
        )
        storage = StorageRates(disk_read_gbyte_s=rate_mb_s / 1e3 if rate_mb_s else None)
        config = load_config(self._settings, [f"data.train={self._shards}/*.parquet"])
        cluster = Cluster(name="disks", level=levels, host=host, storage=storage)
        epoch = plan_step(config, found, cluster=cluster, cores_of=(0,) * RANKS).epoch
        assert epoch is not None
        assert found.data is not None
        rows = lay_rows(
            config, found.data, readers=range(RANKS), node_of=range(RANKS),
            memory_bytes=host.memory_bytes,
        )  # fmt: skip
        return epoch, found.data.num_rows / RANKS * rows.disk_row_bytes

    def report(self) -> Iterator[str]:
        """Write the table."""
        rows: list[list[str]] = []
        for rate in RATES_MB_S:
            runs = [run for run in self._found() if run["case"] == _name(rate)]
            if not runs:
                continue
            epochs = [run["epochs"][1:] for run in runs]
            times = [statistics.mean(line["measured_s"] for line in lines) for lines in epochs]
            # Counted at the end of each epoch, from the first on
            read = statistics.mean(
                (lines[-1]["read_bytes"] - run["epochs"][0]["read_bytes"]) / len(lines)
                for run, lines in zip(runs, epochs, strict=True)
            )
            plans = [self._plan(rate, run) for run in runs]
            planned_s = statistics.mean(plan.epoch_s for plan, _ in plans)
            measured_s = statistics.mean(times)
            rows.append([
                f"{rate or ''}", f"{read / 1e6:.0f}", f"{plans[0][1] / 1e6:.0f}",
                f"{measured_s:.2f}", f"{times[-1] / times[0] - 1:+.1%}", f"{planned_s:.2f}",
                f"{planned_s / measured_s - 1:+.1%}",
            ])  # fmt: skip
        yield from Table(COLUMNS, rows).markdown()


def _name(rate_mb_s: float) -> str:
    return f"disk {rate_mb_s:g} MB/s"


def _noise(rng: np.random.Generator) -> bytes:
    out = io.BytesIO()
    pixels = rng.integers(0, 256, (PIXELS, PIXELS, 3), np.uint8)
    Image.fromarray(pixels).save(out, "png", compress_level=1)
    return out.getvalue()


def main() -> None:
    """Measure what is missing, and print the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, required=True, help="where figures are kept")
    parser.add_argument("--report", action="store_true", help="measure nothing")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--memory", type=int, default=700, help="MiB of each node")
    given = parser.parse_args()
    if not given.report and not (GROUPS / "blkio" / "blkio.throttle.read_bps_device").exists():
        parser.error(f"needs control groups of version 1, with blkio and memory, below {GROUPS}")
    given.out.mkdir(parents=True, exist_ok=True)
    study = DiskStudy(given.out.absolute(), given.memory << 20)
    for number in range(given.rounds) if not given.report else ():
        study.measure(number)
    print("\n".join(study.report()))


if __name__ == "__main__":
    main()
