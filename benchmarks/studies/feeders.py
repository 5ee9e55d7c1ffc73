"""What does a feeder save a rank that has one core, and what does it cost where it saves nothing?

The rank's process is bound to one core, its loader has one thread there, and the feeder one process
on another core. The loop sleeps for as long as a GPU would compute. Ways take turns, each with a
loader of its own on a warm cache: no feeder, a feeder, and batches that lie in memory. ``cpu`` is
the time of all threads of the rank's process. The forecast is that of `tonari plan`: of what the
loader itself measured of a row here and there.

    OMP_NUM_THREADS=1 python -m benchmarks.studies.feeders [--turns 5] [--batches 24]
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch

import dataio
from benchmarks.studies.decode_beside import make_pictures
from tonari.oracle.feeders import fed_batch
from tonari.report.machine import describe_machine

WAYS = ("none", "feeder", "memory")
WARM_UP = 6


def taken(batches: Iterable[Any], num: int, step_s: float) -> tuple[float, float]:
    """Take batches, each followed by a step: seconds, and of the process' cores, of a batch."""
    turning = iter(batches)
    for _ in range(WARM_UP):
        next(turning)
        time.sleep(step_s)
    began, cpu_began = time.perf_counter(), time.process_time()
    for _ in range(num):
        next(turning)
        time.sleep(step_s)
    took_s, cpu_s = time.perf_counter() - began, time.process_time() - cpu_began
    return took_s / num, cpu_s / num


def turn(
    way: str, path: Path, scratch: Path, field: dataio.Image, *, batch: int, num: int, step_s: float
) -> dict[str, float]:
    """Measure one way once."""
    feeders = scratch / "feeders" if way == "feeder" else None
    with dataio.Loader(
        str(path), batch_size=batch, fields={"image": field}, cache=scratch / f"cache-{path.stem}",
        workers=dataio.Workers(threads=1, feeders=feeders),
        reports=dataio.Reports(progress=False),
    ) as loader:  # fmt: skip
        batches: Iterable[Any] = (each for _ in loader.epochs(10**6) for each in loader)
        if way == "memory":
            first = next(iter(batches))
            batches = (first for _ in range(10**6))
        batch_s, cpu_s = taken(batches, num, step_s)
        found = {"batch_s": batch_s, "cpu_s": cpu_s} | loader.stats()
        there = loader._session.gather.feeders
        if there is not None:
            here, away = there._made_here, there._made_there
            found["make_s"] = here.cpu_s / max(here.rows, 1)
            found["trade_s"] = away.cpu_s / max(away.rows, 1)
    return found


def study(
    name: str, path: Path, scratch: Path, field: dataio.Image, *, batch: int, num: int,
    step_s: float, turns: int,
) -> None:  # fmt: skip
    """Print how the ways do on some pictures."""
    found: dict[str, list[dict[str, float]]] = {way: [] for way in WAYS}
    for number in range(turns):
        for way in WAYS[number % 3 :] + WAYS[: number % 3]:
            found[way].append(turn(way, path, scratch, field, batch=batch, num=num, step_s=step_s))

    def median(way: str, what: str) -> float:
        return statistics.median(each[what] for each in found[way])

    fed = found["feeder"]
    rows = median("feeder", "feeder_rows")
    ratios = [a["batch_s"] / b["batch_s"] for a, b in zip(fed, found["none"], strict=True)]
    forecast = fed_batch(
        batch, make_s=median("feeder", "make_s"), trade_s=median("feeder", "trade_s"), threads=1,
        cores=1,
    )  # fmt: skip
    print(json.dumps({
        "study": name, "batch": batch, "step_s": step_s, "turns": turns,
        **{f"{way}_batch_s": round(median(way, "batch_s"), 5) for way in WAYS},
        **{f"{way}_cpu_s": round(median(way, "cpu_s"), 5) for way in WAYS},
        "feeder_of_none": round(statistics.median(ratios), 4),
        "ratios": [round(ratio, 3) for ratio in ratios],
        "fed_fraction": round(rows / max(median("feeder", "rows"), 1), 3),
        "sent_bytes_per_row": round(median("feeder", "feeder_sent_bytes") / max(rows, 1)),
        "received_bytes_per_row": round(median("feeder", "feeder_received_bytes") / max(rows, 1)),
        "make_us": round(1e6 * median("feeder", "make_s"), 1),
        "trade_us": round(1e6 * median("feeder", "trade_s"), 1),
        "lost_parts": median("feeder", "feeder_lost_parts"),
        "forecast_batch_s": round(max(forecast.batch_s, step_s), 5),
        "load": round(os.getloadavg()[0], 1),
    }), flush=True)  # fmt: skip


def main() -> None:
    """Print a line for each kind of picture and step."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--batches", type=int, default=24)
    options = parser.parse_args()
    torch.set_num_threads(1)
    first, *others = sorted(os.sched_getaffinity(0))
    if not others:
        parser.error("this process has one core, expected two: one for the feeder")
    os.sched_setaffinity(0, {first})
    with tempfile.TemporaryDirectory(prefix="tonari-study-") as directory:
        scratch = Path(directory)
        print(describe_machine(scratch))
        command = [sys.executable, "-m", "tonari", "feed", str(scratch / "feeders"), "--cores", "1"]
        feeder = subprocess.Popen(["taskset", "-c", str(others[0]), *command])
        try:
            while not [*scratch.glob("feeders/feeder-*")]:
                time.sleep(0.1)
            large = make_pictures(scratch / "large.parquet", 1024, 375, 500)
            small = make_pictures(scratch / "small.parquet", 8192, 32, 32)
            cut = dataio.Image("jpg", crop=dataio.RandomResizedCrop(224), flip=0.5)
            for name, path, field, batch, num, step_s in (
                ("large", large, cut, 64, options.batches, 0.0),
                ("large, a step of its own", large, cut, 64, options.batches, 0.1),
                ("large, threads keep up", large, cut, 64, options.batches // 2, 0.6),
                ("small", small, dataio.Image("jpg"), 256, 10 * options.batches, 0.0),
            ):
                study(
                    name, path, scratch, field, batch=batch, num=num, step_s=step_s,
                    turns=options.turns,
                )  # fmt: skip
        finally:
            feeder.terminate()
            feeder.wait()


if __name__ == "__main__":
    main()
