r"""How right `tonari plan` is about an epoch: by exchange, hidden rows, links and slow sources.

    python -m benchmarks.lab.plan_of_epochs --train cifar10-test.parquet --out DIR      # root, FUSE

Each case trains a small ResNet on two ranks, each of which is a node: one of the lab where a link
is named, else a pretended one. The source is a directory behind `tests/slowfs.py` where its rate is
named.

All cases train in rounds, each with a probe, which reads at full speed and knows no link: the plan
gets these rates from a cluster's file alone. Where a link is named, the nodes of the lab are probed
too, and the case is planned by what this found as well. What is measured is kept in DIR, so that a
study that was cut goes on where it was; `--report` measures nothing, `--only` some cases.
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
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from PIL import Image
from scipy.stats import spearmanr

from tests.lab.cluster import Lab
from tests.slowfs import ROOT, slowfs
from tonari.mpi import mpiexec_command
from tonari.oracle.cluster.cluster import Cluster, Level, StorageRates
from tonari.oracle.cluster.probed import cluster_of
from tonari.oracle.epoch import PlannedEpoch
from tonari.oracle.paradl import Link, link_across, price, probed_link
from tonari.oracle.plan import plan_step
from tonari.oracle.probe.probe import Probe, load_probe
from tonari.report.tables import Table
from tonari.trainer.config.config import load_config
from tonari.trainer.run.build import lay_out
from tonari.trainer.watch.plan import PARTS

SHARDS = 10
ROWS = 5000
ROUNDS = 2
RANKS = 2
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
[data.workers]
threads = 1
[shuffle]
exchange = 0.1
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
        exchange: Share of the rows.
        hidden: Likewise.
        mbit_s: Of the link between two nodes of the lab; 0: the nodes are pretended.
        source_mb_s: That all nodes together read, in 1e6 bytes/s; 0: no limit.
        quota: Of a node's cache; empty: none.
    """

    exchange: float = 0.0
    hidden: float = 0.0
    mbit_s: float = 0.0
    source_mb_s: float = 0.0
    quota: str = ""

    @property
    def name(self) -> str:
        """Its settings, those that are not the default."""
        words = [f"Q {self.exchange:g}"]
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
        latency_us = 100 if self.mbit_s else 0
        levels = (
            Level(name="node", units=1),
            Level(name="switch", units=RANKS, gbyte_s=rate, latency_us=latency_us),
        )
        storage = StorageRates(read_gbyte_s=self.source_mb_s / 1e3 if self.source_mb_s else None)
        return Cluster(name="lab", level=levels, storage=storage)


CASES = [
    *(Case(exchange=exchange) for exchange in (0.0, 0.5, 1.0)),
    *(Case(exchange=exchange, hidden=0.3) for exchange in (0.0, 1.0)),
    Case(quota="5MB", source_mb_s=12), Case(quota="5MB", source_mb_s=4),
    Case(quota="5MB", source_mb_s=4, hidden=0.3), Case(quota="4MB", source_mb_s=8),
    Case(mbit_s=100), Case(exchange=1.0, mbit_s=100), Case(exchange=0.5, mbit_s=100, hidden=0.3),
    Case(quota="5MB", source_mb_s=8, mbit_s=100),
    Case(mbit_s=300), Case(exchange=1.0, mbit_s=300),
    *(
        Case(exchange=exchange, mbit_s=mbit_s)
        for mbit_s in (50, 200, 400, 1000) for exchange in (0.0, 1.0)
    ),
]  # fmt: skip


