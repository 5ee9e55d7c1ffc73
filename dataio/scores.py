"""Score history of a pool, shared by the node's ranks.

A row is trained by one rank an epoch, so every entry has one writer.
"""

import io
import os
import tempfile
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from dataio.npy_lock import NPY_LOCK
from dataio.policies import SCORE_DTYPE, Scores
from dataio.world import World

QUANTUM = 1 / 1024
"""Losses are rounded to this: a last-bit difference between two runs selects the same rows."""


def open_scores(directory: Path, num_slots: int, *, world: World) -> Scores:
    """Map the scores of a pool that was never trained on, shared by the node's ranks. Collective.

    They are this job's own: the file loses its name as soon as all have mapped it, so that they
    live exactly as long as its processes, and are freed by a kill too.

    Args:
        directory: Where the file may lie for that moment, on the node's own disk.
        num_slots: Rows of the pool.
        world: All ranks.
    """
    path = None
    if world.local_rank == 0:
        path = _create_scores(directory, num_slots)
    names = world.allgather(os.fsencode(path or ""), doing="make room for scores")
    shared = Path(os.fsdecode(names[world.topology.ranks_of_node[world.node][0]]))
    with NPY_LOCK:
        scores = np.lib.format.open_memmap(shared, "r+").view(np.ndarray)
    world.barrier(doing="map the scores")
    if path is not None:
        path.unlink()
    return scores


def no_scores(num_slots: int) -> Scores:
    """SCORE_DTYPE[num_slots]: No report yet, nor ever; read-only, and takes no memory."""
    return np.broadcast_to(unscored(1), num_slots)


def _create_scores(directory: Path, num_slots: int) -> Path:
    # By way of memory, and written, not mapped: on a full disk a write is an error that says so, a
    # store into a mapping a SIGBUS.
    whole = io.BytesIO()
    np.save(whole, unscored(num_slots))
    descriptor, name = tempfile.mkstemp(prefix="scores-", suffix=".npy", dir=directory)
    path = Path(name)
    try:
        with open(descriptor, "wb") as file:
            file.write(whole.getbuffer())
    except OSError:
        path.unlink()
        raise
    return path


def unscored(num_slots: int) -> Scores:
    """SCORE_DTYPE[num_slots]: No report yet."""
    scores = np.zeros(num_slots, SCORE_DTYPE)
    scores["loss"] = np.inf
    scores["epoch"] = -1
    return scores


def record(
    scores: Scores,
    slots: NDArray[np.int64],
    *,
    loss: NDArray[np.float32],
    correct: NDArray[np.bool_] | None,
    confidence: NDArray[np.float32] | None,
    epoch: int,
) -> None:
    """Write the reports of some rows, quantised. A missing outcome counts as wrong and unsure."""
    entry = np.zeros(len(slots), SCORE_DTYPE)
    entry["loss"] = np.round(loss / QUANTUM) * QUANTUM
    entry["epoch"] = epoch
    if correct is not None:
        entry["correct"] = correct
    if confidence is not None:
        entry["confidence"] = np.round(confidence / QUANTUM) * QUANTUM
    scores[slots] = entry


def spread_scores(scores: Scores, *, epoch: int, world: World) -> None:
    """Give every node all nodes' reports of an epoch, where each holds all rows. Collective."""
    mine = np.flatnonzero(scores["epoch"] == epoch)
    leads = world.local_rank == 0
    slots = mine.tobytes() if leads else b""
    entries = scores[mine].tobytes() if leads else b""
    all_slots = world.allgather(slots, doing="spread the slots of scores")
    all_entries = world.allgather(entries, doing="spread scores")
    if leads:
        for theirs, data in zip(all_slots, all_entries, strict=True):
            scores[np.frombuffer(theirs, np.int64)] = np.frombuffer(data, scores.dtype)
    world.barrier(doing="take in scores")
