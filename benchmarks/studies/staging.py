"""How much faster than webdataset's iteration is staging a tar, how near the file-read limit?

Every repeat runs all ways one after the other on the same shards, which webdataset's own writer
wrote: the shards lie in the page cache (warm), the node's cache is new each time.

- ``webdataset``: ``WebDataset(urls, shardshuffle=False)`` iterated raw, in this process.
- ``file_read``: the shards' bytes by sequential reads of 4 MiB, the limit.
- ``staging``: counting the samples and filling a new pool, as the loader does at a first start.
  ``rows`` is its part from the source's bytes to the cache's files, without counting, flushing to
  disk and the manifest.
"""

import argparse
import json
import os
import platform
import shutil
import statistics
import subprocess
import tempfile
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from importlib.metadata import version
from pathlib import Path

import numpy as np

from dataio import Array, Bytes, Int
from dataio.plan.placement import Placement
from dataio.pool.pool import Pool
from dataio.rows.fields import Field
from dataio.source import open_source
from dataio.world import single_world

READ_BYTES = 4 << 20
SHARDS = 4
SETS = {"1KiB": (1 << 10, 200_000), "100KiB": (100 << 10, 5_000)}
"""For each set the bytes of a sample and how many there are."""


def main(arguments: Sequence[str] | None = None) -> None:
    options = _options(arguments)
    with tempfile.TemporaryDirectory(dir=options.directory) as name:
        for chosen in options.sets:
            sample_bytes, num_samples = SETS[chosen]
            num_samples = options.samples or num_samples
            urls = _write(Path(name) / chosen, sample_bytes, num_samples)
            for stored in ("array", "bytes"):
                record = _measure(
                    urls, Path(name), sample_bytes, num_samples, stored, options.repeats
                )
                record = {"set": chosen, **record}
                print(json.dumps(record) if options.json else _shown(record), flush=True)
            shutil.rmtree(Path(name) / chosen)


def _options(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.studies.staging", description=__doc__
    )
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--json", action="store_true", help="one JSON line for each set and form")
    parser.add_argument("--sets", nargs="+", choices=SETS, default=list(SETS))
    parser.add_argument("--samples", type=int, help="samples of each set, instead of its own")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--directory", type=Path, help="where shards and caches go for a while")
    return parser.parse_args(arguments)


def _write(directory: Path, sample_bytes: int, num_samples: int) -> list[str]:
    """Write the shards by webdataset's writer, from a fixed seed."""
    import webdataset

    directory.mkdir()
    rng = np.random.default_rng(0)
    urls = [str(directory / f"{shard}.tar") for shard in range(SHARDS)]
    for shard, numbers in enumerate(np.array_split(np.arange(num_samples), SHARDS)):
        with webdataset.TarWriter(urls[shard], encoder=False) as writer:
            for number in numbers.tolist():
                label = b"%d" % (number % 1000)
                writer.write(
                    {"__key__": f"{number:08d}", "bin": rng.bytes(sample_bytes), "cls": label}
                )
    return urls