class EpochStudy:
    """Measures cases, and compares them with their plans.

    Args:
        train: CIFAR-10 as Parquet.
        out: What was measured.
        cases: To measure.
    """

    def __init__(self, train: Path, out: Path, cases: Sequence[Case] = CASES) -> None:
        self._out, self.cases = out, cases
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

    def measure(self, mbit_s: float, number: int) -> None:
        """Probe, and train all cases of such links that are missing."""
        cases = [
            case for case in self.cases
            if case.mbit_s == mbit_s and number not in (run["round"] for run in self.runs(case))
        ]  # fmt: skip
        probed = self._probe_of(mbit_s, number)
        if not cases and (mbit_s or probed.exists()):
            return
        todo = [*([] if probed.exists() else [None]), *cases]
        with contextlib.ExitStack() as stack:
            scratch = Path(stack.enter_context(tempfile.TemporaryDirectory()))
            rates = {case.source_mb_s for case in cases if case.source_mb_s}
            directories = {0.0: self.shards} | {
                rate: stack.enter_context(
                    slowfs(self.shards, bytes_per_s=rate * 1e6, cache="direct_io")
                ).path
                for rate in sorted(rates)
            }
            starter = mpiexec_command(RANKS)
            env = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
            here = scratch / "caches"
            here.mkdir()
            if mbit_s:
                lab = stack.enter_context(Lab(scratch / "lab", RANKS, rate=f"{mbit_s:g}mbit"))
                starter, here, env["GLOO_SOCKET_IFNAME"] = lab.mpiexec(RANKS), lab.scratch, "eth0"
            for at, case in enumerate(todo):
                job = {
                    "case": case.name if case else "", "round": number, "out": str(probed),
                    "settings": str(self.settings), "pretends": not mbit_s,
                    "overrides": [
                        f"data.train={directories[case.source_mb_s if case else 0.0]}/*.parquet",
                        f"run.directory={scratch}/{at}", f"data.cache.path={here}/{at}",
                        *(case.settings if case else []),
                    ],
                }  # fmt: skip
                # Of its own processes, as a user starts each: what ran before leaves its traces
                command = [
                    *starter, sys.executable, "-W", "ignore", "-m", "benchmarks.lab.train_case",
                    json.dumps(job), str(self._runs),
                ]  # fmt: skip
                subprocess.run(command, check=True, env=env, timeout=TIMEOUT_S)

    # What was planned

    def runs(self, case: Case) -> list[dict[str, Any]]:
        """Read what was measured of a case."""
        if not self._runs.exists():
            return []
        found = [json.loads(line) for line in self._runs.read_text().splitlines()]
        return [run for run in found if run["case"] == case.name]

    def _probe_of(self, mbit_s: float, number: int) -> Path:
        return self._out / f"probe-{f'{mbit_s:g}-' if mbit_s else ''}{number}.json"

    def _found(self, number: int) -> Probe:
        """Read the probe of the machine of a round."""
        return load_probe(self._probe_of(0, number))

    def plan(self, case: Case, number: int, *, probed: bool = False) -> PlannedEpoch:
        """Predict a case by the probe of a round.

        Args:
            case: Which.
            number: Of the round.
            probed: By a probe on the nodes of the lab, which has timed its links, in place of one
                on the machine, and a file that names their rate.
        """
        overrides = [f"data.train={self.shards}/*.parquet", *case.settings]
        found, cluster = self._found(number), case.cluster
        if probed:
            # A node's rank was probed alone, and the lab's nodes share their processors
            slowdowns = found.slowdowns
            found = replace(load_probe(self._probe_of(case.mbit_s, number)), slowdowns=slowdowns)
            links = cluster_of(found, None)
            assert links is not None
            cluster = msgspec.structs.replace(links, storage=cluster.storage)
        epoch = plan_step(
            load_config(self.settings, overrides), found, cluster=cluster,
            hidden_fraction=case.hidden, cores_of=(0,) * RANKS,
        ).epoch  # fmt: skip
        assert epoch is not None
        return epoch

    def _probed_s(self, case: Case, numbers: Sequence[int]) -> float:
        return statistics.mean(self.plan(case, number, probed=True).epoch_s for number in numbers)

    def paradl_s(self, case: Case, number: int, steps: int) -> float:
        """Price an epoch's steps by ParaDL's equations, which know of no data."""
        found = self._found(number)
        layout = lay_out(load_config(self.settings, [f"data.train={self.shards}"]), RANKS)

        def link_of(ranks: tuple[int, ...]) -> Link:
            return link_across(case.cluster, ranks, inside=probed_link(found.messages))

        terms = price(
            found.steps[0].events, computation_s=found.steps[0].computing_s, sizes=layout.sizes,
            microbatches=layout.microbatches, link_of=link_of,
        )  # fmt: skip
        return steps * terms.step_s

    def report(self) -> Iterator[str]:
        """Write the table of what was measured and planned, and what was off most."""
        errors: dict[str, list[float]] = {}
        measured: list[float] = []
        planned: list[float] = []
        heads = (
            "case", "measured, s", "again", "planned, s", "error", "by probed links", "ParaDL",
            "last epoch", "planned worst",
        )  # fmt: skip
        rows: list[list[str]] = []
        for case in self.cases:
            runs = {run["round"]: run["epochs"][1:] for run in self.runs(case)}
            if not runs:
                continue
            times = [statistics.mean(e["measured_s"] for e in lines) for lines in runs.values()]
            plans = {number: self.plan(case, number) for number in runs}
            mean_s = statistics.mean(times)
            planned_s = statistics.mean(plan.epoch_s for plan in plans.values())
            paradl_s = [self.paradl_s(case, number, plans[number].steps) for number in runs]
            measured.append(mean_s)
            planned.append(planned_s)
            row = {
                **({"again": times[-1] / times[0] - 1} if len(times) > 1 else {}),
                "plan": planned_s / mean_s - 1,
                **(
                    {"by probed links": self._probed_s(case, list(runs)) / mean_s - 1}
                    if case.mbit_s
                    else {}
                ),
                "ParaDL": statistics.mean(paradl_s) / mean_s - 1,
                "last epoch": statistics.mean(
                    lines[-2]["measured_s"] / lines[-1]["measured_s"] - 1 for lines in runs.values()
                ),
            }
            for name, error in row.items():
                errors.setdefault(name, []).append(error)
            differ = {
                words: statistics.mean(
                    getattr(plans[number], part) - line[part]
                    for number, lines in runs.items() for line in lines
                )
                for part, words in PARTS.items()
            }  # fmt: skip
            off = max(differ, key=lambda words: abs(differ[words]))
            shown = {name: f"{error:+.1%}" for name, error in row.items()}
            rows.append([
                case.name, f"{mean_s:.2f}", shown.get("again", ""), f"{planned_s:.2f}",
                shown["plan"], shown.get("by probed links", ""), shown["ParaDL"],
                shown["last epoch"], f"{off} {differ[off]:+.2f} s",
            ])  # fmt: skip
        yield from Table(heads, rows).markdown()
        for name, of_cases in errors.items():
            sizes = sorted(map(abs, of_cases))
            yield (
                f"{name}: mean {statistics.mean(sizes):.1%}, "
                f"95 % within {np.quantile(sizes, 0.95):.1%}, most {sizes[-1]:.1%}"
            )
        yield f"rank correlation {spearmanr(measured, planned).statistic:.3f}"


def _as_png(image: bytes) -> bytes:
    out = io.BytesIO()
    Image.open(io.BytesIO(image)).save(out, "png")
    return out.getvalue()


def main() -> None:
    """Measure what is missing, and print the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--train", type=Path, required=True, help="CIFAR-10 as Parquet")
    parser.add_argument("--out", type=Path, required=True, help="where figures are kept")
    parser.add_argument("--report", action="store_true", help="measure nothing")
    parser.add_argument(
        "--only", nargs="+", default=[case.name for case in CASES], metavar="CASE",
        choices=[case.name for case in CASES], help="names of cases, as the table has them",
    )  # fmt: skip
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    given = parser.parse_args()
    given.out.mkdir(parents=True, exist_ok=True)
    cases = [case for case in CASES if case.name in given.only]
    study = EpochStudy(given.train, given.out.absolute(), cases)
    for number in range(given.rounds) if not given.report else ():
        for mbit_s in dict.fromkeys([0.0, *(case.mbit_s for case in cases)]):
            study.measure(mbit_s, number)
    print("\n".join(study.report()))


if __name__ == "__main__":
    main()
