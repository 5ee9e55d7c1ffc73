"""Rows for a policy to choose among, without a loader."""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from dataio.candidates import Candidates
from dataio.history import COLUMNS, Scores, score_dtype, unscored
from dataio.seeding import key

SCORE_DTYPE = score_dtype(COLUMNS)


def reported(loss: Sequence[float] | NDArray[np.floating]) -> Scores:
    """Rows of some losses, right, sure and known."""
    scores = unscored(len(loss), SCORE_DTYPE)
    scores["loss"], scores["loss_mean"] = loss, loss
    scores["confidence"], scores["correct"], scores["epoch"] = 1, True, 0
    return scores


def one_pool(scores: Scores, *, seed: int = 0, epoch: int = 0) -> Candidates:
    """All rows of a job in one pool, row i of sample i."""
    stream = key(seed, "importance", epoch=epoch)
    return Candidates(scores, np.arange(len(scores)), len(scores), stream)