def _measure(
    urls: list[str],
    root: Path,
    sample_bytes: int,
    num_samples: int,
    stored: str,
    repeats: int,
) -> dict[str, object]:
    data: Field = Bytes("bin")
    if stored == "array":
        data = Array("bin", (sample_bytes,), "uint8")
    fields: dict[str, Field] = {"data": data, "label": Int("cls")}
    cache_bytes: list[int] = []

    def staging() -> dict[str, float]:
        seconds, held_bytes = _stage(urls, fields, root / "cache", num_samples)
        cache_bytes.append(held_bytes)
        return seconds

    ways: list[Callable[[], dict[str, float]]] = [
        lambda: {"file_read": _seconds(lambda: _read_files(urls))},
        lambda: {"webdataset": _seconds(lambda: _iterate(urls, num_samples))},
        staging,
    ]
    for way in ways:
        way()
    found: list[dict[str, float]] = []
    for _ in range(repeats):
        found.append({name: s for way in ways for name, s in way().items()})
    payload_bytes = num_samples * (sample_bytes + 8)
    shard_bytes = sum(Path(url).stat().st_size for url in urls)
    ratios = {
        "speedup_over_webdataset": [run["webdataset"] / run["staging"] for run in found],
        "rows_speedup_over_webdataset": [run["webdataset"] / run["rows"] for run in found],
        "rows_fraction_of_file_read": [run["file_read"] / run["rows"] for run in found],
        "staging_fraction_of_file_read": [run["file_read"] / run["staging"] for run in found],
    }
    return {
        "question": (__doc__ or "").split("\n")[0],
        "stored": stored,
        "num_samples": num_samples,
        "sample_bytes": sample_bytes,
        "num_shards": len(urls),
        "page_cache": "warm",
        "repeats": repeats,
        "world_size": 1,
        **{f"{name}_s": _spread([run[name] for run in found]) for name in found[0]},
        **{name: _spread(values) for name, values in ratios.items()},
        "samples_per_s": round(num_samples / statistics.median(r["staging"] for r in found)),
        "read_bytes_per_s": round(shard_bytes / statistics.median(r["staging"] for r in found)),
        "cache_fraction_of_payload": round(cache_bytes[-1] / payload_bytes, 4),
        "shards_fraction_of_payload": round(shard_bytes / payload_bytes, 4),
        **_machine(),
    }


def _stage(
    urls: list[str], fields: Mapping[str, Field], root: Path, num_samples: int
) -> tuple[dict[str, float], int]:
    """Stage into a new cache: seconds in all and of the rows alone, and bytes on disk."""
    world = single_world()
    started = time.perf_counter()
    source = open_source(urls, world=world)
    assert source.num_samples == num_samples, "the shards hold what was written"
    pool = Pool(
        source, fields, world=world, root=root, num_slots=num_samples, num_leaving=0, progress=False
    )
    pool.ensure(Placement("all", 0, num_samples, lambda: np.arange(num_samples)))
    seconds = {"staging": time.perf_counter() - started, "rows": pool.staging_s}
    assert pool.cache.entries.present.all(), "every row is there"
    pool.close()
    held_bytes = sum(path.stat().st_blocks * 512 for path in root.rglob("*") if path.is_file())
    shutil.rmtree(root)
    return seconds, held_bytes


def _read_files(urls: Sequence[str]) -> None:
    for url in urls:
        descriptor = os.open(url, os.O_RDONLY)
        offset = 0
        while data := os.pread(descriptor, READ_BYTES, offset):
            offset += len(data)
        os.close(descriptor)


def _iterate(urls: Sequence[str], num_samples: int) -> None:
    import webdataset

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        found = sum(1 for _ in webdataset.WebDataset(list(urls), shardshuffle=False))
    assert found == num_samples, "webdataset sees every sample"


def _seconds(work: Callable[[], None]) -> float:
    started = time.perf_counter()
    work()
    return time.perf_counter() - started


def _spread(values: Sequence[float]) -> dict[str, float]:
    low, middle, high = np.percentile(values, [10, 50, 90]).tolist()
    return {"median": round(middle, 4), "p10": round(low, 4), "p90": round(high, 4)}


def _machine() -> dict[str, object]:
    commit = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"],
        cwd=Path(__file__).parent,
        capture_output=True,
        text=True,
        check=False,
    ).stdout.strip()
    return {
        "commit": commit or "unknown",
        "date": time.strftime("%Y-%m-%d"),
        "machine": f"{platform.machine()}, {os.cpu_count()} cores, {platform.release()}",
        "versions": {
            "python": platform.python_version(),
            **{name: version(name) for name in ("numpy", "webdataset", "xxhash")},
        },
    }


def _shown(record: Mapping[str, object]) -> str:
    lines = [f"{record['set']}, kept as {record['stored']}, {record['num_samples']} samples:"]
    for name, value in record.items():
        if isinstance(value, dict) and "median" in value:
            spread = f"(p10 {value['p10']}, p90 {value['p90']})"
            lines.append(f"  {name:34} {value['median']:>10} {spread}")
    lines.append(f"  {'cache_fraction_of_payload':34} {record['cache_fraction_of_payload']:>10}")
    return "\n".join(lines)


if __name__ == "__main__":
    main()
