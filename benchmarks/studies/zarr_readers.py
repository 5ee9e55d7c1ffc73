"""Would another reader of Zarr stage faster than zarr-python, as we use it?

``ours`` is what `dataio.ArrayFiles` and `dataio.Anemoi` read by without tensorstore: zarr-python
over our own storage; ``extra`` is what they read by with it, over the same storage. ``zarr`` is
zarr-python over its own local store, ``zarrs`` that with the codec pipeline of the package of that
name, ``tensorstore`` the package of that name. Each reads the same boxes of the same store, one
after the other: ``dates`` are two dates of anemoi's layout, a chunk each; ``boxes``
have the length of a chunk along each axis, and begin anywhere. Chunks are compressed by Blosc or
Zstandard and lie in the page cache. The readers take turns; ratios are of ``ours`` to another
within a turn, so above 1 the other is faster. Given are the median and the quarters about it;
``cpu`` is the time of all threads, which says more where a reader has several. What each reads is
compared. Readers that are not installed are left out.

    pip install zarrs tensorstore
    OMP_NUM_THREADS=1 python -m benchmarks.studies.zarr_readers [--repeats 9] [--megabytes 256]
"""

import argparse
import contextlib
import importlib.metadata
import importlib.util
import json
import os
import statistics
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import numpy as np
import zarr
from numcodecs import Blosc, Zstd
from numpy.typing import NDArray

from dataio.source.formats.grids.zarr import ZarrFormat
from dataio.source.storage.files import Storage
from tonari.report.machine import describe_machine

Box = tuple[slice, ...]
Read = Callable[[Box], NDArray[np.float32]]
CODECS = {"blosc": Blosc("lz4"), "zstd": Zstd(1)}
LAYOUTS = {"dates": ((20, 1, 5000), (1, 20, 1, 5000), (2, 20, 1, 5000)),
           "boxes": ((128, 256), (8, 64, 64), (8, 64, 64))}  # fmt: skip
"""Shape behind the time axis; a chunk; a box."""


def write(path: Path, codec: str, layout: str, num_bytes: int) -> None:
    """Write a store of smooth fields with some noise, which compress as weather does."""
    shape, chunks, _ = LAYOUTS[layout]
    times = max(num_bytes // (4 * int(np.prod(shape))), chunks[0])
    rng = np.random.default_rng(0)
    group = zarr.open_group(path, mode="w", zarr_format=2)
    array = group.create_array(
        "data", shape=(times, *shape), chunks=chunks, dtype="float32", compressors=CODECS[codec]
    )
    waves = np.sin(np.arange(np.prod(shape)) / 50).reshape(shape)
    for at in range(0, times, chunks[0]):
        noise = rng.integers(-8, 8, (chunks[0], *shape)) / 64
        array[at : at + chunks[0]] = (waves + noise).astype(np.float32)[: times - at]


def choose(path: Path, layout: str) -> list[Box]:
    """Choose as many boxes as hold the array once."""
    box: tuple[int, ...] = LAYOUTS[layout][2]
    shape = zarr.open_array(path / "data", mode="r").shape
    rng = np.random.default_rng(1)
    count = int(np.prod(shape) // np.prod(box))
    lows = rng.integers(0, np.subtract(shape, box) + 1, (count, len(box))).tolist()
    return [tuple(slice(a, a + n) for a, n in zip(low, box, strict=True)) for low in lows]


@contextlib.contextmanager
def ours(path: Path, *, extra: bool = False) -> Iterator[Read]:
    """Open a store as the loader does."""
    with ZarrFormat().opened(Storage(), str(path)) as file:
        if not extra:
            file.chunks._opened["data"] = None  # as where tensorstore is not installed
        yield lambda box: file.read("data", box).astype(np.float32, copy=False)


@contextlib.contextmanager
def by_zarr(path: Path, **config: object) -> Iterator[Read]:
    """Open a store by zarr-python alone."""
    with zarr.config.set(config):
        array: Any = zarr.open_group(path, mode="r")["data"]
        yield lambda box: array[box]


@contextlib.contextmanager
def by_tensorstore(path: Path) -> Iterator[Read]:
    """Open a store by tensorstore."""
    import tensorstore

    where = {"driver": "file", "path": f"{path}/data/"}
    array = tensorstore.open({"driver": "zarr", "kvstore": where}).result()
    yield lambda box: array[box].read().result()


def readers() -> dict[str, Callable[[Path], AbstractContextManager[Read]]]:
    """List the readers that are installed."""
    pipeline = {"codec_pipeline.path": "zarrs.ZarrsCodecPipeline", "codec_pipeline.strict": True}
    found = {"ours": ours, "zarr": by_zarr, "zarrs": lambda path: by_zarr(path, **pipeline),
             "tensorstore": by_tensorstore,
             "extra": lambda path: ours(path, extra=True)}  # fmt: skip
    needs = {"zarrs": "zarrs", "tensorstore": "tensorstore", "extra": "tensorstore"}
    return {n: its for n, its in found.items() if importlib.util.find_spec(needs.get(n, "zarr"))}


def take_turn(opened: dict[str, Read], boxes: list[Box]) -> dict[str, tuple[float, float]]:
    """Let each reader read all boxes: seconds, and those of the processor."""
    took, sums = {}, set()
    for name, read in opened.items():
        began, cpu_s = time.perf_counter(), time.process_time()
        total = sum(int(read(box).view(np.uint32).sum(dtype=np.uint64)) for box in boxes)
        took[name] = time.perf_counter() - began, time.process_time() - cpu_s
        sums.add(total)
    if len(sums) != 1:
        raise SystemExit(f"the readers read other values: {sums}")
    return took


def compare(path: Path, boxes: list[Box], repeats: int) -> dict[str, object]:
    """Let the readers take turns over a store."""
    ratios = defaultdict(list)
    with contextlib.ExitStack() as stack:
        opened = {name: stack.enter_context(its(path)) for name, its in readers().items()}
        for number in range(repeats + 1):
            took = take_turn(opened, boxes)
            for name in took if number else ():  # the first turn warms up
                for at, what in enumerate(("time", "cpu")):
                    ratios[f"{name} {what}"].append(took["ours"][at] / took[name][at])
                ratios["ours bytes_per_s"].append(
                    4 * sum(np.prod([s.stop - s.start for s in b]) for b in boxes) / took["ours"][0]
                )
    return {
        name: [float(f"{each:.3g}") for each in statistics.quantiles(values, n=4)]
        for name, values in ratios.items() if name not in ("ours time", "ours cpu")
    }  # fmt: skip


def main() -> None:
    """Print one line of JSON for each codec and layout."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--megabytes", type=int, default=256)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        for codec in CODECS:
            for layout in LAYOUTS:
                path = Path(scratch) / f"{codec}-{layout}.zarr"
                write(path, codec, layout, args.megabytes * 10**6)
                stored = sum(file.stat().st_size for file in (path / "data").iterdir())
                figures = compare(path, choose(path, layout), args.repeats)
                print(json.dumps({
                    "question": "readers of Zarr", "codec": codec, "layout": layout,
                    "repeats": args.repeats, "megabytes": args.megabytes, "stored_bytes": stored,
                    "load": os.getloadavg()[0], **figures,
                    "readers": {n: importlib.metadata.version(n)
                                for n in readers() if n not in ("ours", "extra")},
                    **describe_machine(Path(scratch)),
                }), flush=True)  # fmt: skip


if __name__ == "__main__":
    main()
