"""Score history of a pool, shared by the node's ranks.

A row is trained by one rank an epoch, so every entry has one writer.
"""

import io
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from dataio.policies import SCORE_DTYPE, Scores

QUANTUM = 1 / 1024
"""Losses are rounded to this: a last-bit difference between two runs selects the same rows."""


def create_scores(path: Path, num_slots: int) -> None:
    """Write the scores of a pool that was never trained on."""
    # Unlinked first: whoever still maps the last run's scores must not see them change.
    path.unlink(missing_ok=True)
    # Written, not mapped: on a full disk a write is an error, a store into a mapping a SIGBUS. By
    # way of memory: NumPy's own error of a short write does not say why.
    whole = io.BytesIO()
    np.save(whole, unscored(num_slots))
    path.write_bytes(whole.getbuffer())


def unscored(num_slots: int) -> Scores:
    """SCORE_DTYPE[num_slots]: No report yet."""
    scores = np.zeros(num_slots, SCORE_DTYPE)
    scores["loss"] = np.inf
    scores["epoch"] = -1
    return scores


def open_scores(path: Path) -> Scores:
    """Map the pool's scores, to read and write."""
    return np.lib.format.open_memmap(path, "r+").view(np.ndarray)


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
