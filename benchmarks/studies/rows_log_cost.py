"""What share of an epoch does the log of rows take, in a run that trains?

A small convolution network is trained on generated pictures of 32 x 32 by a loader with a log and
by one without, epoch by epoch in turns. The calls of the log are timed where the loader makes them,
by the clock and by the processor time of their thread; the ratio of the epochs shows the same with
far more noise.

    python -m benchmarks.studies.rows_log_cost [--rows 20000] [--epochs 6] [--hide]
"""

import argparse
import contextlib
import json
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch

import importance
from dataio import Array, Int, Loader, Reports
from dataio.rowlog import log
from dataio.rowlog.log import RowLog
from dataio.world import single_world
from tonari.bench.generated import Generated
from tonari.report.machine import describe_machine

BATCH_SIZE, PIXELS, CLASSES = 64, (3, 32, 32), 10
CALLS = ("begin", "progress")


class Spent:
    """Times the calls of the log: seconds by the clock, and of the processor."""

    def __init__(self) -> None:
        self.wall_s = self.cpu_s = 0.0

    def timed(self, call: Callable[..., Any]) -> Callable[..., Any]:
        """Time a method of the log."""

        def measured(*args: Any, **options: Any) -> Any:
            started, used = time.perf_counter(), time.thread_time()
            try:
                return call(*args, **options)
            finally:
                self.wall_s += time.perf_counter() - started
                self.cpu_s += time.thread_time() - used

        return measured


def make_loader(root: Path, num_rows: int, *, hides: bool, logs: bool) -> Loader:
    """Make a loader, with a log or without."""
    return Loader(
        Generated("pictures", num_rows, int(np.prod(PIXELS))),
        fields={"image": Array("image", PIXELS, "uint8"), "label": Int("cls")},
        batch_size=BATCH_SIZE, cache=root / f"cache-{logs}", world=single_world(),
        importance=importance.InfoBatch(0.3) if hides else None,
        reports=Reports(progress=False, rows=root / "rows" if logs else None),
    )  # fmt: skip


def make_model() -> torch.nn.Module:
    """Make a small convolution network."""
    return torch.nn.Sequential(
        torch.nn.Conv2d(3, 16, 3, padding=1, stride=2), torch.nn.ReLU(),
        torch.nn.Conv2d(16, 32, 3, padding=1, stride=2), torch.nn.ReLU(),
        torch.nn.Flatten(), torch.nn.Linear(32 * 64, CLASSES),
    )  # fmt: skip


def train(loader: Loader, *, hides: bool) -> Iterator[tuple[float, float]]:
    """Train on and on; yield what each epoch took, by the clock and of the process's processors."""
    torch.manual_seed(0)  # the same numbers with the log and without
    model = make_model()
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    started, used = time.perf_counter(), time.process_time()
    for _ in loader.epochs(10**6):
        for batch in loader:
            logits = model(batch["image"].float() / 255)
            loss = torch.nn.functional.cross_entropy(logits, batch["label"], reduction="none")
            optimizer.zero_grad()
            torch.autograd.backward((loss * batch["weight"]).mean())
            optimizer.step()
            if hides:
                loader.report(batch, loss, *importance.outcome(logits, batch["label"]))
        yield time.perf_counter() - started, time.process_time() - used
        started, used = time.perf_counter(), time.process_time()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, default=20_000)
    parser.add_argument("--epochs", type=int, default=6)
    parser.add_argument("--hide", action="store_true", help="hide rows, as InfoBatch does")
    given = parser.parse_args()
    torch.set_num_threads(1)
    spent, beside = Spent(), Spent()
    # What a thread of the log's own does beside training
    vars(log)["_fsync"] = beside.timed(vars(log)["_fsync"])
    times: dict[bool, list[tuple[float, float]]] = {True: [], False: []}
    for name in CALLS:
        setattr(RowLog, name, spent.timed(getattr(RowLog, name)))
    with tempfile.TemporaryDirectory() as directory, contextlib.ExitStack() as opened:
        root = Path(directory)
        runs = {}
        for logs in (True, False):
            loader = make_loader(root, given.rows, hides=given.hide, logs=logs)
            runs[logs] = train(opened.enter_context(loader), hides=given.hide)
            next(runs[logs])  # staging, and what is slow the first time
        spent.wall_s = spent.cpu_s = beside.cpu_s = 0.0
        for _ in range(given.epochs):
            for logs, run in runs.items():
                times[logs].append(next(run))
        machine = describe_machine(root)
    wall_s, cpu_s = (statistics.median(part) for part in zip(*times[True], strict=True))
    plain_s = statistics.median(wall for wall, _ in times[False])
    plain_cpu_s = statistics.median(cpu for _, cpu in times[False])
    line = {
        "question": "rows_log_cost", "machine": machine, "rows": given.rows, "hides": given.hide,
        "steps_per_epoch": -(-given.rows // BATCH_SIZE), "repeats": given.epochs,
        "epoch_s": wall_s, "epoch_cpu_s": cpu_s,
        "log_s": spent.wall_s / given.epochs,
        "log_cpu_s": (spent.cpu_s + beside.cpu_s) / given.epochs,
        "log_fraction": spent.wall_s / sum(wall for wall, _ in times[True]),
        "log_cpu_fraction": (spent.cpu_s + beside.cpu_s) / sum(cpu for _, cpu in times[True]),
        "ratio_to_without": wall_s / plain_s, "cpu_ratio_to_without": cpu_s / plain_cpu_s,
    }  # fmt: skip
    print(json.dumps(line))


if __name__ == "__main__":
    main()
