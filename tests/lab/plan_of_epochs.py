r"""How right `tonari plan` is about an epoch, and about when staging has paid, beside slow sources.

    python -m tests.lab.plan_of_epochs --train cifar10-test.parquet --out DIR      # root, FUSE

Cases differ in the exchange, the share of hidden rows, the rate of links between nodes, the quota
of caches and the rate of the source, a directory behind `tests/slowfs.py`. Of each a job trains in
rounds, with probes of this machine in between, which read files at full speed; the plan gets the
slow rates from a cluster's file alone. "Streamed" is a job without a cache: a DataLoader that reads
every shard in every epoch. Everything that is measured is kept in DIR, and what is there is not
measured again: `--only NAME` and `--round N` do a part, `--report` none.
"""

import argparse
import concurrent.futures
import contextlib
import io
import json
import math
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch
from PIL import Image
from scipy.stats import spearmanr
from torch.utils.data import DataLoader, IterableDataset

from benchmarks.loader.launch import mpiexec
from oracle.cluster.cluster import Cluster, Level, Storage
from oracle.paradl import Link, link_across, price, probed_link
from oracle.plan import StepPlan, plan_step
from oracle.probe.probe import Probe, joined, load_probe
from oracle.trace import NoReports
from tests.lab.cluster import Lab
from tests.slowfs import slowfs
from trainer.config.config import load_config
from trainer.run.build import build_parallel, lay_out
from trainer.run.optimizers import build_optimizer
from trainer.run.step import train_step
from trainer.watch.launch import join

SHARDS = 10
ROWS = 5000
EPOCHS = 3
ROUNDS = 2
MOST_OTHERS = 0.25
"""Processors that other programs of the machine may use beside a run; else it does not count."""
TIMEOUT_S = 300
OF_DATA = 0.95
"""Of a link's rate, what is left for data once the headers of Ethernet, IP and TCP are off."""
MEMORY_GBYTE_S = 5.0
"""Of the link between nodes that are pretended: processes of one machine."""
SETTINGS = """
[data]
batch_size = 64
image_size = 32
image = "png"
[model]
kind = "resnet"
depth = 8
num_classes = 10
[optimizer]
lr = 0.05
[run]
device = "cpu"
epochs = 3
checkpoint_epochs = 0
"""


@dataclass(frozen=True, kw_only=True)
class Case:
    """A job, and how slow its world is.

    Attributes:
        ranks: Of the job, each a node.
        exchange: Share of the rows.
        hidden: Likewise.
        mbit_s: Of the link between two nodes of the lab; 0: the nodes are pretended.
        source_mb_s: That all nodes together read, in 1e6 bytes/s; 0: no limit.
        quota: Of a node's cache; empty: none.
        streams: Whether to train without a cache.
    """

    ranks: int = 2
    exchange: float = 0.0
    hidden: float = 0.0
    mbit_s: float = 0.0
    source_mb_s: float = 0.0
    quota: str = ""
    streams: bool = False

    @property
    def name(self) -> str:
        """Its settings, those that are not the default."""
        if self.streams:
            return f"streamed, source {self.source_mb_s:g} MB/s"
        words = [f"{self.ranks} node{'s' * (self.ranks > 1)}"]
        words += [f"Q {self.exchange:g}"] if self.ranks > 1 else []
        words += [f"hidden {self.hidden:g}"] if self.hidden else []
        words += [f"link {self.mbit_s:g} Mbit/s"] if self.mbit_s else []
        words += [f"quota {self.quota}"] if self.quota else []
        words += [f"source {self.source_mb_s:g} MB/s"] if self.source_mb_s else []
        return ", ".join(words)

    @property
    def settings(self) -> list[str]:
        """What differs from `SETTINGS`, but for paths."""
        found = [f"shuffle.exchange={self.exchange}"]
        if self.hidden:
            found += [
                "importance.kind=random", f"importance.fraction={self.hidden}",
                "importance.delta=1.0",
            ]  # fmt: skip
        return [*found, *([f"data.cache.quota={self.quota}"] if self.quota else [])]

    @property
    def cluster(self) -> Cluster:
        """The machine as its file would have it."""
        rate = self.mbit_s / 8e3 * OF_DATA if self.mbit_s else MEMORY_GBYTE_S
        levels = [Level(name="node", units=1)]
        if self.ranks > 1:
            latency_us = 100 if self.mbit_s else 0
            levels += [Level(name="switch", units=self.ranks, gbyte_s=rate, latency_us=latency_us)]
        storage = Storage(read_gbyte_s=self.source_mb_s / 1e3 if self.source_mb_s else None)
        return Cluster(name="lab", level=tuple(levels), storage=storage)


