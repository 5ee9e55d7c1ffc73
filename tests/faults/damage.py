"""Caches in each state, damaged at a place that a seed draws, and the truth about them."""

import os
import re
import shutil
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

import shuffle
from dataio import DataioError
from dataio.rows.rows import corrupt_rows
from dataio.store.tools.report import open_to_read
from tests.faults.recording import Files, Recorder, State
from tests.faults.samples import WIDE, Job, Samples, Trained, fields_of, node_directory, train

CURE = r"remove|run `tonari cache verify|read (these|them) again|restore|give another|look at"


PARTIAL = {"shuffle": shuffle.Partial(0.4)}


@dataclass(frozen=True)
class Made:
    """A cache as a job left it, and what the job trains on it when nothing is damaged."""

    name: str
    job: Job
    files: Files
    trained: Trained

    def __str__(self) -> str:
        return f"{self.name} ({self.job.kind})"


def files_below(root: Path) -> Files:
    return {
        str(path.relative_to(root)): path.read_bytes() for path in root.rglob("*") if path.is_file()
    }


def staged(job: Job, root: Path) -> Files:
    train(replace(job, epochs=0), root, saves=root)
    return files_below(root)


def moved(job: Job, root: Path) -> Files:
    train(job, root, saves=root)
    return files_below(root)


def most(job: Job, root: Path, prefix: str) -> Files:
    """Run a job, and find the moment at which there were the most files of a kind."""
    recorder = Recorder(root)
    with recorder.recording():
        train(job, root, saves=root, num_epochs=1)
    kills = [state.files for state in recorder.states if state.kind == "kill"]
    return max(kills, key=lambda files: sum(f"/{prefix}" in name for name in files))


def in_staging(job: Job, root: Path) -> Files:
    return most(job, root, "staged-")


def in_pull(job: Job, root: Path) -> Files:
    train(job, root, saves=root)
    shutil.rmtree(node_directory(root, 1))
    return most(job, root, "given-")


STATES = {
    "staged": (staged, Job((2, 1), "", options=PARTIAL)),
    "in staging": (in_staging, Job((2, 1), "", options=PARTIAL)),
    "moved": (moved, Job((1, 1), "", epochs=4, options=PARTIAL)),
    "in a pull": (in_pull, Job((1, 1), "", epochs=4, options=PARTIAL)),
    "partial": (
        moved, Job((1,), "", epochs=2, num_samples=120, width=WIDE, cache={"quota": 900_000}),
    ),
}  # fmt: skip


MADE = [
    *(("staged", kind) for kind in ("fixed", "variable", "both")),
    *(("moved", kind) for kind in ("fixed", "variable", "both")),
    ("in staging", "both"), ("in a pull", "both"), ("partial", "both"),
]  # fmt: skip


def small(patch) -> None:
    patch.setattr("dataio.store.staging.SEAL_BYTES", 300)
    patch.setattr("dataio.store.commit_log.MOVED_PER_BASE", 9.0)
    patch.setattr("dataio.store.pull.ROUND_BYTES", 400)
    patch.setattr("dataio.store.files.store.HEAP_STEP_BYTES", 1 << 10)
    patch.setattr("os.fsync", lambda descriptor: None)
    patch.setattr("os.fdatasync", lambda descriptor: None)


def restore(files: Files, root: Path) -> None:
    State("", "", files, None).restore(root)


def kind_of(path: Path) -> str:
    return re.sub(r"[-0-9]+\.", ".", re.sub(r"-\d.*\.", ".", path.name))


def where(path: Path, rng: np.random.Generator) -> int:
    """Choose a byte; of an array its header as often as its rows."""
    size = path.stat().st_size
    if path.suffix == ".npy" and rng.random() < 0.3:
        return int(rng.integers(128))
    return int(rng.integers(size))


def flip(path: Path, rng: np.random.Generator) -> str:
    at, bit = where(path, rng), int(rng.integers(8))
    data = bytearray(path.read_bytes())
    data[at] ^= 1 << bit
    path.write_bytes(data)
    return f"bit {bit} of byte {at} of {len(data)} flipped"


def cut(path: Path, rng: np.random.Generator) -> str:
    if rng.random() < 0.3:
        path.unlink()
        return "removed"
    size = path.stat().st_size
    left = int(rng.integers(size))
    os.truncate(path, left)
    return f"cut from {size} to {left} bytes"


def check_truth(job: Job, root: Path) -> int:
    """Compare every row of the caches with its sample, and count those that do not match.

    Raises:
        AssertionError: If an entry is not its sample's.
    """
    num_corrupt = 0
    for node in range(len(job.nodes)):
        cache = open_to_read(node_directory(root, node))
        slots = np.flatnonzero(cache.entries.present)
        rows = cache.read_rows(slots)
        true = sums(job)[rows.sample_id]
        assert np.array_equal(rows.checksum, true), f"node {node}: entries of other samples"
        num_corrupt += len(corrupt_rows(rows))
    return num_corrupt


def sums(job: Job) -> np.ndarray:
    """The checksum of every sample."""
    source, ids = Samples(job.num_samples, job.width), np.arange(job.num_samples)
    read = source.read(ids, fields_of(job.kind, job.width))
    return np.concatenate([rows.checksum for rows in read])


def outcome(made: Made, root: Path) -> str:
    """Train on a damaged cache, and say what came of it.

    Raises:
        AssertionError: If other rows were trained, or the error does not say where, or what to do.
        Exception: What is raised that is none of ours.
    """
    try:
        found = train(made.job, root, saves=root, num_epochs=2)
    except DataioError as error:
        told = str(error)
        assert str(root) in told, f"without a path: {told}"
        assert re.search(CURE, told), f"without a cure: {told}"
        return type(error).__name__
    assert found == made.trained, "other samples"
    assert not check_truth(made.job, root), "rows stay corrupt"
    return "the same rows"
