"""Write a small generated dataset for the examples: points around three centres, in tar shards.

    python examples/blobs.py blobs

makes ``blobs/train-{000000..000001}.tar`` and ``blobs/val/val-000000.tar``.
"""

import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from tonari.pack.shards import Sample, write_shards

NUM_TRAIN, NUM_VAL, NUM_CLASSES, SIZE = 240, 50, 3, 8


def write_blobs(directory: Path) -> None:
    """Write training and validation shards; a directory that is there is refused."""
    write_shards(samples(NUM_TRAIN, seed=0), directory, shard_samples=NUM_TRAIN // 2)
    write_shards(samples(NUM_VAL, seed=1), directory / "val", prefix="val", shard_samples=NUM_VAL)


def samples(count: int, *, seed: int) -> Iterator[Sample]:
    rng = np.random.default_rng(seed)
    centres = 2.0 * np.eye(NUM_CLASSES, SIZE)
    for number in range(count):
        label = int(rng.integers(NUM_CLASSES))
        point = rng.normal(centres[label]).astype("<f4")
        yield {"__key__": f"{number:06d}", "bin": point.tobytes(), "cls": str(label).encode()}


if __name__ == "__main__":
    write_blobs(Path(sys.argv[1]))