EXCHANGES = [
    Case(exchange=exchange, hidden=hidden) for hidden in (0.0, 0.3) for exchange in (0.0, 0.5, 1.0)
]
LINKS = [
    Case(exchange=0.0, mbit_s=100), Case(exchange=1.0, mbit_s=100),
    Case(exchange=0.5, hidden=0.3, mbit_s=300),
]  # fmt: skip
SOURCES = [
    Case(ranks=1, quota="10MB", source_mb_s=10), Case(ranks=1, quota="10MB", source_mb_s=3),
    Case(ranks=1, quota="10MB", source_mb_s=3, hidden=0.3),
    Case(ranks=2, quota="5MB", source_mb_s=10), Case(ranks=2, quota="5MB", source_mb_s=3),
]  # fmt: skip
RATES = (0.6, 1.0, 1.5, 2.5, 5.0)
STAGED = [Case(ranks=1, source_mb_s=rate) for rate in RATES]
STREAMED = [Case(ranks=1, source_mb_s=rate, streams=True) for rate in RATES]
CASES = [*EXCHANGES, *LINKS, *SOURCES, *STAGED, *STREAMED]


class Study:
    """Measures cases, and compares them with their plans.

    Args:
        train: CIFAR-10 as Parquet.
        out: What was measured.
    """

    def __init__(self, train: Path, out: Path) -> None:
        self._out = out
        self._shards = out / "shards"
        self._runs = out / "runs.jsonl"
        self._settings = out / "run.toml"
        self._settings.write_text(SETTINGS)
        if not self._shards.exists():
            table = pq.read_table(train, columns=["jpg", "cls"]).slice(0, ROWS)
            images = [_as_png(image) for image in table["jpg"].to_pylist()]
            table = table.set_column(0, "png", pa.array(images))
            rows = -(-len(table) // SHARDS)
            self._shards.mkdir()
            for number in range(SHARDS):
                part = table.slice(number * rows, rows)
                pq.write_table(part, self._shards / f"{number:03}.parquet", compression="none")

    def measure(self, case: Case, number: int) -> None:
        """Train a case, unless it was in this round."""
        if number in {run["round"] for run in self.runs(case)}:
            return
        before = _busy_s()
        with contextlib.ExitStack() as stack:
            scratch = Path(stack.enter_context(tempfile.TemporaryDirectory()))
            data = self._shards
            if case.source_mb_s:
                slow = slowfs(data, bytes_per_s=case.source_mb_s * 1e6, cache="direct_io")
                data = stack.enter_context(slow).path
            found = (self._stream if case.streams else self._train)(case, data, scratch)
        found["others"] = _others(before)
        with self._runs.open("a") as file:
            file.write(json.dumps({"case": case.name, "round": number, **found}) + "\n")
        print(case.name, found, flush=True)

    def _train(self, case: Case, data: Path, scratch: Path) -> dict[str, Any]:
        metrics = scratch / "metrics.jsonl"
        with contextlib.ExitStack() as stack:
            env = {**os.environ, "OMP_NUM_THREADS": "1"}
            cache, starter = scratch / "cache", [mpiexec(), "-n", str(case.ranks)]
            if case.mbit_s:
                lab = Lab(scratch / "lab", case.ranks, rate=f"{case.mbit_s:g}mbit")
                starter, cache = stack.enter_context(lab).mpiexec(case.ranks), lab.scratch
                env["GLOO_SOCKET_IFNAME"] = "eth0"
            else:
                env["TONARI_RANKS_PER_NODE"] = "1"
            self._run([
                *starter, sys.executable, "-m", "tonari", "train", str(self._settings),
                f"data.train={data}/*.parquet", f"data.cache.path={cache}",
                f"run.directory={scratch / 'run'}", "--metrics", str(metrics), "--resume", "never",
                *case.settings,
            ], env)  # fmt: skip
        lines = [json.loads(line) for line in metrics.read_text().splitlines()]
        epochs = [line for line in lines if line["kind"] == "epoch"]
        return {
            "epochs_s": [line["epoch_s"] for line in epochs],
            "staging_s": epochs[0]["staging_s"],
            "parts": epochs[-1],
        }

    def _stream(self, case: Case, data: Path, scratch: Path) -> dict[str, Any]:
        out = scratch / "streamed.json"
        self._run(
            [
                sys.executable, "-W", "ignore", "-m", "tests.lab.plan_of_epochs", "--stream",
                str(out), "--train", str(data), "--out", str(self._out),
            ],
            {**os.environ, "OMP_NUM_THREADS": "1"},
        )  # fmt: skip
        return {"epochs_s": json.loads(out.read_text())}

    def probe(self, ranks: int, number: int) -> None:
        """Probe this machine, unless it was in this round."""
        out = self._probe_path(ranks, number)
        if out.exists():
            return
        before = _busy_s()
        with tempfile.TemporaryDirectory() as scratch:
            self._run([
                mpiexec(), "-n", str(ranks), sys.executable, "-m", "tonari", "probe",
                str(self._settings), f"data.train={self._shards}/*.parquet",
                f"data.cache.path={scratch}", "--steps", "8", "--out", str(out),
            ], {**os.environ, "OMP_NUM_THREADS": "1"})  # fmt: skip
        others = _others(before)
        if others > MOST_OTHERS:
            out.unlink()
        print(f"probe of {ranks}: others {others:.2f}", flush=True)

    def _probe_path(self, ranks: int, number: int) -> Path:
        return self._out / f"probe-{ranks}-{number}.json"

    def _run(self, command: list[str], env: dict[str, str]) -> None:
        ended = subprocess.run(command, env=env, capture_output=True, text=True, timeout=TIMEOUT_S)
        if ended.returncode:
            raise RuntimeError(f"{' '.join(command)} ended with {ended.returncode}: {ended.stderr}")

    # What was planned

    def runs(self, case: Case) -> list[dict[str, Any]]:
        """Read what was measured of a case while the machine was idle otherwise."""
        if not self._runs.exists():
            return []
        found = [json.loads(line) for line in self._runs.read_text().splitlines()]
        return [run for run in found if run["case"] == case.name and run["others"] <= MOST_OTHERS]

    def _found(self, ranks: int) -> Probe:
        """Join the probes of all rounds."""
        paths = [self._probe_path(ranks, number) for number in range(ROUNDS + 1)]
        return joined([load_probe(path) for path in paths if path.exists()])

    def plan(self, case: Case) -> StepPlan:
        """Predict a case."""
        overrides = [f"data.train={self._shards}/*.parquet", *case.settings]
        return plan_step(
            load_config(self._settings, overrides), self._found(case.ranks), cluster=case.cluster,
            hidden_fraction=case.hidden, cores_of=(0,) * case.ranks,
        )  # fmt: skip

    def paradl_s(self, case: Case, steps: int) -> float:
        """Price an epoch's steps by ParaDL's equations, which know of no data."""
        found, alone = self._found(case.ranks), self._found(1)
        layout = lay_out(load_config(self._settings, [f"data.train={self._shards}"]), case.ranks)

        def link_of(ranks: tuple[int, ...]) -> Link:
            return link_across(case.cluster, ranks, inside=probed_link(found.messages))

        terms = price(
            found.steps[0].events, computation_s=alone.steps[0].computing_s, sizes=layout.sizes,
            microbatches=layout.microbatches, link_of=link_of,
        )  # fmt: skip
        return steps * terms.step_s

    def report(self, cases: Sequence[Case]) -> Iterator[str]:
        """Write tables of what was measured and planned."""
        errors: dict[str, list[float]] = {}
        measured: list[float] = []
        planned: list[float] = []
        heads = ("case", "measured, s", "again", "planned, s", "plan", "ParaDL", "the last epoch")
        yield f"| {' | '.join(heads)} |\n|---" + "|---:" * 6 + "|"
        for case in (case for case in cases if not case.streams):
            runs = self.runs(case)
            if not runs:
                continue
            times = [statistics.mean(run["epochs_s"][1:]) for run in runs]
            epoch = self.plan(case).epoch
            assert epoch is not None
            mean_s = statistics.mean(times)
            measured.append(mean_s)
            planned.append(epoch.epoch_s)
            row = {
                "again": times[-1] / times[0] - 1,
                "plan": epoch.epoch_s / mean_s - 1,
                "ParaDL": self.paradl_s(case, epoch.steps) / mean_s - 1,
                "the last epoch": statistics.mean(
                    run["epochs_s"][-2] / run["epochs_s"][-1] - 1 for run in runs
                ),
            }
            for name, error in row.items():
                errors.setdefault(name, []).append(error)
            cells = [f"{row['again']:+.1%}", f"{epoch.epoch_s:.2f}"]
            cells += [f"{error:+.1%}" for name, error in row.items() if name != "again"]
            yield f"| {case.name} | {mean_s:.2f} | {' | '.join(cells)} |"
        for name, of_cases in errors.items():
            sizes = sorted(map(abs, of_cases))
            yield (
                f"{name}: mean {statistics.mean(sizes):.1%}, "
                f"95 % within {np.quantile(sizes, 0.95):.1%}, most {sizes[-1]:.1%}"
            )
        yield f"rank correlation {spearmanr(measured, planned).statistic:.3f}"

    def report_paying(self) -> Iterator[str]:
        """Write the table of when staging has paid."""
        heads = (
            "source, MB/s", "staging, s: measured", "planned", "staged epoch, s: measured",
            "planned", "streamed epoch, s: measured", "planned", "paid after: measured", "planned",
        )  # fmt: skip
        yield f"| {' | '.join(heads)} |\n|" + "---:|" * len(heads)
        for staged, streamed in zip(STAGED, STREAMED, strict=True):
            runs, others = self.runs(staged), self.runs(streamed)
            if not runs or not others:
                continue
            epoch = self.plan(staged).epoch
            assert epoch is not None
            staging_s = statistics.mean(run["staging_s"] for run in runs)
            own_s = statistics.mean(s for run in runs for s in run["epochs_s"][1:])
            streamed_s = statistics.mean(s for run in others for s in run["epochs_s"][1:])
            saved_s = streamed_s - own_s
            paid = math.ceil(staging_s / saved_s) if saved_s > 0 else None
            pairs = [
                (staging_s, epoch.staging_s), (own_s, epoch.epoch_s),
                (streamed_s, epoch.unstaged_s),
            ]  # fmt: skip
            cells = [f"{staged.source_mb_s:g}"]
            for measured, planned in pairs:
                cells += [f"{measured:.2f}", f"{planned:.2f} ({planned / measured - 1:+.1%})"]
            yield f"| {' | '.join([*cells, str(paid), str(epoch.pays_after)])} |"


def _busy_s() -> tuple[float, float, float]:
    """Read the clock, and processor time: of the machine, and of what this process started."""
    user, nice, system, _, _, irq, softirq, *_ = map(
        int, Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:]
    )
    ticks = os.sysconf("SC_CLK_TCK")
    times = os.times()
    own_s = times.user + times.system + times.children_user + times.children_system
    return time.perf_counter(), (user + nice + system + irq + softirq) / ticks, own_s


