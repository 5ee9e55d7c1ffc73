"""How long does a rank take to open a cache of very many rows, and to move about in it?

The manifest is written by the cache's own code, with samples in scattered slots as after many
epochs of exchange; the rows themselves are a hole in a file, so that only the index costs anything.
One rank; ranks of a node map the same pages. Rebuilding a placement is apart: it is needed when a
checkpoint is older than the cache, grows with the node's rows, and is printed in seconds for a
million rows moved by one epoch.

    python -m benchmarks.studies.large_index --directory /tmp/somewhere [--rows 100000000]
"""

import argparse
import json
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from unittest.mock import patch

import numpy as np
import xxhash
from numpy.typing import NDArray

import shuffle
from dataio import Field, Int, Loader, Reports, Workers
from dataio.plan.layout import Layout
from dataio.rows.rows import Rows, bind_checksums
from dataio.store.files.manifest import make_entries
from dataio.store.pool import Pool
from dataio.world import single_world
from tonari.report.machine import describe_machine

BATCH = 256
PLACED = 1_000_000
FIELDS: dict[str, Field] = {"label": Int("cls")}
SCATTER = 2654435761
"""A prime larger than any pool here: multiplying by it gives every slot another sample."""


class Counted:
    """A source that is only counted: nothing is ever read of it."""

    made_as = "Counted"
    total_bytes = 0

    def __init__(self, num_samples: int) -> None:
        self.name = self.fingerprint = f"counted-{num_samples}"
        self.num_samples = num_samples
        self.shard_starts = np.zeros(1, np.int64)
        self.bytes_read = 0

    def read(self, sample_ids: NDArray[np.int64], fields: Mapping[str, Field]) -> Iterator[Rows]:
        """Refuse."""
        raise AssertionError("the cache holds every row")


def open_loader(num_rows: int, directory: Path) -> Loader:
    """Open the cache as a job would."""
    return Loader(
        Counted(num_rows),
        batch_size=BATCH,
        fields=FIELDS,
        cache=directory,
        world=single_world(),
        workers=Workers(threads=0),
        reports=Reports(progress=False),
    )


def write_index(num_rows: int, directory: Path) -> None:
    """Write the cache of a pool whose labels are all zero, which a hole in a file gives."""

    def hole(descriptor: int, offset: int, length: int) -> None:
        size = max(os.fstat(descriptor).st_size, offset + length)
        os.truncate(descriptor, size)

    with patch.object(Pool, "ensure"), patch.object(os, "posix_fallocate", hole):
        loader = open_loader(num_rows, directory)
    slots = np.arange(num_rows)
    scattered = slots * SCATTER % num_rows
    sums = np.full(num_rows, xxhash.xxh3_64_intdigest(bytes(8)), np.uint64)
    entries = make_entries(
        slot=slots,
        sample_id=scattered,
        checksum=bind_checksums(sums, scattered),
        position=(scattered + 1) % num_rows,
        heap=np.zeros_like(slots),
        offset=np.zeros_like(slots),
        lengths=np.empty((num_rows, 0), np.int64),
    )
    cache = loader._session.pool.cache
    cache.begin_writing()
    cache.rewrite(entries, epoch=0, placement=loader._session.placements.of(0, first_epoch=0).name)
    loader.close()


def timed(call: Callable[[], object]) -> float:
    """Seconds that it takes."""
    started = time.perf_counter()
    call()
    return time.perf_counter() - started


def private_bytes() -> int:
    """Memory that this process shares with no other, files apart."""
    for line in Path("/proc/self/smaps_rollup").read_text().splitlines():
        if line.startswith("Pss_Anon:"):
            return int(line.split()[1]) * 1024
    return 0


def measure(num_rows: int, directory: Path) -> dict[str, float]:
    """Open the index once and do each thing once; times in seconds."""
    before = private_bytes()
    started = time.perf_counter()
    loader = open_loader(num_rows, directory)
    figures = {"open_s": time.perf_counter() - started}
    with loader:
        figures["begin_s"] = timed(loader.is_used_up)
        order = loader._run.running.plan.order
        figures["cursor_s"] = timed(lambda: order.block(order.steps // 2, 1))
        figures["first_batch_s"] = timed(lambda: next(iter(loader)))
        figures["set_epoch_s"] = timed(lambda: loader.set_epoch(1))
        batches = iter(loader)
        for _ in range(3):
            next(batches)
        figures["state_dict_s"] = timed(loader.state_dict)
        state = loader.state_dict()
        expected = next(batches)["sample_id"]
        started = time.perf_counter()
        loader.load_state_dict(state)
        loader.is_used_up()
        figures["resume_s"] = time.perf_counter() - started
        assert (next(iter(loader))["sample_id"] == expected).all()
        figures["private_bytes"] = private_bytes() - before
    return figures


def main() -> None:
    """Print one line of JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--directory", type=Path, default=Path(tempfile.gettempdir()))
    parser.add_argument("--rows", type=int, default=100_000_000)
    parser.add_argument("--repeats", type=int, default=5)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=args.directory) as place:
        write_index(args.rows, Path(place))
        runs = [measure(args.rows, Path(place)) for _ in range(args.repeats)]
    layout, policy = Layout((1, 1), 2 * PLACED), shuffle.Partial(0.1)
    placement_s = timed(lambda: policy.placement(layout, node=0, epoch=1, seed=0))
    medians = {name: statistics.median(run[name] for run in runs) for name in runs[0]}
    line = {
        "question": "opening and moving about in a large index",
        "rows": args.rows,
        "repeats": args.repeats,
        **medians,
        "placement_s_per_million_rows": placement_s,
        **describe_machine(args.directory),
    }
    print(json.dumps(line))


if __name__ == "__main__":
    main()
