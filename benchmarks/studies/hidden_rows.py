"""What does hiding rows save of the node's disk, alone and beside an exchange?

The page cache is dropped before every epoch, so the kernel's count of bytes read by this process is
what the disk gave. Runs take turns; medians of ratios. Two questions:

    python -m benchmarks.studies.hidden_rows --question bytes      # row sizes; hidden 0 against 0.3
    python -m benchmarks.studies.hidden_rows --question exchange   # two nodes: what it reads more

    [--directory /tmp/somewhere] [--repeats 5] [--pool-mb 192]
"""

import argparse
import json
import os
import shutil
import statistics
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from unittest.mock import patch

import numpy as np
import torch

from benchmarks.gather import Generated
from benchmarks.machine import describe_machine
from dataio import Array, Bytes, Field, Int, Loader, Reports, Workers
from dataio.batch.figures import disk_bytes_read
from dataio.plan.policies import Importance, Local, Shuffle
from dataio.world import World, run_threads, single_world, thread_worlds
from importance import Kakurenbo, RandomPrune
from shuffle import Partial

FRACTION = 0.3
PRUNE = RandomPrune(FRACTION, delta=1.0)
KAKURENBO = Kakurenbo(FRACTION, drops=(), alphas=(1.0,), warmup_epochs=0, refresh_every=None)
KIB = 1 << 10


@dataclass(frozen=True)
class Case:
    """A pool of rows of one size on every node.

    Attributes:
        row_bytes: Of a row's data.
        fixed: Whether all rows lie in one array, or each where the heap had room.
        pool_bytes: Of all rows of a node.
        batch: Rows a batch.
    """

    row_bytes: int
    fixed: bool
    pool_bytes: int
    batch: int = 16

    @property
    def num_rows(self) -> int:
        return self.pool_bytes // self.row_bytes

    @property
    def name(self) -> str:
        return f"{self.row_bytes >> 10} KiB{'' if self.fixed else ', variable'}"

    def loader(
        self,
        root: Path,
        *,
        world: World | None = None,
        importance: Importance | None = None,
        shuffle: Shuffle | None = None,
    ) -> Loader:
        """Open the pool, staged in ``root`` once."""
        nodes = world.world_size if world is not None else 1
        field: Field = Array("x", (self.row_bytes,), "uint8") if self.fixed else Bytes("x")
        return Loader(
            Generated(self.name, nodes * self.num_rows, self.row_bytes),
            batch_size=self.batch,
            fields={"x": field, "label": Int("label")},
            cache=root,
            world=world if world is not None else single_world(),
            shuffle=shuffle if shuffle is not None else Local(),
            importance=importance,
            workers=Workers(threads=1),
            reports=Reports(progress=False),
        )


def forget(root: Path) -> None:
    """Drop the pages of a cache's rows, which nobody may have mapped."""
    for path in [*root.rglob("fixed-*.npy"), *root.rglob("heap-*.bin")]:
        descriptor = os.open(path, os.O_RDONLY)
        os.fsync(descriptor)
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(descriptor)


@dataclass(frozen=True)
class Read:
    """What an epoch read from the disk, in what time, and the bytes of its rows."""

    disk_bytes: int
    epoch_s: float
    trained_bytes: int


def read_epoch(loader: Loader, epochs: Iterator[int], row_bytes: int) -> Read:
    """Train the next epoch, cold, without a model."""
    next(epochs)
    before, started = disk_bytes_read(), time.perf_counter()
    rows = sum(int((batch["slot"] >= 0).sum()) for batch in loader)
    seconds = time.perf_counter() - started
    return Read(disk_bytes_read() - before, seconds, rows * row_bytes)


def one_node(case: Case, root: Path, saved: Path | None, importance: Importance | None) -> Read:
    """One epoch on one node; the one after what was saved, if anything."""
    forget(root)
    with case.loader(root, importance=importance) as loader:
        if saved is not None:
            loader.restore(saved)
        return read_epoch(loader, loader.epochs(2), case.row_bytes)


def report_losses(case: Case, root: Path, saved: Path) -> None:
    """Save a run after an epoch in which every row was right, sure, and had its own loss."""
    with case.loader(root, importance=KAKURENBO) as loader:
        next(loader.epochs(2))
        for batch in loader:
            ids = batch["sample_id"]
            loader.report(batch, loss_of(ids), ids >= 0, torch.ones(len(ids)))
        loader.save(saved)


def loss_of(ids: torch.Tensor) -> torch.Tensor:
    """A loss that a sample keeps, in no order of its id."""
    return (ids * 7919 % 10007).float() / 1000


def ask_bytes(case: Case, directory: Path, repeats: int, *, beyond_memory: bool) -> None:
    """Compare epochs that hide nothing with those that hide FRACTION, by two policies."""
    root, saved = directory / "pool", directory / "saved"
    report_losses(case, root, saved)
    ways: dict[str, Callable[[], Read]] = {
        "full": lambda: one_node(case, root, None, None),
        "random": lambda: one_node(case, root, None, PRUNE),
        "kakurenbo": lambda: one_node(case, root, saved, KAKURENBO),
    }
    found = take_turns(ways, repeats, beyond_memory)
    for name in ("random", "kakurenbo"):
        tell("bytes", case, found, name, "full", beyond_memory=beyond_memory, hidden=FRACTION)


