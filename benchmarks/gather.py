"""How near does the loader come to copying rows, or to decoding them, and nothing else?

Warm, shuffled, one process, batches of 256, positions scattered as by many epochs of exchange. The
limit is one gather from one mapped array into one reused buffer; for JPEG, the decoder alone on as
many threads. Repeats of loader and limit take turns, so that what else the machine does hits both.

    python -m benchmarks.gather --directory /tmp/somewhere [--sets 1KiB 3KiB] [--repeats 25]
"""

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import simplejpeg
from numpy.typing import NDArray

from dataio import Array, Bytes, Field, Image, Int, Loader, Reports, Workers
from dataio.cache.files.store import FixedFile
from dataio.rows.fields import row_schema
from dataio.rows.rows import Rows, make_rows
from dataio.source.row_block import BLOCK_BYTES
from dataio.world import single_world

BATCH = 256
SIDE = 256


class Generated:
    """Rows made from a seed: fixed arrays, bytes or JPEGs beside a label."""

    made_as = "Generated"
    total_bytes = 0

    def __init__(self, name: str, num_samples: int, row_bytes: int) -> None:
        self.name = self.fingerprint = f"{name}-{num_samples}-{row_bytes}"
        self.num_samples = num_samples
        self.shard_starts = np.zeros(1, np.int64)
        self.bytes_read = 0
        self._row_bytes = row_bytes

    def read(self, sample_ids: NDArray[np.int64], fields: Mapping[str, Field]) -> Iterator[Rows]:
        schema = row_schema(fields)
        rng = np.random.Generator(np.random.Philox(key=7))
        jpegs = [_jpeg(rng) for _ in range(32)] if not self._row_bytes else []
        # Blocks as real sources give them: their size decides how the page cache holds the file.
        per_block = max(BLOCK_BYTES // self._row_bytes, 1) if self._row_bytes else 1024
        for ids in np.array_split(sample_ids, -(-len(sample_ids) // per_block)):
            label = (ids % 10).astype("<i8").view(np.uint8).reshape(-1, 8)
            if len(schema.fixed) == 2:
                data = rng.integers(0, 256, (len(ids), self._row_bytes), np.uint8)
                yield make_rows(schema, ids, [data, label], np.zeros((len(ids), 0), np.int64), [])
                continue
            parts = [jpegs[i % 32] if jpegs else rng.bytes(self._row_bytes) for i in ids.tolist()]
            lengths = np.array([[len(part)] for part in parts])
            yield make_rows(
                schema, ids, [label], lengths, [np.frombuffer(b"".join(parts), np.uint8)]
            )


def _jpeg(rng: np.random.Generator) -> bytes:
    coarse = rng.integers(0, 256, (SIDE // 8, SIDE // 8, 3)).astype(np.float32)
    smooth = np.kron(coarse, np.ones((8, 8, 1))) + rng.normal(0, 8, (SIDE, SIDE, 3))
    pixels = np.ascontiguousarray(smooth.clip(0, 255).astype(np.uint8))
    return bytes(simplejpeg.encode_jpeg(pixels, quality=90))


SETS: dict[str, tuple[int, int, Field]] = {
    "1KiB": (200_000, 1 << 10, Array("x", (1 << 10,), "uint8")),
    "3KiB": (50_000, 3 << 10, Array("x", (32, 32, 3), "uint8")),
    "48KiB": (20_000, 48 << 10, Array("x", (128, 128, 3), "uint8")),
    "bytes1KiB": (50_000, 1 << 10, Bytes("x")),
    "jpeg256": (4_000, 0, Image("x", size=SIDE)),
}


def scatter(loader: Loader) -> None:
    """Put the rows of the fixed fields into any order, as many epochs of exchange would."""
    cache = loader._parts.pool.cache
    entries = cache.entries
    place = np.random.Generator(np.random.Philox(key=3)).permutation(cache.num_slots)
    for file in cache.fixed:
        file.rows[place] = file.rows[entries.position[:]]
    entries.position.put(np.arange(cache.num_slots), place)
    cache.rewrite(entries, epoch=cache.epoch, placement=cache.placement)
    cache.load()


def gather_limit(rows: NDArray[np.uint8]) -> Callable[[], int]:
    """Copy random rows into one reused buffer."""
    order = np.random.Generator(np.random.Philox(key=5)).permutation(len(rows))
    batches = order[: len(order) // BATCH * BATCH].reshape(-1, BATCH)
    out = np.empty((BATCH, rows.shape[1]), np.uint8)

    def run() -> int:
        for batch in batches:
            np.take(rows, batch, axis=0, out=out, mode="clip")
        return int(batches.size)

    return run


def decoder_limit(loader: Loader, num_threads: int) -> Callable[[], int]:
    """Decode every row's JPEG into reused buffers, on as many threads, and nothing else."""
    slots = np.arange(loader._parts.pool.cache.num_slots)
    images = [row[0].data for row in loader._parts.pool.cache.variable_fields(slots)]
    threads = ThreadPoolExecutor(num_threads)

    def decode(part: list[memoryview]) -> None:
        out = np.empty((BATCH, SIDE, SIDE, 3), np.uint8)
        for number, image in enumerate(part):
            simplejpeg.decode_jpeg(image, "RGB", buffer=out[number % BATCH])

    def run() -> int:
        list(threads.map(decode, (images[i::num_threads] for i in range(num_threads))))
        return len(images)

    return run


def bytes_limit(loader: Loader) -> Callable[[], int]:
    """Copy every row's bytes out of the heap."""
    rows = [row[0].data for row in loader._parts.pool.cache.variable_fields(np.arange(50_000))]

    def run() -> int:
        for first in range(0, len(rows), BATCH):
            [row.tobytes() for row in rows[first : first + BATCH]]
        return len(rows)

    return run


def one_epoch(loader: Loader) -> int:
    """Go over an epoch and look at nothing."""
    loader.set_epoch(0)  # the same again, without a turn
    num_rows = 0
    for batch in loader:
        num_rows += len(batch["label"])
    return num_rows


def rate(run: Callable[[], int]) -> float:
    """Rows a second."""
    started = time.perf_counter()
    num_rows = run()
    return num_rows / (time.perf_counter() - started)


def measure(name: str, directory: Path, repeats: int, num_threads: int) -> dict[str, object]:
    """Compare the loader with its limit on one set."""
    num_samples, row_bytes, field = SETS[name]
    with Loader(
        Generated(name, num_samples, row_bytes),
        batch_size=BATCH,
        fields={"x": field, "label": Int("label")},
        cache=directory,
        world=single_world(),
        workers=Workers(threads=num_threads),
        reports=Reports(progress=False),
    ) as loader:
        scatter(loader)
        if isinstance(field, Image):
            limit = decoder_limit(loader, num_threads)
        elif isinstance(field, Bytes):
            limit = bytes_limit(loader)
        else:
            limit = gather_limit(
                _plain(loader._parts.pool.cache.fixed[0], directory / f"{name}.npy")
            )
        one_epoch(loader), limit()
        pairs = [(rate(lambda: one_epoch(loader)), rate(limit)) for _ in range(repeats)]
    ratios = [ours / best for ours, best in pairs]
    return {
        "question": "gather",
        "set": name,
        "repeats": repeats,
        "num_threads": num_threads,
        "samples_per_s": round(statistics.median(ours for ours, _ in pairs)),
        "limit_samples_per_s": round(statistics.median(best for _, best in pairs)),
        "ratio_to_limit": round(statistics.median(ratios), 3),
        "ratio_p10": round(float(np.quantile(ratios, 0.1)), 3),
        "ratio_p90": round(float(np.quantile(ratios, 0.9)), 3),
    }


def _plain(file: FixedFile, path: Path) -> NDArray[np.uint8]:
    """The same rows in a file of the limit's own, mapped."""
    np.save(path, file.rows)
    return np.load(path, mmap_mode="r").view(np.ndarray)  # type: ignore[no-any-return]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--sets", nargs="+", choices=sorted(SETS), default=sorted(SETS))
    parser.add_argument("--directory", default=tempfile.gettempdir())
    parser.add_argument("--repeats", type=int, default=25)
    parser.add_argument("--num-threads", type=int, default=2)
    chosen = parser.parse_args()
    for name in chosen.sets:
        with tempfile.TemporaryDirectory(dir=chosen.directory) as directory:
            line = measure(name, Path(directory), chosen.repeats, chosen.num_threads)
            print(json.dumps(line), flush=True)


if __name__ == "__main__":
    main()
