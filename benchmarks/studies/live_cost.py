"""What do `dataio.live` and a second copy of each row cost while no node is lost?

Two ranks as two nodes train a small convolutional network, a tenth of the rows exchanged in each
epoch. The same processes train an epoch with `LiveJob.step` and one without, in turns, so that a
ratio of the two has the processes' own luck (where their memory lies) in both of its parts. Ranks
with one copy of each row and with two take turns, too, and are started anew a few times, since
there that luck is in the ratio. Ratios are taken within a turn; what is given is their median, and
the quarters about it. The first turn of each start warms up. ``cpu`` is the time of all threads of
a rank, which says more on a machine that others use too.

    OMP_NUM_THREADS=1 python -m benchmarks.studies.live_cost [--repeats 9] [--starts 4]
"""

import argparse
import contextlib
import json
import os
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from itertools import pairwise
from pathlib import Path
from typing import Literal

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch
from torch.nn.functional import cross_entropy

import dataio
import shuffle
from tonari.report.machine import describe_machine

COPIES: tuple[Literal[1, 2], ...] = (1, 2)
WAYS = ("live", "plain")
RANKS, STEPS, BATCH, SIDE, WIDTH, DEPTH = 2, 20, 16, 32, 24, 5
EXCHANGE = 0.1


def make() -> torch.nn.Module:
    """Make what is trained: its batch norms have 15 buffers."""
    layers: list[torch.nn.Module] = []
    for number in range(DEPTH):
        conv = torch.nn.Conv2d(WIDTH if number else 3, WIDTH, 3, padding=1)
        layers += [conv, torch.nn.BatchNorm2d(WIDTH), torch.nn.ReLU()]
    pool = torch.nn.AdaptiveAvgPool2d(1)
    return torch.nn.Sequential(*layers, pool, torch.nn.Flatten(), torch.nn.Linear(WIDTH, 10))


def train(job: dataio.LiveJob, directory: Path, *, copies: Literal[1, 2], turns: int) -> None:
    """Train two epochs for each line on stdin, one of them live, and write their times."""
    model = make()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    fields: dict[str, dataio.Field] = {
        "image": dataio.Array("image", (3, SIDE, SIDE), "float32"), "label": dataio.Int("label"),
    }  # fmt: skip
    with dataio.Loader(
        str(directory.parent / "rows.parquet"), batch_size=BATCH, fields=fields, world=job.world,
        cache=dataio.NodeCache(directory / "cache", copies=copies),
        shuffle=shuffle.Partial(EXCHANGE), reports=dataio.Reports(progress=False),
    ) as loader:  # fmt: skip
        job.keep(loader, model=model, optimizer=optimizer)
        epochs = loader.epochs(2 * turns)
        for turn in range(turns):
            sys.stdin.readline()
            took: dict[str, float] = {}
            for way in WAYS if turn % 2 else WAYS[::-1]:
                times, cpu_s = [time.perf_counter()], time.process_time()
                next(epochs)
                for batch in loader:
                    optimizer.zero_grad()
                    loss = cross_entropy(model(batch["image"]), batch["label"].long())
                    loss.backward()  # type: ignore[no-untyped-call]
                    job.average(model.parameters())
                    with job.step() if way == "live" else contextlib.nullcontext():
                        optimizer.step()
                    times.append(time.perf_counter())
                cpu_s = time.process_time() - cpu_s
                steps_s = [after - before for before, after in pairwise(times[1:])]
                took |= {f"{way} step": statistics.median(steps_s),
                         f"{way} epoch": times[-1] - times[0], f"{way} cpu": cpu_s}  # fmt: skip
            print(json.dumps(took), flush=True)


def run_rank(directory: Path, copies: Literal[1, 2], turns: int) -> None:
    """Be a rank of a job."""
    dataio.live(
        lambda job: train(job, directory, copies=copies, turns=turns), directory=directory / "live"
    )


def start(directory: Path, copies: int, turns: int) -> list["subprocess.Popen[str]"]:
    """Start the ranks of a job."""
    directory.mkdir()
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    environ = os.environ | {"WORLD_SIZE": str(RANKS), "MASTER_ADDR": "127.0.0.1",
                            "MASTER_PORT": str(port), "TONARI_RANKS_PER_NODE": "1"}  # fmt: skip
    return [
        subprocess.Popen(
            [sys.executable, "-m", "benchmarks.studies.live_cost", "--rank", str(directory),
             str(copies), "--repeats", str(turns)],
            env=environ | {"RANK": str(rank)}, text=True,
            stdin=subprocess.PIPE, stdout=subprocess.PIPE,
        ) for rank in range(RANKS)
    ]  # fmt: skip


def take_turn(ranks: list["subprocess.Popen[str]"]) -> dict[str, float]:
    """Let a job train its epochs; returns the times of its slower rank."""
    for rank in ranks:
        assert rank.stdin is not None
        rank.stdin.write("\n")
        rank.stdin.flush()
    took = [json.loads(rank.stdout.readline()) for rank in ranks if rank.stdout is not None]
    return {name: max(each[name] for each in took) for name in took[0]}


def measure(directory: Path, repeats: int, starts: int) -> dict[str, object]:
    """Let all jobs take turns."""
    count = RANKS * STEPS * BATCH
    images = np.random.default_rng(0).normal(size=(count, 3 * SIDE * SIDE)).astype("float32")
    rows = {"image": list(images), "label": np.arange(count) % 10}
    pq.write_table(pa.table(rows), directory / "rows.parquet")
    turns = []
    for number in range(starts):
        jobs = {each: start(directory / f"{number}-{each}", each, repeats + 1) for each in COPIES}
        took = [
            {each: take_turn(ranks) for each, ranks in jobs.items()} for _ in range(repeats + 1)
        ]
        for rank in [rank for ranks in jobs.values() for rank in ranks]:
            if rank.wait(60):
                raise SystemExit(f"a rank ended with {rank.returncode}")
        turns += took[1:]
    figures: dict[str, object] = {
        "question": "cost of live and of copies while no node is lost",
        "ranks": RANKS, "steps": STEPS, "repeats": repeats, "starts": starts, "exchange": EXCHANGE,
        "load": os.getloadavg()[0],
    }  # fmt: skip
    for what in ("step", "epoch", "cpu"):
        for each in COPIES:
            ratios = [turn[each][f"live {what}"] / turn[each][f"plain {what}"] for turn in turns]
            figures[f"live of {each} copies, {what}"] = quarters(ratios)
        ratios = [turn[2][f"plain {what}"] / turn[1][f"plain {what}"] for turn in turns]
        figures[f"2 copies of 1, {what}"] = quarters(ratios)
        figures[f"plain {what}_s"] = statistics.median(t[1][f"plain {what}"] for t in turns)
    return figures


def quarters(ratios: list[float]) -> list[float]:
    """Give the median, in the middle, and the quarters."""
    return [round(each, 4) for each in statistics.quantiles(ratios, n=4)]


def main() -> None:
    """Print one line of JSON."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--starts", type=int, default=4)
    parser.add_argument("--rank", nargs=2, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.rank:
        run_rank(Path(args.rank[0]), 2 if args.rank[1] == "2" else 1, args.repeats)
        return
    with tempfile.TemporaryDirectory() as scratch:
        figures = measure(Path(scratch), args.repeats, args.starts)
        print(json.dumps(figures | describe_machine(Path(scratch))))


if __name__ == "__main__":
    main()