def _others(before: tuple[float, float, float]) -> float:
    """Count the processors that others used since then."""
    wall_s, all_s, own_s = (now - then for now, then in zip(_busy_s(), before, strict=True))
    return max(all_s - own_s, 0.0) / wall_s


# A job without a cache


class Shards(IterableDataset[tuple[torch.Tensor, int]]):
    """Samples of shards in random order, the next shard read while one is decoded."""

    def __init__(self, directory: Path, epoch: int) -> None:
        self._paths = sorted(directory.glob("*.parquet"))
        self._epoch = epoch

    def __iter__(self) -> Iterator[tuple[torch.Tensor, int]]:
        rng = np.random.default_rng(self._epoch)
        paths = [self._paths[number] for number in rng.permutation(len(self._paths))]
        with concurrent.futures.ThreadPoolExecutor(1) as reader:
            coming = reader.submit(_read, paths[0])
            for number in range(len(paths)):
                images, labels = coming.result()
                if number + 1 < len(paths):
                    coming = reader.submit(_read, paths[number + 1])
                for at in rng.permutation(len(images)):
                    pixels = np.array(Image.open(io.BytesIO(images[at])).convert("RGB"))
                    yield torch.from_numpy(pixels.transpose(2, 0, 1).copy()), labels[at]


def _as_png(image: bytes) -> bytes:
    out = io.BytesIO()
    Image.open(io.BytesIO(image)).save(out, "png")
    return out.getvalue()


