"""How much does asking the disk ahead help a pool that memory does not hold?

The files' pages are dropped before every run; runs with and without readahead take turns. Only some
batches of an epoch are read, so that rows that happen to share pages do not count.

    python -m benchmarks.studies.readahead --directory /tmp/somewhere [--sets 48KiB] [--repeats 5]
"""

import argparse
import json
import os
import statistics
import tempfile
import time
from pathlib import Path
from unittest.mock import patch

import numpy as np

from benchmarks.gather import BATCH, SETS, Generated
from dataio import Array, Field, Int
from dataio.base.seeding import key
from dataio.batch.gather import Gather
from dataio.plan.epoch import EpochPlan
from dataio.plan.order import Order
from dataio.plan.placement import Placement
from dataio.plan.policies import Selection
from dataio.pool.pool import Pool
from dataio.world import single_world


def forget(directory: Path) -> None:
    """Drop the pages of a cache's files, which nobody may have mapped."""
    for path in directory.rglob("fixed-*.npy"):
        descriptor = os.open(path, os.O_RDONLY)
        os.fsync(descriptor)
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(descriptor)


def seconds(name: str, directory: Path, *, ahead: bool, num_batches: int) -> float:
    """Read some batches of an epoch from disk."""
    num_samples, row_bytes, field = SETS[name]
    fields: dict[str, Field] = {"x": field, "label": Int("label")}
    source = Generated(name, num_samples, row_bytes)
    pool = Pool(
        source,
        fields,
        world=single_world(),
        root=directory,
        num_slots=num_samples,
        num_leaving=0,
        progress=False,
    )
    pool.ensure(Placement("all", 0, num_samples, lambda: np.arange(num_samples)))
    dealt = np.array([num_samples])
    order = Order(np.arange(num_samples), key(0, "order"), dealt, 0, BATCH, num_samples // BATCH)
    with patch("dataio.batch.gather.is_needed", lambda reader: ahead):
        gather = Gather(pool.cache, fields, num_threads=2, verify="never")
        started = time.perf_counter()
        steps = range(num_batches)
        for _ in gather.batches(EpochPlan(Selection(), order, dealt).block, steps, epoch=0):
            pass
        taken = time.perf_counter() - started
        gather.close()
    pool.close()
    return taken


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    sets = sorted(name for name, (_, _, field) in SETS.items() if isinstance(field, Array))
    parser.add_argument("--sets", nargs="+", choices=sets, default=["48KiB"])
    parser.add_argument("--directory", default=tempfile.gettempdir())
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--num-batches", type=int, default=20)
    chosen = parser.parse_args()
    for name in chosen.sets:
        with tempfile.TemporaryDirectory(dir=chosen.directory) as folder:
            directory = Path(folder)
            seconds(name, directory, ahead=False, num_batches=1)
            pairs = []
            for _ in range(chosen.repeats):
                pair = []
                for ahead in (False, True):
                    forget(directory)
                    pair.append(
                        seconds(name, directory, ahead=ahead, num_batches=chosen.num_batches)
                    )
                pairs.append(pair)
        line = {
            "question": "readahead",
            "set": name,
            "repeats": chosen.repeats,
            "without_s": round(statistics.median(pair[0] for pair in pairs), 3),
            "with_s": round(statistics.median(pair[1] for pair in pairs), 3),
            "speedup": round(statistics.median(pair[0] / pair[1] for pair in pairs), 2),
        }
        print(json.dumps(line), flush=True)


if __name__ == "__main__":
    main()
