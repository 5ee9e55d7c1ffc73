"""How long does the first start of a loader take beside the file system's own read?

Tar shards of random bytes, each sample ``jpg`` of half to one and a half times the nominal size and
``cls`` of some digits, without any index. Ways, one after the other in each repeat, so that what
else the machine does meets all of them:

- ``read``: every shard from its beginning to its end into one buffer of 1 MiB;
- ``copy``: every shard into a file beside the cache, and flushed to the disk;
- ``webdataset``: the library of that name reads every sample, and keeps none;
- ``count``: `open_source`, which counts the samples of all shards;
- ``first_start``: a `Loader` on an empty cache, until all rows are staged, flushed and committed.

Before each, the page cache lets go of the shards (``cold``), or has just read them (``warm``).

    python -m benchmarks.studies.first_start --directory SCRATCH [--sizes 100000]
"""

import argparse
import io
import json
import os
import resource
import shutil
import statistics
import tarfile
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np

from dataio import Bytes, Field, Int, Loader, Reports, Workers, open_source
from tonari.report.machine import describe_machine

FIELDS: dict[str, Field] = {"image": Bytes("jpg"), "label": Int("cls")}
NUM_SHARDS = 8
BUFFER_BYTES = 1 << 20


def write_shards(directory: Path, *, sample_bytes: int, total_bytes: int) -> list[Path]:
    """Write shards of samples of about ``sample_bytes``, from a seed."""
    rng = np.random.default_rng(sample_bytes)
    numbers = np.array_split(np.arange(total_bytes // sample_bytes), NUM_SHARDS)
    paths = [directory / f"{shard:03d}.tar" for shard in range(NUM_SHARDS)]
    directory.mkdir()
    for path, mine in zip(paths, numbers, strict=True):
        with tarfile.open(path, "w") as tar:
            for number in mine.tolist():
                image = rng.bytes(int(sample_bytes * rng.uniform(0.5, 1.5)))
                for name, data in (("jpg", image), ("cls", b"%d" % (number % 1000))):
                    info = tarfile.TarInfo(f"{number:08d}.{name}")
                    info.size = len(data)
                    tar.addfile(info, io.BytesIO(data))
    return paths


def let_go(paths: list[Path]) -> None:
    """Have the page cache let go of files."""
    os.sync()
    for path in paths:
        with open(path, "rb") as file:
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def read(paths: list[Path]) -> None:
    """Read files as `cat` does."""
    buffer = bytearray(BUFFER_BYTES)
    for path in paths:
        with open(path, "rb", buffering=0) as file:
            while file.readinto(buffer):
                pass


def copy(paths: list[Path], into: Path) -> None:
    """Copy files and wait for the disk."""
    into.mkdir()
    for path in paths:
        shutil.copyfile(path, into / path.name)
        with open(into / path.name, "r+b") as file:
            os.fdatasync(file.fileno())


def read_by_webdataset(paths: list[Path]) -> None:
    """Iterate once over a `WebDataset`."""
    import webdataset

    for _ in webdataset.WebDataset([str(path) for path in paths], shardshuffle=False):
        pass


def start(directory: Path, cache: Path) -> float:
    """Open a loader on an empty cache; returns the bytes that it read of the source."""
    with Loader(
        directory,
        batch_size=1,
        fields=FIELDS,
        cache=cache,
        workers=Workers(threads=0),
        reports=Reports(progress=False),
    ) as loader:
        return float(loader.stats()["source_bytes"])


def cpu_s() -> float:
    """Seconds of processor time of this process."""
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


def measure(place: Path, paths: list[Path], *, repeats: int) -> dict[str, object]:
    """Run all ways in turn; medians of bytes/s, processor seconds a GB and ratios to ``read``."""
    shards, into = paths[0].parent, place / "written"
    total_bytes = sum(path.stat().st_size for path in paths)
    bytes_read = 0.0

    def first_start() -> None:
        nonlocal bytes_read
        bytes_read = start(shards, into)

    ways: dict[str, Callable[[], object]] = {
        "read": lambda: read(paths),
        "copy": lambda: copy(paths, into),
        "webdataset": lambda: read_by_webdataset(paths),
        "count": lambda: open_source(shards),
        "first_start": first_start,
    }
    rates: dict[str, list[float]] = {f"{w}_{t}": [] for t in ("cold", "warm") for w in ways}
    used: dict[str, list[float]] = {name: [] for name in rates}
    first_start()
    shutil.rmtree(into)
    for _ in range(repeats):
        for name in rates:
            way, _, temperature = name.rpartition("_")
            let_go(paths)
            if temperature == "warm":
                read(paths)
            started, cpu = time.perf_counter(), cpu_s()
            ways[way]()
            rates[name].append(total_bytes / (time.perf_counter() - started))
            used[name].append((cpu_s() - cpu) / total_bytes * 1e9)
            shutil.rmtree(into, ignore_errors=True)
    figures: dict[str, object] = {"source_bytes_fraction": bytes_read / total_bytes}
    for name, values in rates.items():
        base = rates[f"read_{name.rpartition('_')[2]}"]
        figures[name] = {
            "bytes_per_s": statistics.median(values),
            "p10_bytes_per_s": float(np.percentile(values, 10)),
            "p90_bytes_per_s": float(np.percentile(values, 90)),
            "cpu_s_per_gb": statistics.median(used[name]),
            "ratio_to_read": statistics.median(a / b for a, b in zip(values, base, strict=True)),
        }
    return figures


def main() -> None:
    """Print one line of JSON for each size."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--directory", type=Path, default=Path(tempfile.gettempdir()))
    parser.add_argument("--sizes", type=int, nargs="+", default=[10_000, 100_000, 1_000_000])
    parser.add_argument("--total-bytes", type=int, default=512 << 20)
    parser.add_argument("--repeats", type=int, default=5)
    args = parser.parse_args()
    for sample_bytes in args.sizes:
        with tempfile.TemporaryDirectory(dir=args.directory) as name:
            place = Path(name)
            paths = write_shards(
                place / "shards", sample_bytes=sample_bytes, total_bytes=args.total_bytes
            )
            line = {
                "question": "first start of tar shards without an index",
                "sample_bytes": sample_bytes,
                "total_bytes": args.total_bytes,
                "repeats": args.repeats,
                **measure(place, paths, repeats=args.repeats),
                **describe_machine(args.directory),
            }
            print(json.dumps(line), flush=True)


if __name__ == "__main__":
    main()
