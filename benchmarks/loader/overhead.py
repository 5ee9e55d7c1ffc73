"""What does it cost that a loader counts: microseconds a batch, and as a share of a step?

A fixed-shape set in memory's page cache, the cheapest batches there are. Epochs with counting and
epochs in which the counting calls do nothing take turns; the calls alone are timed too.

    python -m benchmarks.loader.overhead --directory /tmp/somewhere [--repeats 15]
"""

import argparse
import json
import statistics
import tempfile
import time
from pathlib import Path
from unittest.mock import patch

from benchmarks.gather import BATCH, SETS, Generated
from benchmarks.machine import describe_machine
from dataio import Int, Loader, Reports, Workers
from dataio.batch.figures import Figures
from dataio.world import single_world

CALLS = 20_000


def epoch_s(loader: Loader) -> float:
    """Seconds a batch of one epoch."""
    loader.set_epoch(0)  # the same again, without a turn
    started = time.perf_counter()
    num_batches = sum(1 for _ in loader)
    return (time.perf_counter() - started) / num_batches


def count_s() -> float:
    """Seconds that counting one batch takes: two looks at the clock and the histogram."""
    figures, clock = Figures(), time.perf_counter
    started = clock()
    for _ in range(CALLS):
        before = clock()
        figures.add_batch(clock() - before, BATCH)
    return (clock() - started) / CALLS


def measure(name: str, directory: Path, repeats: int) -> dict[str, object]:
    """Compare epochs with and without counting."""
    num_samples, row_bytes, field = SETS[name]
    with Loader(
        Generated(name, num_samples, row_bytes),
        batch_size=BATCH,
        fields={"x": field, "label": Int("label")},
        cache=directory,
        world=single_world(),
        workers=Workers(threads=0),
        reports=Reports(progress=False),
    ) as loader:
        epoch_s(loader)
        counted, plain, alone, asked = [], [], [], []
        for _ in range(repeats):
            counted.append(epoch_s(loader))
            with patch.object(Figures, "add_batch", lambda *_: None):
                plain.append(epoch_s(loader))
            alone.append(count_s())
            started = time.perf_counter()
            loader.stats()
            asked.append(time.perf_counter() - started)
    batch_s, count = statistics.median(counted), statistics.median(alone)
    return {
        "question": "cost of counting",
        "set": name,
        "batch_size": BATCH,
        "repeats": repeats,
        "batch_us": 1e6 * batch_s,
        "batch_without_us": 1e6 * statistics.median(plain),
        "count_us": 1e6 * count,
        "count_fraction": count / batch_s,
        "stats_call_us": 1e6 * statistics.median(asked),
    }


def main() -> None:
    """Print one line of JSON a set."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--directory", type=Path, default=Path(tempfile.gettempdir()))
    parser.add_argument("--sets", nargs="+", choices=[*SETS], default=["1KiB", "3KiB"])
    parser.add_argument("--repeats", type=int, default=15)
    args = parser.parse_args()
    for name in args.sets:
        with tempfile.TemporaryDirectory(dir=args.directory) as place:
            figures = measure(name, Path(place), args.repeats)
        print(json.dumps(figures | describe_machine(args.directory)), flush=True)


if __name__ == "__main__":
    main()