def _read(path: Path) -> tuple[list[bytes], list[int]]:
    table = pq.read_table(path, columns=["png", "cls"])
    return table["png"].to_pylist(), table["cls"].to_pylist()


def stream(settings: Path, data: Path, out: Path) -> None:
    """Train epochs as one rank; write what each took."""
    config = load_config(settings, [f"data.train={data}"])
    times = []
    with join(device="cpu", timeout_s=TIMEOUT_S) as job:
        parallel = build_parallel(config, job)
        pipeline = parallel.pipeline
        optimizer = build_optimizer(config.optimizer, pipeline.parameters())
        step = 0
        for epoch in range(EPOCHS):
            started = time.perf_counter()
            for images, labels in DataLoader(
                Shards(data, epoch), batch_size=config.data.batch_size, num_workers=1
            ):
                rows = len(labels)
                batch = {
                    "image": images, "label": labels, "weight": torch.ones(rows),
                    "sample_id": torch.zeros(rows, dtype=torch.int64),
                    "slot": torch.zeros(rows, dtype=torch.int64),
                }  # fmt: skip
                train_step(
                    pipeline, optimizer, NoReports(), [batch], clip=config.optimizer.clip, step=step
                )
                step += 1
            times.append(time.perf_counter() - started)
    out.write_text(json.dumps(times))


