"""Score history of a pool, shared by the node's ranks.

A row is trained by one rank an epoch, so every entry has one writer.
"""

import io
import os
import tempfile
from pathlib import Path

import numpy as np

from dataio.plan.history import Scores, unscored
from dataio.rows.encoding import NPY_LOCK
from dataio.world import World


def open_scores(
    directory: Path, num_slots: int, dtype: np.dtype[np.void], *, world: World
) -> Scores:
    """Map the scores of a pool that was never trained on, shared by the node's ranks. Collective.

    They are this job's own: the file loses its name as soon as all have mapped it, so that they
    live exactly as long as its processes, and are freed by a kill too.

    Args:
        directory: Where the file may lie for that moment, on the node's own disk.
        num_slots: Rows of the pool.
        dtype: The columns.
        world: All ranks.
    """
    path = None
    if world.local_rank == 0:
        path = _create_scores(directory, unscored(num_slots, dtype))
    names = world.allgather(os.fsencode(path or ""), doing="make room for scores")
    shared = Path(os.fsdecode(names[world.topology.ranks_of_node[world.node][0]]))
    with NPY_LOCK:
        scores = np.lib.format.open_memmap(shared, "r+").view(np.ndarray)
    world.barrier(doing="map the scores")
    if path is not None:
        path.unlink()
    return scores


def no_scores(num_slots: int, dtype: np.dtype[np.void]) -> Scores:
    """Make scores[num_slots]: no report yet, nor ever; read-only, and takes no memory."""
    return np.broadcast_to(unscored(1, dtype), num_slots)


def _create_scores(directory: Path, scores: Scores) -> Path:
    # By way of memory, and written, not mapped: on a full disk a write is an error that says so, a
    # store into a mapping a SIGBUS.
    whole = io.BytesIO()
    np.save(whole, scores)
    descriptor, name = tempfile.mkstemp(prefix="scores-", suffix=".npy", dir=directory)
    path = Path(name)
    try:
        with open(descriptor, "wb") as file:
            file.write(whole.getbuffer())
    except OSError:
        path.unlink()
        raise
    return path


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
