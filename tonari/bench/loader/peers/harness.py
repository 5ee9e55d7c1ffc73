"""What every measured loader shares: its task, the loop that is timed, the proof of exactness.

The driver and the ranks of a loader exchange lines of JSON over a Unix socket, because loaders
write what they like to stdout, and a launcher passes stdin to one rank only.
"""

import json
import os
import shutil
import socket
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import numpy as np
from numpy.typing import ArrayLike, NDArray

from tonari.bench.loader.sets import (
    CORNER,
    NUM_CLASSES,
    PackedSet,
    SampleSet,
    corner_brightness,
    open_set,
)

PHOTO_TOLERANCE = 30.0
"""Of the brightness of a crop: detail of low frequency, and clipping, move it."""


@dataclass(frozen=True, kw_only=True)
class PeerTask:
    """What one rank of a loader is to do.

    Attributes:
        source: Directory of the set.
        prepared: Directory for the loader's own form of it.
        batch_size: Samples a batch and rank.
        workers: Worker processes, or threads where the loader has them instead.
        world_size: Ranks on this machine, each with its part of the samples.
        socket: Where the driver listens; if empty, prepare the set and end.
        rank: Which of them this is; ignored where a launcher gives the rank.
        port: A free TCP port, for loaders whose ranks meet through torch.
        seed: Of the shuffle.
    """

    source: str
    prepared: str
    batch_size: int
    workers: int = 0
    world_size: int = 1
    socket: str = ""
    rank: int = 0
    port: int = 0
    seed: int = 0

    def to_json(self) -> str:
        """What `read_task` reads."""
        return json.dumps(asdict(self))

    def open_source(self) -> PackedSet:
        """Map the set."""
        return open_set(Path(self.source))

    def open_copy(self) -> PackedSet:
        """Map the copy that `copy_set` made."""
        return open_set(Path(self.prepared))

    def batches_of_ids(self, epoch: int, num_samples: int) -> Iterator[NDArray[np.int64]]:
        """Shuffle all samples and give this rank's, a batch at a time: int64[batch] each."""
        order = np.random.default_rng([self.seed, epoch]).permutation(num_samples)
        mine = order[self.rank :: self.world_size]
        for first in range(0, len(mine), self.batch_size):
            yield mine[first : first + self.batch_size]

    def loader_options(self) -> dict[str, Any]:
        """Give the arguments that every loader made after torch's takes."""
        return {
            "batch_size": self.batch_size,
            "num_workers": self.workers,
            "persistent_workers": self.workers > 0,
        }


NamedSample = dict[str, Any]
"""A sample by the names that `named_sample` gives: ``id``, ``label``, ``payload``."""


def named_sample(packed: PackedSet, sample_id: int) -> NamedSample:
    """Take one sample out of the set: a JPEG's bytes, or an array of its own."""
    data = packed.sample(sample_id)
    payload = data.tobytes() if packed.spec.is_jpeg else np.array(data)
    return {"id": sample_id, "label": int(packed.labels[sample_id]), "payload": payload}


class DeliveredBatch(NamedTuple):
    """A batch as delivered: samples in rows.

    Attributes:
        ids: int64[batch]; negative where a row only keeps the shape.
        labels: int64[batch].
        payload: uint8[batch, ...]: Bytes, or pixels [batch, height, width, channels].
    """

    ids: ArrayLike
    labels: ArrayLike
    payload: ArrayLike


def named_batches(loader: Iterable[Mapping[str, Any]]) -> Iterator[DeliveredBatch]:
    """Take a loader's batches whose columns are those of `named_sample`."""
    for batch in loader:
        yield DeliveredBatch(batch["id"], batch["label"], batch["payload"])


class Prepare(Protocol):
    """Converts the set into the loader's own form.

    Returns the bytes read; None means all of the set, once.
    """

    def __call__(self, task: PeerTask, /) -> int | None: ...


def nothing(epoch: int) -> None:
    """Do nothing."""


@dataclass(frozen=True)
class PeerFeed:
    """A loader that is open.

    Attributes:
        epoch: Makes one epoch's batches; all of it is timed.
        ready: What the ranks do together before an epoch; not timed.
        rank: This rank in the whole job, where a launcher gave it.
    """

    epoch: Callable[[int], Iterator[DeliveredBatch]]
    ready: Callable[[int], None] = nothing
    rank: int | None = None


def read_task() -> PeerTask:
    """Read the task from the command line."""
    return PeerTask(**json.loads(sys.argv[1]))