def two_nodes(
    case: Case, root: Path, importance: Importance | None, shuffle: Shuffle | None
) -> Read:
    """One epoch on two nodes of this process, its exchange included; it takes no effect."""
    forget(root)
    gate = threading.Barrier(2)

    def node(world: World) -> tuple[int, float, int]:
        loader = case.loader(root, world=world, importance=importance, shuffle=shuffle)
        epochs = loader.epochs(2)
        gate.wait()
        before = disk_bytes_read()
        gate.wait()
        trained = read_epoch(loader, epochs, case.row_bytes)
        # What the exchange has still to send is sent before it is let go.
        started = time.perf_counter()
        loader._run.abandon()
        seconds = trained.epoch_s + time.perf_counter() - started
        gate.wait()
        read = disk_bytes_read() - before
        gate.wait()
        loader.close()
        return read, seconds, trained.trained_bytes

    ends = run_threads(thread_worlds([1, 1]), node)
    # Both count the bytes of the whole process.
    return Read(ends[0][0], max(end[1] for end in ends), sum(end[2] for end in ends))


def ask_exchange(case: Case, directory: Path, repeats: int, exchange: float) -> None:
    """Compare an exchange with none, hiding FRACTION."""
    ways: dict[str, Callable[[], Read]] = {}
    shuffles: dict[str, Shuffle] = {"none": Local(), "uniform": Partial(exchange)}
    for name, shuffle in shuffles.items():
        root = directory / name

        def way(root: Path = root, shuffle: Shuffle = shuffle) -> Read:
            return two_nodes(case, root, PRUNE, shuffle)

        way()
        ways[name] = way
    found = take_turns(ways, repeats, beyond_memory=True)
    tell("exchange", case, found, "uniform", "none", hidden=FRACTION, exchange=exchange)


def take_turns(
    ways: dict[str, Callable[[], Read]], repeats: int, beyond_memory: bool
) -> dict[str, list[Read]]:
    """Run all ways ``repeats`` times, one after the other; as pools that memory cannot hold."""
    found: dict[str, list[Read]] = {name: [] for name in ways}
    with ExitStack() as stack:
        if beyond_memory:
            stack.enter_context(patch("dataio.batch.gather.is_needed", lambda reader: True))
        for _ in range(repeats):
            for name, way in ways.items():
                found[name].append(way())
    return found


def tell(
    question: str,
    case: Case,
    found: dict[str, list[Read]],
    name: str,
    baseline: str,
    **parameters: object,
) -> None:
    """Print one way beside another."""
    pairs = list(zip(found[name], found[baseline], strict=True))
    ratios = [one.epoch_s / other.epoch_s for one, other in pairs]
    spread = np.quantile(ratios, [0.1, 0.9]).tolist()
    line = {
        "question": question,
        "rows": case.name,
        **parameters,
        "way": name,
        "baseline": baseline,
        "repeats": len(pairs),
        "disk_bytes": statistics.median(one.disk_bytes for one, _ in pairs),
        "baseline_disk_bytes": statistics.median(other.disk_bytes for _, other in pairs),
        "trained_ratio": median_ratio([(a.trained_bytes, b.trained_bytes) for a, b in pairs]),
        "disk_ratio": median_ratio([(a.disk_bytes, b.disk_bytes) for a, b in pairs]),
        "time_ratio": round(statistics.median(ratios), 3),
        "time_ratio_p10": round(spread[0], 3),
        "time_ratio_p90": round(spread[-1], 3),
    }
    print(json.dumps(line), flush=True)


def median_ratio(pairs: list[tuple[int, int]]) -> float:
    return round(statistics.median(one / max(other, 1) for one, other in pairs), 4)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--question", choices=("bytes", "exchange"), default="bytes")
    parser.add_argument("--directory", default=tempfile.gettempdir())
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--pool-mb", type=int, default=192)
    chosen = parser.parse_args()
    directory = Path(tempfile.mkdtemp(dir=chosen.directory))
    print(json.dumps(describe_machine(directory)), flush=True)
    try:
        pool_bytes = chosen.pool_mb << 20
        cases = [Case(size * KIB, True, pool_bytes) for size in (4, 48, 100)]
        cases.append(Case(48 * KIB, False, pool_bytes))
        for case in cases if chosen.question == "bytes" else (cases[1], cases[3]):
            root = directory / case.name.replace(" ", "")
            if chosen.question == "bytes":
                ask_bytes(case, root / "beyond", chosen.repeats, beyond_memory=True)
                if case.row_bytes == 48 * KIB and case.fixed:
                    ask_bytes(case, root / "held", chosen.repeats, beyond_memory=False)
            else:
                for exchange in (0.1, 0.3):
                    ask_exchange(case, root / str(exchange), chosen.repeats, exchange)
            shutil.rmtree(root)
    finally:
        shutil.rmtree(directory, ignore_errors=True)


if __name__ == "__main__":
    main()