def main() -> None:
    """Measure what is missing, and print tables."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--train", type=Path, required=True, help="CIFAR-10 as Parquet")
    parser.add_argument("--out", type=Path, required=True, help="where figures are kept")
    parser.add_argument("--only", default="", help="cases of this name; probe: probes alone")
    parser.add_argument("--round", type=int, help="one of them")
    parser.add_argument("--report", action="store_true", help="measure nothing")
    parser.add_argument("--list", action="store_true", help="print the cases' names")
    parser.add_argument("--stream", type=Path, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.list:
        print("\n".join(case.name for case in CASES))
        return
    if given.stream:
        stream(given.out / "run.toml", given.train, given.stream)
        return
    given.out.mkdir(parents=True, exist_ok=True)
    study = Study(given.train, given.out.absolute())
    if not given.report:
        # Probes open every round, and close the last one
        for number in range(ROUNDS + 1) if given.round is None else [given.round]:
            for ranks in (1, 2):
                if given.only in ("", "probe", f"probe-{ranks}"):
                    study.probe(ranks, number)
            for case in CASES if number < ROUNDS else []:
                if given.only in ("", case.name):
                    study.measure(case, number)
    if given.report or not given.only:
        print("\n".join([*study.report(CASES), "", *study.report_paying()]))


if __name__ == "__main__":
    main()
