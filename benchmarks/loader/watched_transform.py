"""What does it cost to look whether a transform draws from global generators?

An ordinary transform, which draws from its rng, on two threads. Epochs of a loader that looks and
of one that never does take turns; each is of many batches, the first looks included.

    python -m benchmarks.loader.watched_transform --directory /tmp/somewhere [--repeats 15]
"""

import argparse
import json
import statistics
import tempfile
import time
from pathlib import Path
from unittest.mock import patch

import numpy as np

from benchmarks.gather import BATCH, Generated
from benchmarks.machine import describe_machine
from dataio import Array, Int, Loader
from dataio.batch.values import Sample
from dataio.batch.watch import Watch
from dataio.world import single_world

ROWS, SIDE = 12_800, 32


def flip_and_shift(sample: Sample, rng: np.random.Generator) -> Sample:
    """Crop, flip and brighten: about 30 us."""
    pixels = np.asarray(sample["x"])
    top, left = rng.integers(0, 4, 2).tolist()
    cut = pixels[top : top + SIDE - 4, left : left + SIDE - 4]
    if rng.random() < 0.5:
        cut = cut[:, ::-1]
    return {"x": cut * np.float32(rng.uniform(0.8, 1.2)), "label": sample["label"]}


def epoch_s(root: Path, epoch: int, *, looks: bool) -> float:
    """Seconds of one epoch of a new loader over a warm cache."""
    with Loader(
        Generated("pixels", ROWS, SIDE * SIDE * 3),
        batch_size=BATCH,
        fields={"x": Array("x", (SIDE, SIDE, 3), "uint8"), "label": Int("label")},
        cache=root, transform=flip_and_shift, world=single_world(), num_threads=2, progress=False,
    ) as loader:  # fmt: skip
        loader.set_epoch(epoch)
        with patch.object(Watch, "plan", Watch.plan if looks else lambda watch: "free"):
            started = time.perf_counter()
            for _ in loader:
                pass
            return time.perf_counter() - started


def main() -> None:
    """Print one line of JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--directory", type=Path, default=Path(tempfile.gettempdir()))
    parser.add_argument("--repeats", type=int, default=15)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=args.directory) as place:
        epoch_s(Path(place), 0, looks=True)
        pairs = []
        for number in range(args.repeats):
            both = {}
            for looks in (number % 2 == 0, number % 2 == 1):
                both[looks] = epoch_s(Path(place), number, looks=looks)
            pairs.append((both[True], both[False]))
    figures = {
        "question": "cost of looking what a transform draws from",
        "batch_size": BATCH,
        "steps": ROWS // BATCH,
        "repeats": args.repeats,
        "epoch_s": statistics.median(looked for looked, _ in pairs),
        "epoch_without_s": statistics.median(plain for _, plain in pairs),
        "ratio": statistics.median(looked / plain for looked, plain in pairs),
    }
    print(json.dumps(figures | describe_machine(args.directory)), flush=True)


if __name__ == "__main__":
    main()
