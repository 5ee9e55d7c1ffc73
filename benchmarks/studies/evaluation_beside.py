"""What does an epoch cost that is evaluated beside training, in line, and not at all?

A small convolutional network is trained on one core, to which its process is bound. The other core
is spare: the evaluator finds it by itself. The three ways take turns, each in a run of its own, in
another order each time. Compared are the epochs' times as the runs' metrics have them: an epoch's
steps, its evaluation or the handing over of its weights, and the checkpoint before it. The first
epoch of a run warms up, and is left out. What is given is the median of the ratios of a turn, and
the quarters about it. That both ways found the same figures, to the last digit, is checked.

    OMP_NUM_THREADS=1 python -m benchmarks.studies.evaluation_beside [--repeats 9] [--epochs 6]
"""

import argparse
import io
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from PIL import Image

from benchmarks.studies.live_cost import quarters
from dataio.base.lines import read_checked_lines
from tonari.report.machine import describe_machine

WAYS = ("none", "inline", "beside")
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


def train(directory: Path, way: str, name: str) -> list[dict[str, float]]:
    """Train in a process that is bound to one core; returns the lines of its metrics."""
    run, core = directory / name, min(os.sched_getaffinity(0))
    given = [f"run.directory={run}"]
    if way != "none":
        given += [f"data.test={directory}/test.parquet", f"run.evaluation={way}"]
    command = [sys.executable, "-m", "tonari", "train", str(directory / "run.toml"), *given]
    subprocess.run(["taskset", "-c", str(core), *command], check=True, stdout=subprocess.DEVNULL)
    return [*read_checked_lines(run / "metrics.jsonl")]


def measure(directory: Path, repeats: int, epochs: int) -> dict[str, object]:
    """Let the ways take turns."""
    write(directory, epochs)
    ratios: dict[str, list[float]] = {way: [] for way in WAYS[1:]}
    late, evaluation_s, none_s = [], [], []
    for turn in range(repeats + 1):
        took, judged = {}, {}
        for way in WAYS[turn % 3 :] + WAYS[: turn % 3]:
            lines = train(directory, way, f"{turn}-{way}")
            of_epochs = [line for line in lines if line["kind"] == "epoch"]
            took[way] = statistics.median(line["measured_s"] for line in of_epochs[1:])
            judged[way] = {
                line["step"]: [line[name] for name in FIGURES]
                for line in lines if line.get("evaluation_loss") is not None
            }  # fmt: skip
            if way == "inline" and turn:
                evaluation_s += [line["evaluation_s"] for line in of_epochs[1:]]
            if way == "beside" and turn:
                steps = of_epochs[0]["step"]
                late += [line["late_steps"] / steps for line in lines if "late_steps" in line]
        if judged["inline"] != judged["beside"]:
            raise SystemExit(f"other figures beside than in line: {judged}")
        if turn:  # the first stages and warms up
            none_s.append(took["none"])
            for way, found in ratios.items():
                found.append(took[way] / took["none"])
    return {
        "question": "an epoch with its evaluation in line, and beside training, of one without",
        "train_samples": TRAIN, "test_samples": TEST, "batch_size": BATCH, "epochs": epochs,
        "repeats": repeats, "load": os.getloadavg()[0], "epoch_s": statistics.median(none_s),
        "evaluation_inline_s": statistics.median(evaluation_s),
        "late_epochs": statistics.median(late), "most_late_epochs": max(late),
        **{way: quarters(found) for way, found in ratios.items()}, "figures": "equal",
        "machine": describe_machine(directory),
    }  # fmt: skip


def main() -> None:
    """Print one JSON line."""
    parser = argparse.ArgumentParser(description="Evaluate in line, beside training, or not.")
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--epochs", type=int, default=6)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as directory:
        print(json.dumps(measure(Path(directory), options.repeats, options.epochs)))


if __name__ == "__main__":
    main()
