"""Does a loader decide well what goes to a feeder, where the rank has one core?

The rank's process is bound to one core, its loader has one thread there, and the feeder one process
on another core. The loop sleeps for as long as a GPU would compute. Ways take turns, each with a
loader of its own on a warm cache: no feeder, the same again, as the loader decides, and all that a
feeder takes. Six kinds of data differ in what decides. ``auto_of_better`` is the median over turns
of the time of the third way over that of the better of the first and the last; ``noise`` that of
the second over the first. The forecast is that of `tonari plan`, of what the loader itself measured
of a row here and there; it knows no processor that others use.

    OMP_NUM_THREADS=1 python -m benchmarks.studies.feeders [--turns 5] [--batches 16]
"""

import argparse
import contextlib
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import torch

import dataio
from benchmarks.studies import feeders as importable
from benchmarks.studies.decode_beside import make_pictures
from dataio.batch.feeders.offload import Feeders
from tonari.oracle.feeders import fed_batch
from tonari.report.machine import describe_machine

WAYS = ("none", "again", "auto", "always")
WARM_UP = 6


@dataclass(frozen=True, kw_only=True)
class Kind:
    """Data, and what is done with them.

    Attributes:
        source: As of `dataio.Loader`.
        fields: Likewise.
        transform: Likewise.
        batch: Its rows.
        step_s: For which the loop sleeps.
        times: So many times the batches that are asked for.
        is_shared: Another process takes the feeder's core, too.
    """

    source: Any
    fields: dict[str, dataio.Field]
    transform: Any = None
    batch: int = 64
    step_s: float = 0.0
    times: int = 1
    is_shared: bool = False


def slow(sample: Any, rng: np.random.Generator) -> Any:
    """Take a millisecond for a few bytes."""
    row = sample["row"].astype(np.float32)
    for _ in range(100):
        row = np.sort(np.sin(row))
    return {"row": row}


def spread(sample: Any, rng: np.random.Generator) -> Any:
    """Return four times the bytes of a grid, each of which costs little."""
    return {"grid": np.sqrt(sample["grid"].astype(np.float32))}


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


def turn(name: str, kind: Kind, way: str, scratch: Path, *, num: int) -> dict[str, float]:
    """Measure one way once."""
    feeders = scratch / "feeders" if way in ("auto", "always") else None
    with contextlib.ExitStack() as stack:
        if way == "always":
            for name in ("_pays", "may_send"):
                stack.enter_context(mock.patch.object(Feeders, name, return_value=True))
        loader = stack.enter_context(dataio.Loader(
            kind.source, batch_size=kind.batch, fields=kind.fields, transform=kind.transform,
            cache=scratch / f"cache-{name}", workers=dataio.Workers(threads=1, feeders=feeders),
            reports=dataio.Reports(progress=False),
        ))  # fmt: skip
        there = loader._session.gather.feeders
        while there is not None and not there.num_cores:
            time.sleep(0.1)  # it imports the transform
        batches = (each for _ in loader.epochs(10**6) for each in loader)
        batch_s, cpu_s = taken(batches, num * kind.times, kind.step_s)
        found = {"batch_s": batch_s, "cpu_s": cpu_s} | loader.stats()
        if there is not None:
            here, away = there._made_here, there._made_there
            found["make_s"] = here.cpu_s / max(here.rows, 1)
            found["trade_s"] = away.cpu_s / max(away.rows, 1)
    return found


def study(name: str, kind: Kind, scratch: Path, *, num: int, turns: int) -> None:
    """Print how the ways do on data of a kind."""
    found: dict[str, list[dict[str, float]]] = {way: [] for way in WAYS}
    for number in range(turns):
        at = number % len(WAYS)
        for way in WAYS[at:] + WAYS[:at]:
            found[way].append(turn(name, kind, way, scratch, num=num))

    def median(way: str, what: str) -> float:
        return statistics.median(each[what] for each in found[way])

    def ratio(way: str, better: str) -> float:
        pairs = zip(found[way], found[better], strict=True)
        return round(statistics.median(a["batch_s"] / b["batch_s"] for a, b in pairs), 4)

    better = min("none", "always", key=lambda way: median(way, "batch_s"))
    rows = median("auto", "feeder_rows")
    forecast = fed_batch(
        kind.batch, make_s=median("auto", "make_s"), trade_s=median("auto", "trade_s"), threads=1,
        cores=1,
    )  # fmt: skip
    print(json.dumps({
        "study": name, "batch": kind.batch, "step_s": kind.step_s, "turns": turns,
        **{f"{way}_batch_s": round(median(way, "batch_s"), 5) for way in WAYS},
        **{f"{way}_cpu_s": round(median(way, "cpu_s"), 5) for way in WAYS},
        "better": better, "auto_of_better": ratio("auto", better), "noise": ratio("again", "none"),
        "fed_fraction": round(rows / max(median("auto", "rows"), 1), 3),
        "sent_bytes_per_row": round(median("auto", "feeder_sent_bytes") / max(rows, 1)),
        "received_bytes_per_row": round(median("auto", "feeder_received_bytes") / max(rows, 1)),
        "make_us": round(1e6 * median("auto", "make_s"), 1),
        "trade_us": round(1e6 * median("auto", "trade_s"), 1),
        "lost_parts": median("auto", "feeder_lost_parts"),
        "forecast_batch_s": round(max(forecast.batch_s, kind.step_s), 5),
        "load": round(os.getloadavg()[0], 1),
    }), flush=True)  # fmt: skip


def kinds(scratch: Path) -> dict[str, Kind]:
    """Make the data."""
    large = str(make_pictures(scratch / "large.parquet", 1024, 375, 500))
    small = str(make_pictures(scratch / "small.parquet", 8192, 32, 32))
    cut = dataio.Image("jpg", crop=dataio.RandomResizedCrop(224), flip=0.5)
    rng = np.random.default_rng(0)
    rows = rng.integers(0, 256, (4096, 256), np.uint8)
    grids = rng.integers(0, 256, (1024, 4, 128, 128), np.uint8)
    return {
        "large": Kind(source=large, fields={"image": cut}),
        "hidden": Kind(source=large, fields={"image": cut}, batch=32, step_s=0.15),
        "small": Kind(source=small, fields={"image": dataio.Image("jpg")}, batch=256, times=10),
        "slow": Kind(
            source=dataio.NumpySource({"row": rows}), transform=importable.slow, times=10,
            fields={"row": dataio.Array("row", (256,), "uint8")},
        ),
        "spread": Kind(
            source=dataio.NumpySource({"grid": grids}), transform=importable.spread, times=16,
            fields={"grid": dataio.Array("grid", (4, 128, 128), "uint8")},
        ),
        "shared": Kind(source=large, fields={"image": cut}, is_shared=True),
    }  # fmt: skip


@contextlib.contextmanager
def sharing(core: int) -> Iterator[None]:
    """Have another process take a core, as far as the system lets it."""
    spin = subprocess.Popen(["taskset", "-c", f"{core}", sys.executable, "-c", "while True: pass"])
    try:
        yield
    finally:
        spin.kill()
        spin.wait()


def main() -> None:
    """Print a line for each kind of data."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--batches", type=int, default=16)
    parser.add_argument("--only", nargs="+", metavar="KIND", help="of the data")
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
            for name, kind in kinds(scratch).items():
                if name in (options.only or [name]):
                    with sharing(others[0]) if kind.is_shared else contextlib.nullcontext():
                        study(name, kind, scratch, num=options.batches, turns=options.turns)
        finally:
            feeder.terminate()
            feeder.wait()


if __name__ == "__main__":
    main()
