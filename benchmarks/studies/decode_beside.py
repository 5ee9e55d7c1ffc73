r"""What do a loader's threads cost the loop beside them, and how fast do they decode?

A loop that launches kernels holds Python's lock for most of its time, and so may threads that
decode. The loop here adds numbers of one element, which costs a launch and no more. It has a core
of its own; the loader's threads have the others, and are never idle: a batch is taken, off the
clock, as soon as there is one. So what the loop loses, it loses to the lock, and to all else that
cores share: ``long calls`` shows that alone. What taking a picture costs the loop's own thread is
shown beside it.

Ways take turns within one process:

- alone: no loader
- long calls: a thread that does the loader's work in calls of a second, without the lock
- bare: a thread that calls simplejpeg's decoder for one picture after another
- one by one: the loader, without the compiled part
- at once: the loader

    python -m benchmarks.studies.decode_beside [--parquet FILE] [--turns 7]

FILE has a column ``jpg``; without it, pictures are made up.
"""

import argparse
import os
import statistics
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from itertools import cycle, product
from pathlib import Path
from unittest import mock

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import simplejpeg
import torch

import dataio
from dataio.base.seeding import key
from dataio.rows import at_once
from tonari.report.machine import describe_machine

NUM_SMALL, NUM_LARGE, BATCH = 4096, 512, 64
SLICE = 400
"""Additions between two looks at the clock: about a millisecond."""
TURN_S = 1.5

Take = Callable[[], int]
"""Takes what there is, and counts pictures."""
Beside = Callable[[bool], AbstractContextManager[Take]]
"""Has something work, beside the loop or alone."""
Found = dict[str, list[float]]


