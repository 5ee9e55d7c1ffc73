"""What does an epoch cost that is evaluated beside training, in line, and not at all?

A small convolutional network is trained on one core, to which its process is bound. The other core
is spare: the evaluator finds it by itself. The ways take turns, each in a run of its own, in
another order each time. ``neighbour`` is not evaluated either, but the other core trains another
run all the while: what that costs, the cores' shared caches and memory cost. Compared is the time
from the end of an epoch to that of the next: steps, evaluation or the handing over of weights, and
a checkpoint. The first epoch of a run warms up, and is left out. What is given is the median of the
ratios of a turn, and the quarters about it. ``cpu`` is the time of all threads of the training
process, which says more on a machine that others use too: on a core of its own an epoch takes as
long. That both ways found the same figures, to the last digit, is checked.

    OMP_NUM_THREADS=1 python -m benchmarks.studies.evaluation_beside [--repeats 9] [--epochs 6]
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
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from PIL import Image

from benchmarks.studies.live_cost import quarters
from dataio.base.lines import read_checked_lines
from tonari.report.machine import describe_machine
from tonari.trainer.config.config import load_config
from tonari.trainer.run.loop import train

WAYS, WHAT = ("none", "inline", "beside", "neighbour"), ("epoch", "cpu")
TRAIN, TEST, SIDE, BATCH = 12_800, 6_400, 32, 64
CONFIG = """
[data]
train = "{directory}/train.parquet"
image = "png"
label = "cls"
image_size = 32
batch_size = 64
workers.threads = 0
cache = "{directory}/cache"
[model]
kind = "small_cnn"
num_classes = 10
image_size = 32
[run]
epochs = {epochs}
device = "cpu"
log_steps = 1000
"""
FIGURES = ("accuracy", "evaluation_loss")


def write(directory: Path, epochs: int) -> None:
    """Write the data and the settings."""
    rng = np.random.default_rng(0)
    for name, count in (("train", TRAIN), ("test", TEST)):
        labels = np.arange(count) % 10
        pixels = rng.integers(0, 100, (count, SIDE, SIDE, 3)) + 15 * labels[:, None, None, None]
        images = []
        for each in pixels.astype(np.uint8):
            file = io.BytesIO()
            Image.fromarray(each).save(file, "PNG", compress_level=1)
            images.append(file.getvalue())
        pq.write_table(pa.table({"png": images, "cls": labels}), directory / f"{name}.parquet")
    (directory / "run.toml").write_text(CONFIG.format(directory=directory, epochs=epochs))


def run_one(config: Path, given: list[str]) -> None:
    """Train, and print the clock and the process's time at each epoch's end."""
    ends: list[tuple[float, float]] = []
    train(
        load_config(config, given), quiet=True,
        on_epoch=lambda line: ends.append((time.perf_counter(), time.process_time())),
    )  # fmt: skip
    print(json.dumps(ends))


def start(directory: Path, way: str, name: str) -> tuple[dict[str, float], list[dict[str, Any]]]:
    """Train in a process that is bound to one core; returns an epoch's times, and all lines."""
    run, (core, spare, *_) = directory / name, sorted(os.sched_getaffinity(0))
    given = [str(directory / "run.toml"), f"run.directory={run}"]
    if way in ("inline", "beside"):
        given += [f"data.test={directory}/test.parquet", f"run.evaluation={way}"]
    command = [sys.executable, "-m", "benchmarks.studies.evaluation_beside", "--run", *given]
    other = [f"data.cache={directory}/neighbour-cache", f"run.directory={run}-neighbour"]
    with contextlib.ExitStack() as stack:
        if way == "neighbour":
            its = [*command, *other, "run.epochs=1000"]
            neighbour = stack.enter_context(subprocess.Popen(["taskset", "-c", str(spare), *its]))
            stack.callback(neighbour.kill)
        ended = subprocess.run(
            ["taskset", "-c", str(core), *command], check=True, stdout=subprocess.PIPE
        )
    ends = json.loads(ended.stdout.splitlines()[-1])
    took = {
        what: statistics.median(after[n] - before[n] for before, after in pairwise(ends))
        for n, what in enumerate(WHAT)
    }
    return took, [*read_checked_lines(run / "metrics.jsonl")]


def measure(directory: Path, repeats: int, epochs: int) -> dict[str, object]:
    """Let the ways take turns."""
    write(directory, epochs)
    turns, late, evaluation_s = list[dict[str, dict[str, float]]](), list[float](), list[float]()
    for turn in range(repeats + 1):
        took, judged = {}, {}
        for way in WAYS[turn % 4 :] + WAYS[: turn % 4]:
            took[way], lines = start(directory, way, f"{turn}-{way}")
            judged[way] = {
                line["step"]: [line[name] for name in FIGURES]
                for line in lines if line.get("evaluation_loss") is not None
            }  # fmt: skip
            if way == "inline":
                evaluation_s += [line["evaluation_s"] for line in lines if line["kind"] == "epoch"]
            late += [line["late_steps"] * BATCH / TRAIN for line in lines if "late_steps" in line]
        if judged["inline"] != judged["beside"]:
            raise SystemExit(f"other figures beside than in line: {judged}")
        turns += [took][: turn > 0]  # the first stages and warms up
    return {
        "question": "an epoch with its evaluation in line, and beside training, of one without",
        "train_samples": TRAIN, "test_samples": TEST, "batch_size": BATCH, "epochs": epochs,
        "repeats": repeats, "load": os.getloadavg()[0],
        **{f"none_{what}_s": statistics.median(t["none"][what] for t in turns) for what in WHAT},
        **{
            f"{way}, {what}": quarters([turn[way][what] / turn["none"][what] for turn in turns])
            for way in WAYS[1:] for what in WHAT
        },
        "evaluation_inline_s": statistics.median(evaluation_s), "late_epochs": max(late),
        "figures": "equal", "machine": describe_machine(directory),
    }  # fmt: skip


def main() -> None:
    """Print one JSON line."""
    parser = argparse.ArgumentParser(description="Evaluate in line, beside training, or not.")
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--epochs", type=int, default=6)
    parser.add_argument("--run", nargs="+", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.run:
        return run_one(Path(options.run[0]), options.run[1:])
    with tempfile.TemporaryDirectory() as directory:
        print(json.dumps(measure(Path(directory), options.repeats, options.epochs)))


if __name__ == "__main__":
    main()
