"""Limit: NumPy gathers rows of one mapped array into a reused buffer; no loader does less."""

from collections.abc import Iterator
from pathlib import Path

import numpy as np

from benchmarks.loader.peers.harness import Batch, Feed, Task, copy_set, run
from benchmarks.loader.sets import open_set


def open_feed(task: Task) -> Feed:
    """Map the array."""
    packed = open_set(Path(task.prepared))
    rows, labels = np.asarray(packed.rows()), packed.labels
    buffer = np.empty((task.batch_size, *packed.spec.shape), np.uint8)

    def epoch(number: int) -> Iterator[Batch]:
        order = np.random.default_rng([task.seed, number]).permutation(len(rows))
        mine = order[task.rank :: task.world_size]
        for first in range(0, len(mine), task.batch_size):
            ids = mine[first : first + task.batch_size]
            out = buffer[: len(ids)]
            np.take(rows, ids, axis=0, mode="clip", out=out)
            # The labels are looked at in the first epoch alone.
            yield Batch(ids, labels[ids] if number == 0 else ids, out)

    return Feed(epoch)


if __name__ == "__main__":
    run(copy_set, open_feed)
