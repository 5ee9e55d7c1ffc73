"""Does it pay to compress gradients between nodes: accuracy, and steps over a link of 100 Mbit?

Two replicas train, each a node of the lab (`tests/lab/cluster.py`: network namespaces, links shaped
by `tc tbf`; needs root). For accuracy a small CNN learns a part of CIFAR-10 with each way and seed,
over links without a limit. For step times a vision transformer trains a few steps at each rate; the
median step after the first few, and what node 0 sent over its link a step, as the kernel counts it.

    python -m benchmarks.studies.gradient_compression --parquet DIRECTORY [--rows 5000] [--epochs 6]
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq

from dataio.base.lines import read_checked_lines
from tests.lab.cluster import Lab
from tests.multirank import ROOT
from tonari.report.machine import describe_machine

NODES, BATCH, WARM_UP = 2, 32, 4
WAYS = {
    "none": (), "bfloat16": ("optimizer.compress_gradients=bfloat16",),
    "powersgd, rank 2": ("optimizer.compress_gradients=powersgd", "optimizer.compress_rank=2"),
    "powersgd, rank 4": ("optimizer.compress_gradients=powersgd",),
}  # fmt: skip
DATA = """
[data]
train = "{directory}/train.parquet"
test = "{directory}/test.parquet"
image = "jpg"
label = "cls"
batch_size = {batch}
[model]
kind = "small_cnn"
num_classes = 10
image_size = 32
[optimizer]
lr = 0.05
compress_warmup_steps = {warmup}
[run]
log_steps = 1
checkpoint_epochs = 0
device = "cpu"
"""
LARGE = ("model.kind=vit", "model.patch=8", "model.width=192", "model.depth=3", "model.heads=3")
"""Of 1.4 million weights."""


def train_all(cases: list[list[str]]) -> None:
    """Train one case after the other, as one of the ranks."""
    from dataio.job.launch import join
    from tonari.trainer import train
    from tonari.trainer.config.config import load_config

    with join(device="cpu"):
        for settings, *given in cases:
            train(load_config(Path(settings), given), quiet=True)


def run(lab: Lab, settings: Path, cases: dict[str, list[str]]) -> dict[str, list[dict[str, Any]]]:
    """Train cases in one job on the lab's nodes; their metrics."""
    done = [[str(settings), *given, f"run.directory={settings.parent / name}",
             f"data.cache={lab.scratch / name}"] for name, given in cases.items()]  # fmt: skip
    env = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT),
           "GLOO_SOCKET_IFNAME": "eth0"}  # fmt: skip
    command = [*lab.mpiexec(NODES), sys.executable, "-m", __spec__.name, "--cases"]
    ended = subprocess.run([*command, json.dumps(done)], env=env, capture_output=True, text=True)
    if ended.returncode:
        raise SystemExit(f"the job of {list(cases)} ended with {ended.returncode}: {ended.stderr}")
    return {
        name: list(read_checked_lines(settings.parent / name / "metrics.jsonl")) for name in cases
    }


def accuracies(lab: Lab, settings: Path, args: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Train with each way and seed."""
    cases = {
        f"{way}, seed {seed}": [*given, f"run.seed={seed}", f"run.epochs={args.epochs}"]
        for seed in range(args.seeds) for way, given in WAYS.items()
    }  # fmt: skip
    found = run(lab, settings, cases)
    last = {name: [line for line in lines if line["kind"] == "epoch"][-1]["accuracy"]
            for name, lines in found.items()}  # fmt: skip
    for way in WAYS:
        got = [last[f"{way}, seed {seed}"] for seed in range(args.seeds)]
        beside = [got[seed] - last[f"none, seed {seed}"] for seed in range(args.seeds)]
        yield {
            "question": "accuracy", "way": way, "accuracies": [round(each, 4) for each in got],
            "mean": round(statistics.mean(got), 4),
            "beside_none": [round(each, 4) for each in beside],
        }  # fmt: skip


def steps(lab: Lab, settings: Path, args: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Time steps at each rate, the ways in turns."""
    for rate in args.rates:
        lab.shape(rate)
        taken: dict[str, list[float]] = {way: [] for way in WAYS}
        sent: dict[str, int] = {}
        for turn in range(args.turns):
            for way, given in WAYS.items():
                before, name = lab.sent_bytes("node0"), f"{rate} {way} {turn}"
                settled = [
                    *LARGE,
                    *given,
                    f"run.max_steps={args.steps}",
                    "shuffle.kind=local",
                    "optimizer.compress_warmup_steps=0",
                    "run.evaluate_epochs=99",
                ]
                lines = run(lab, settings, {name: settled})[name]
                sent[way] = (lab.sent_bytes("node0") - before) // args.steps
                taken[way] += [
                    BATCH * NODES / line["samples_per_s"]
                    for line in lines if line["kind"] == "step" and line["step"] > WARM_UP
                ]  # fmt: skip
        for way, its in taken.items():
            low, median, high = statistics.quantiles(its, n=4)
            yield {
                "question": "step", "rate": rate, "way": way, "step_s": round(median, 4),
                "quarters_s": [round(low, 4), round(high, 4)], "sent_bytes_a_step": sent[way],
            }  # fmt: skip


def main() -> None:
    """Print a line of JSON for each way."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--parquet", type=Path)
    parser.add_argument("--cases", help=argparse.SUPPRESS)
    parser.add_argument("--only", choices=("accuracy", "step"))
    parser.add_argument("--rates", nargs="*", default=["100mbit", "1gbit"])
    for name, value in (("rows", 5000), ("epochs", 6), ("seeds", 5), ("steps", 14), ("turns", 2)):
        parser.add_argument(f"--{name}", type=int, default=value)
    args = parser.parse_args()
    if args.cases:
        train_all(json.loads(args.cases))
        return
    with tempfile.TemporaryDirectory() as scratch, Lab(Path(scratch) / "lab", NODES) as lab:
        for part, rows in (("train", args.rows), ("test", 2000)):
            whole = pq.read_table(args.parquet / f"cifar10-{part}.parquet")
            # Of all classes, by which the file may be sorted
            some = whole.take(np.arange(rows) * len(whole) // rows)
            pq.write_table(some, Path(scratch) / f"{part}.parquet")
        settings = Path(scratch) / "run.toml"
        settings.write_text(DATA.format(directory=scratch, batch=BATCH, warmup=args.rows // 640))
        for name, measure in {"accuracy": accuracies, "step": steps}.items():
            for figures in measure(lab, settings, args) if args.only in (None, name) else ():
                print(json.dumps(figures | describe_machine(Path(scratch))), flush=True)


if __name__ == "__main__":
    main()