def make_pictures(path: Path, num: int, height: int, width: int) -> Path:
    """Write JPEGs with detail in every block to a Parquet file."""
    rng = np.random.default_rng(0)
    pictures = []
    for _ in range(num):
        coarse = rng.integers(0, 256, (height // 8 + 1, width // 8 + 1, 3), np.uint8)
        pixels = coarse.repeat(8, 0).repeat(8, 1)[:height, :width] // 2
        pixels = pixels + rng.integers(0, 64, pixels.shape, np.uint8)
        pictures.append(simplejpeg.encode_jpeg(np.ascontiguousarray(pixels), quality=90))
    pq.write_table(pa.table({"jpg": pictures}), path)
    return path


@contextmanager
def pinned(is_pinned: bool) -> Iterator[Callable[[], None]]:
    """Have threads that begin here on all cores but the first, and the caller, once called, on it.

    Not where ``is_pinned`` is false.
    """
    cores = os.sched_getaffinity(0)
    if not is_pinned:
        yield lambda: None
        return
    os.sched_setaffinity(0, cores - {min(cores)} or cores)
    try:
        yield lambda: os.sched_setaffinity(0, {min(cores)})
    finally:
        os.sched_setaffinity(0, cores)


@contextmanager
def loading(
    path: Path, cache: Path, field: dataio.Image, threads: int, *, compiled: bool, beside: bool
) -> Iterator[Take]:
    """Have a loader's threads work, beside a loop on the first core or alone."""
    library = (
        nullcontext() if compiled else mock.patch.object(at_once, "library", return_value=None)
    )
    with (
        library,
        pinned(beside) as pin,
        dataio.Loader(
            str(path), batch_size=BATCH, fields={"image": field}, cache=cache,
            workers=dataio.Workers(threads=threads, prefetch=16),
            reports=dataio.Reports(progress=False),
        ) as loader,
    ):  # fmt: skip
        batches = (batch for _ in loader.epochs(1_000_000) for batch in loader)
        for _ in range(8):
            next(batches)
        taken, num_batches = 8, len(loader)
        pin()

        def take() -> int:
            nonlocal taken
            # The first batch of an epoch is not begun before it is asked for.
            if beside and taken % num_batches and not loader._session.gather.ready:
                return 0
            taken += 1
            return len(next(batches)["image"])

        yield take


@contextmanager
def thread_of(work: Callable[[], int], *, beside: bool) -> Iterator[Take]:
    """Have a thread work, beside a loop on the first core or alone."""
    done, ended, lock = [0], threading.Event(), threading.Lock()

    def run() -> None:
        while not ended.is_set():
            num = work()
            with lock:
                done[0] += num

    def take() -> int:
        if not beside:
            time.sleep(TURN_S / 50)
        with lock:
            found, done[0] = done[0], 0
        return found

    thread = threading.Thread(target=run)
    with pinned(beside) as pin:
        thread.start()
        pin()
        try:
            yield take
        finally:
            ended.set()
            thread.join()


def turn(take: Take, *, beside: bool = True) -> tuple[float, float, float]:
    """Take batches for a while, beside the loop or not.

    Returns:
        Seconds of a slice, pictures a second, and what taking a picture took of this thread, in us.
    """
    one, sum_ = torch.ones(1), torch.zeros(1)
    spent, taking, slices, pictures, began = 0.0, 0.0, 0, 0, time.perf_counter()
    while time.perf_counter() - began < TURN_S:
        started = time.perf_counter()
        for _ in range(SLICE if beside else 0):
            sum_.add_(one)
        spent += time.perf_counter() - started
        slices += 1
        started = time.thread_time()
        pictures += take()
        taking += time.thread_time() - started
    return spent / slices, pictures / (time.perf_counter() - began), 1e6 * taking / max(pictures, 1)


def bare(path: Path) -> Callable[[], int]:
    """Decode pictures one after another, whole, into the same memory."""
    pictures = pq.read_table(path)["jpg"].to_pylist()
    height, width, *_ = simplejpeg.decode_jpeg_header(pictures[0])
    out, numbers = np.empty((height, width, 3), np.uint8), cycle(range(0, len(pictures), 32))

    def decode() -> int:
        first = next(numbers)
        for one in pictures[first : first + 32]:
            simplejpeg.decode_jpeg(one, buffer=out)
        return len(pictures[first : first + 32])

    return decode


def long_calls(path: Path, kind: dataio.Image) -> Callable[[], int]:
    """Deliver pictures as the loader does, but for a second in each call: without the lock."""
    pictures = [np.frombuffer(one, np.uint8) for one in pq.read_table(path)["jpg"].to_pylist()]
    pictures = pictures[:NUM_LARGE] * (1 if len(pictures[0]) > 10_000 else 40)
    out_size = kind.out or simplejpeg.decode_jpeg_header(pictures[0])[:2]
    at_once_of_kind = at_once.PicturesAtOnce(kind, out_size)
    addresses = np.array([one.ctypes.data for one in pictures], np.uint64)
    lengths = np.array([len(one) for one in pictures])
    drawn = key(0, "pictures"), np.arange(len(pictures))
    out = np.empty((len(pictures), *out_size, kind.channels), np.uint8)
    states = np.zeros(len(pictures), np.uint8)

    def deliver() -> int:
        at_once_of_kind.deliver(at_once_of_kind.call(addresses, lengths, drawn, out, states))
        return len(pictures)

    return deliver


def study(name: str, path: Path, scratch: Path, field: dataio.Image, turns: int) -> None:
    """Print how all ways do on some pictures."""
    ways: dict[str, Beside] = {
        "alone": lambda beside: nullcontext(lambda: 0),
        "long calls": lambda beside: thread_of(long_calls(path, field), beside=beside),
        "bare": lambda beside: thread_of(bare(path), beside=beside),
    }
    for compiled, threads in product((False, True), (1, 2)):
        words = f"{'at once' if compiled else 'one by one'}, {threads} thread{'s' * (threads - 1)}"
        ways[words] = lambda beside, threads=threads, compiled=compiled: loading(  # type: ignore[misc]
            path, scratch / f"cache-{name}", field, threads, compiled=compiled, beside=beside
        )
    slices: Found = {way: [] for way in ways}
    rates: Found = {way: [] for way in ways}
    alone: Found = {way: [] for way in ways}
    taking: Found = {way: [] for way in ways}
    for _ in range(turns):
        for way, begin in ways.items():
            with begin(True) as take:
                seconds, per_second, taking_us = turn(take)
            slices[way].append(seconds)
            rates[way].append(per_second)
            taking[way].append(taking_us)
            if way not in ("alone", "long calls"):
                with begin(False) as take:
                    alone[way].append(turn(take, beside=False)[1])
    print(f"\n{name}: {field}")
    print(
        f"{'':24}{'the loop takes':>16}{'pictures/s':>12}{'us to take':>12}{'without it':>12}"
        f"{'of bare':>9}"
    )
    for way in ways:
        ratio = _median_ratio(slices[way], slices["alone"])
        line = f"{way:24}{ratio:16.3f}{statistics.median(rates[way]):12,.0f}"
        line += f"{statistics.median(taking[way]):12.2f}"
        if alone[way]:
            of_bare = _median_ratio(alone[way], alone["bare"])
            line += f"{statistics.median(alone[way]):12,.0f}{of_bare:9.2f}"
        print(line, flush=True)


def _median_ratio(some: list[float], others: list[float]) -> float:
    return statistics.median(one / other for one, other in zip(some, others, strict=True))


def main() -> None:
    """Print a table for small pictures, and one for large ones."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--parquet", type=Path, help="small pictures, in a column jpg")
    parser.add_argument("--turns", type=int, default=7)
    parser.add_argument("--only", help="one of small, kept, whole, large; default: all")
    options = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory(prefix="tonari-study-") as directory:
        scratch = Path(directory)
        print(describe_machine(scratch))
        small = options.parquet or make_pictures(scratch / "small.parquet", NUM_SMALL, 32, 32)
        large = make_pictures(scratch / "large.parquet", NUM_LARGE, 375, 500)
        crop, cut = dataio.RandomCrop(32, padding=4), dataio.RandomResizedCrop(224)
        for name, path, field in (
            ("small", small, dataio.Image("jpg", crop=crop, flip=0.5)),
            ("kept", small, dataio.Image("jpg", crop=crop, flip=0.5, decoded="auto")),
            ("whole", small, dataio.Image("jpg")),
            ("large", large, dataio.Image("jpg", crop=cut, flip=0.5)),
        ):
            if options.only in (None, name):
                study(name, path, scratch, field, options.turns)


if __name__ == "__main__":
    main()
