r"""How right `tonari plan` is about an epoch, and about when staging has paid, beside slow sources.

    python -m tests.lab.plan_of_epochs --train cifar10-test.parquet --out DIR      # root, FUSE

Cases differ in the exchange, the share of hidden rows, the rate of links between nodes, the quota
of caches and the rate of the source, a directory behind `tests/slowfs.py`. Steps are emulated, see
`tests.lab.train_cases`: they pause, so that what else this machine does matters little. Each case
trains in rounds, with probes in between, which read files at full speed; the plan gets the slow
rates from a cluster's file alone. "Streamed" is a job without a cache, which reads every shard in
every epoch. What is measured is kept in DIR: `--report` measures nothing.
"""

import argparse
import contextlib
import io
import json
import math
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from PIL import Image
from scipy.stats import spearmanr

from benchmarks.loader.launch import mpiexec
from oracle.cluster.cluster import Cluster, Level, Storage
from oracle.paradl import Link, link_across, price, probed_link
from oracle.plan import StepPlan, plan_step
from oracle.probe.probe import Probe, joined, load_probe
from tests.lab.cluster import Lab
from tests.lab.train_cases import Waiting
from tests.slowfs import slowfs
from trainer.config.config import load_config
from trainer.run.build import lay_out
from trainer.run.own import Own

