"""What do `dataio.live` and a second copy of each row cost while no node is lost?

Two ranks as two nodes train a small convolutional network, a tenth of the rows exchanged in each
epoch. The baseline, ``plain``, is the same loop without live and with one copy of each row: the
same average of gradients, no `LiveJob.step`. Each way has processes of its own, and they take
turns, an epoch each, so that what else the machine does hits all of them. Ratios are to the
baseline within a turn, then their median; the first turn warms up. ``cpu`` is the time of all
threads of a rank, which says more on a machine that others use too.

    OMP_NUM_THREADS=1 python -m benchmarks.studies.live_cost [--repeats 9]
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
import torch.distributed as dist
from torch.nn.functional import cross_entropy

import dataio
import shuffle
from dataio.world.discover import torch_world
from tonari.report.machine import describe_machine

WAYS: dict[str, tuple[bool, Literal[1, 2]]] = {
    "plain": (False, 1), "live": (True, 1),
    "plain_2_copies": (False, 2), "live_2_copies": (True, 2),
}  # fmt: skip
"""Whether live, and copies of each row."""
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


def train(job: dataio.LiveJob, directory: Path, *, way: str, turns: int) -> None:
    """Train an epoch for each line on stdin, and write its times."""
    is_live, copies = WAYS[way]
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
        if is_live:
            job.keep(loader, model=model, optimizer=optimizer)
        epochs = loader.epochs(turns)
        for _ in range(turns):
            sys.stdin.readline()
            times, cpu_s = [time.perf_counter()], time.process_time()
            next(epochs)
            for batch in loader:
                optimizer.zero_grad()
                loss = cross_entropy(model(batch["image"]), batch["label"].long())
                loss.backward()  # type: ignore[no-untyped-call]
                job.average(model.parameters())
                with job.step() if is_live else contextlib.nullcontext():
                    optimizer.step()
                times.append(time.perf_counter())
            cpu_s = time.process_time() - cpu_s
            steps_s = [after - before for before, after in pairwise(times[1:])]
            took = {"epoch_s": times[-1] - times[0], "step_s": statistics.median(steps_s),
                    "epoch_cpu_s": cpu_s}  # fmt: skip
            print(json.dumps(took), flush=True)


def run_rank(directory: Path, way: str, turns: int) -> None:
    """Be a rank of one way."""
    if WAYS[way][0]:
        dataio.live(
            lambda job: train(job, directory, way=way, turns=turns), directory=directory / "live"
        )
    else:
        dist.init_process_group("gloo")
        world = torch_world(timeout_s=300.0)
        train(dataio.LiveJob(world, tuple(range(RANKS)), None), directory, way=way, turns=turns)


def start(directory: Path, way: str, turns: int) -> list["subprocess.Popen[str]"]:
    """Start the ranks of one way."""
    (directory / way).mkdir()
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    environ = os.environ | {"WORLD_SIZE": str(RANKS), "MASTER_ADDR": "127.0.0.1",
                            "MASTER_PORT": str(port), "TONARI_RANKS_PER_NODE": "1"}  # fmt: skip
    return [
        subprocess.Popen(
            [sys.executable, "-m", "benchmarks.studies.live_cost", "--rank", str(directory / way),
             way, "--repeats", str(turns)],
            env=environ | {"RANK": str(rank)}, text=True,
            stdin=subprocess.PIPE, stdout=subprocess.PIPE,
        ) for rank in range(RANKS)
    ]  # fmt: skip


def take_turn(ranks: list["subprocess.Popen[str]"]) -> dict[str, float]:
    """Let a way train an epoch; returns the times of its slower rank."""
    for rank in ranks:
        assert rank.stdin is not None
        rank.stdin.write("\n")
        rank.stdin.flush()
    took = [json.loads(rank.stdout.readline()) for rank in ranks if rank.stdout is not None]
    return {name: max(each[name] for each in took) for name in took[0]}


def measure(directory: Path, repeats: int) -> dict[str, object]:
    """Let all ways take turns."""
    count = RANKS * STEPS * BATCH
    images = np.random.default_rng(0).normal(size=(count, 3 * SIDE * SIDE)).astype("float32")
    rows = {"image": list(images), "label": np.arange(count) % 10}
    pq.write_table(pa.table(rows), directory / "rows.parquet")
    ways = {way: start(directory, way, repeats + 1) for way in WAYS}
    took = [{way: take_turn(ranks) for way, ranks in ways.items()} for _ in range(repeats + 1)]
    for rank in [rank for ranks in ways.values() for rank in ranks]:
        if rank.wait(60):
            raise SystemExit(f"a rank ended with {rank.returncode}")
    figures: dict[str, object] = {
        "question": "cost of live and of copies while no node is lost",
        "ranks": RANKS, "steps": STEPS, "repeats": repeats, "exchange": EXCHANGE,
        "load": os.getloadavg()[0],
    }  # fmt: skip
    for name in ("step_s", "epoch_s", "epoch_cpu_s"):
        for way in WAYS:
            figures[f"{way}_{name}"] = statistics.median(turn[way][name] for turn in took[1:])
            ratios = [turn[way][name] / turn["plain"][name] for turn in took[1:]]
            if way != "plain":
                figures[f"{way}_{name.removesuffix('_s')}_ratio"] = statistics.median(ratios)
    return figures


def main() -> None:
    """Print one line of JSON."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--rank", nargs=2, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.rank:
        run_rank(Path(args.rank[0]), args.rank[1], args.repeats)
        return
    with tempfile.TemporaryDirectory() as scratch:
        figures = measure(Path(scratch), args.repeats)
        print(json.dumps(figures | describe_machine(Path(scratch))))


if __name__ == "__main__":
    main()