def run(prepare: Prepare, open_feed: Callable[[PeerTask], PeerFeed]) -> None:
    """Do the task: prepare, or serve epochs until the driver closes the connection."""
    task = read_task()
    if task.socket:
        _serve(task, open_feed)
        return
    started = time.perf_counter()
    read = prepare(task)
    took = time.perf_counter() - started
    source_bytes = sum(path.stat().st_size for path in Path(task.source).iterdir())
    report = {"prepare_s": took, "source_bytes": source_bytes if read is None else read}
    # Several ranks may write the same report.
    partial = Path(f"{task.prepared}.json.{os.getpid()}")
    partial.write_text(json.dumps(report))
    partial.replace(f"{task.prepared}.json")


def copy_set(task: PeerTask) -> None:
    """Copy the set, for loaders whose own form is the neutral one."""
    shutil.copytree(task.source, task.prepared)


def _serve(task: PeerTask, open_feed: Callable[[PeerTask], PeerFeed]) -> None:
    started = time.perf_counter()
    feed = open_feed(task)
    open_s = time.perf_counter() - started
    rank = task.rank if feed.rank is None else feed.rank
    connection = socket.socket(socket.AF_UNIX)
    connection.connect(task.socket)
    spec = task.open_source().spec
    with connection, connection.makefile("rw") as lines:

        def answer(report: dict[str, object]) -> None:
            lines.write(json.dumps(report) + "\n")
            lines.flush()

        answer({"rank": rank, "pid": os.getpid(), "open_s": open_s})
        for line in lines:
            verb, epoch = json.loads(line)
            if verb == "ready":
                feed.ready(epoch)
                answer({})
            else:
                ids_path = f"{task.socket}.{rank}.npy"
                answer(measure(feed.epoch(epoch), spec, ids_path, check=epoch == 0))


def measure(
    batches: Iterator[DeliveredBatch], spec: SampleSet, ids_path: str, *, check: bool
) -> dict[str, object]:
    """Take an epoch's batches as fast as they are delivered, then check them.

    Args:
        batches: One epoch of one rank.
        spec: What the set holds.
        ids_path: File for the ids, which the driver compares with those of the other ranks.
        check: Whether to check every sample, which takes part of the measured time.
    """
    ids: list[ArrayLike] = []
    num_mismatched = 0
    first_s = 0.0
    started = time.perf_counter()
    for batch in batches:
        if not ids:
            first_s = time.perf_counter() - started
        ids.append(batch.ids)
        if check:
            num_mismatched += mismatched(batch, spec)
    elapsed_s = time.perf_counter() - started
    rows = [np.asarray(part).reshape(-1) for part in ids]
    rows = [part[part >= 0] for part in rows]
    seen = np.concatenate(rows) if rows else np.empty(0, np.int64)
    np.save(ids_path, seen)
    return {
        "samples": len(seen),
        "elapsed_s": elapsed_s,
        "first_batch_s": first_s,
        "mismatched": num_mismatched,
        "label_spread": label_spread(rows, spec.num_samples),
        "ids": ids_path,
    }


def mismatched(batch: DeliveredBatch, spec: SampleSet) -> int:
    """Count the samples whose payload or label is not that of their id."""
    ids = np.asarray(batch.ids).reshape(-1)
    valid = ids >= 0
    payload, labels = np.asarray(batch.payload), np.asarray(batch.labels).reshape(-1)
    if payload.shape != (len(ids), *spec.shape) or payload.dtype != np.uint8:
        return len(ids)
    expected = labels_of(ids, spec.num_samples)
    wrong = labels != expected
    if spec.kind == "recipe":
        # Every crop holds as much light as the whole.
        wrong |= (
            np.abs(payload.mean(axis=(1, 2, 3)) - corner_brightness(expected)) > PHOTO_TOLERANCE
        )
    elif spec.is_jpeg:
        corner = payload[:, CORNER // 4 : CORNER // 2, CORNER // 4 : CORNER // 2, 1]
        wrong |= np.abs(corner.mean(axis=(1, 2)) - corner_brightness(expected)) > 4
    else:
        wrong |= np.ascontiguousarray(payload[:, :8]).view("<i8")[:, 0] != ids
    return int(np.count_nonzero(wrong & valid))


def labels_of(ids: NDArray[np.int64], num_samples: int) -> NDArray[np.int64]:
    """int64[len(ids)]: The label of every id, as `make_labels` gives it."""
    return ids.astype(np.int64) * NUM_CLASSES // num_samples


def label_spread(batches: list[NDArray[np.int64]], num_samples: int) -> float:
    """Variance of ids (and so of labels) within a batch, over that of the set.

    1 where batches are drawn from the whole set, 0 where each holds one class.
    """
    within = [float(np.var(part, ddof=1)) for part in batches if len(part) > 1]
    return float(np.mean(within)) * 12 / (num_samples**2 - 1) if within else 0.0