SHARDS = 10
ROWS = 5000
ROUNDS = 2
PAUSE_S = 0.04
"""Of a step of one rank; two ranks have half of the steps, so that these are twice as long."""
TIMEOUT_S = 1800
OF_DATA = 0.95
"""Of a link's rate, what is left for data once the headers of Ethernet, IP and TCP are off."""
MEMORY_GBYTE_S = 5.0
"""Of the link between nodes that are pretended: processes of one machine."""
SETTINGS = """
[data]
batch_size = 64
image_size = 32
image = "png"
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
    Case(ranks=1, quota="10MB", source_mb_s=12), Case(ranks=1, quota="10MB", source_mb_s=4),
    Case(ranks=1, quota="10MB", source_mb_s=4, hidden=0.3),
    Case(ranks=2, quota="5MB", source_mb_s=12), Case(ranks=2, quota="5MB", source_mb_s=4),
]  # fmt: skip
RATES = (1.0, 1.5, 2.5, 4.0, 8.0)
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
        self.shards = out / "shards"
        self._runs = out / "runs.jsonl"
        self.settings = out / "run.toml"
        self.settings.write_text(SETTINGS)
        if not self.shards.exists():
            table = pq.read_table(train, columns=["jpg", "cls"]).slice(0, ROWS)
            images = [_as_png(image) for image in table["jpg"].to_pylist()]
            table = table.set_column(0, "png", pa.array(images))
            rows = -(-len(table) // SHARDS)
            self.shards.mkdir()
            for number in range(SHARDS):
                part = table.slice(number * rows, rows)
                pq.write_table(part, self.shards / f"{number:03}.parquet", compression="none")

    def measure(self, ranks: int, mbit_s: float, number: int) -> None:
        """Probe, and train all cases of so many ranks and such links, in one start of the ranks."""
        cases = [case for case in CASES if (case.ranks, case.mbit_s) == (ranks, mbit_s)]
        with contextlib.ExitStack() as stack:
            scratch = Path(stack.enter_context(tempfile.TemporaryDirectory()))
            rates = {case.source_mb_s for case in cases if case.source_mb_s}
            directories = {0.0: self.shards} | {
                rate: stack.enter_context(
                    slowfs(self.shards, bytes_per_s=rate * 1e6, cache="direct_io")
                ).path
                for rate in sorted(rates)
            }
            starter, env = [mpiexec(), "-n", str(ranks)], {**os.environ, "OMP_NUM_THREADS": "1"}
            here = scratch / "caches"
            here.mkdir()
            if mbit_s:
                lab = stack.enter_context(Lab(scratch / "lab", ranks, rate=f"{mbit_s:g}mbit"))
                starter, here, env["GLOO_SOCKET_IFNAME"] = lab.mpiexec(ranks), lab.scratch, "eth0"
            jobs: list[dict[str, Any]] = []
            # Links are for jobs alone: a probe is of the machine
            for case in [*([] if mbit_s else [None]), *cases]:
                data = directories[case.source_mb_s if case else 0.0]
                jobs.append({
                    "kind": "probe" if case is None else "stream" if case.streams else "train",
                    "case": case.name if case else "probe", "round": number, "number": len(jobs),
                    "ranks": ranks, "out": str(self._probe_path(ranks, number)),
                    "settings": str(self.settings), "scratch": str(here),
                    "pause_s": PAUSE_S * ranks, "pretends": not mbit_s,
                    "overrides": [
                        f"data.train={data}/*.parquet", *(case.settings if case else []),
                    ],
                })  # fmt: skip
            todo = scratch / "jobs.json"
            todo.write_text(json.dumps(jobs))
            command = [
                *starter, sys.executable, "-W", "ignore", "-m", "tests.lab.train_cases", str(todo),
                str(self._runs),
            ]  # fmt: skip
            subprocess.run(command, check=True, env=env, timeout=TIMEOUT_S)

    def _probe_path(self, ranks: int, number: int) -> Path:
        return self._out / f"probe-{ranks}-{number}.json"

    # What was planned

    def runs(self, case: Case) -> list[dict[str, Any]]:
        """Read what was measured of a case."""
        if not self._runs.exists():
            return []
        found = [json.loads(line) for line in self._runs.read_text().splitlines()]
        return [run for run in found if run["case"] == case.name]

    def _found(self, ranks: int) -> Probe:
        """Join the probes of all rounds."""
        paths = [self._probe_path(ranks, number) for number in range(ROUNDS)]
        return joined([load_probe(path) for path in paths if path.exists()])

    def plan(self, case: Case) -> StepPlan:
        """Predict a case."""
        overrides = [f"data.train={self.shards}/*.parquet", *case.settings]
        return plan_step(
            load_config(self.settings, overrides), self._found(case.ranks), cluster=case.cluster,
            hidden_fraction=case.hidden, own=Own(model=partial(Waiting, PAUSE_S * case.ranks)),
            cores_of=(0,) * case.ranks,
        )  # fmt: skip

    def paradl_s(self, case: Case, steps: int) -> float:
        """Price an epoch's steps by ParaDL's equations, which know of no data."""
        found = self._found(case.ranks)
        layout = lay_out(load_config(self.settings, [f"data.train={self.shards}"]), case.ranks)

        def link_of(ranks: tuple[int, ...]) -> Link:
            return link_across(case.cluster, ranks, inside=probed_link(found.messages))

        terms = price(
            found.steps[0].events, computation_s=found.steps[0].computing_s, sizes=layout.sizes,
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


def _as_png(image: bytes) -> bytes:
    out = io.BytesIO()
    Image.open(io.BytesIO(image)).save(out, "png")
    return out.getvalue()


def main() -> None:
    """Measure what is missing, and print tables."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--train", type=Path, required=True, help="CIFAR-10 as Parquet")
    parser.add_argument("--out", type=Path, required=True, help="where figures are kept")
    parser.add_argument(
        "--only", nargs=2, type=float, metavar=("RANKS", "MBIT"), help="cases of these"
    )
    parser.add_argument("--round", type=int, help="one of them")
    parser.add_argument("--report", action="store_true", help="measure nothing")
    given = parser.parse_args()
    given.out.mkdir(parents=True, exist_ok=True)
    study = Study(given.train, given.out.absolute())
    groups = dict.fromkeys((case.ranks, case.mbit_s) for case in CASES)
    if given.only:
        groups = {(int(given.only[0]), given.only[1]): None}
    rounds = range(ROUNDS) if given.round is None else [given.round]
    for number in rounds if not given.report else []:
        for ranks, mbit_s in groups:
            study.measure(ranks, mbit_s, number)
    if given.report or not given.only:
        print("\n".join([*study.report(CASES), "", *study.report_paying()]))


if __name__ == "__main__":
    main()
