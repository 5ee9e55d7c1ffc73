"""What a training step tells of its rows, checked and written into the scores."""

from collections.abc import Mapping

import numpy as np
import torch
from numpy.typing import NDArray

from dataio.policies import Scores
from dataio.scores import record


def check_report(num_rows: int, values: Mapping[str, torch.Tensor | None]) -> None:
    """Refuse what does not have one value for each row of a batch.

    Raises:
        ValueError: It names the first such value.
    """
    for name, value in values.items():
        if value is not None and tuple(value.shape) != (num_rows,):
            raise ValueError(
                f"report: {name} has shape {tuple(value.shape)}, expected ({num_rows},), one "
                "value a row; "
                f'compute the loss with reduction="none"'
            )


def take_in(
    scores: Scores,
    slots: torch.Tensor,
    *,
    loss: torch.Tensor,
    correct: torch.Tensor | None,
    confidence: torch.Tensor | None,
    epoch: int,
) -> None:
    """Write a batch's report into the pool's scores, but for padding; a loss of nan is as inf.

    Args:
        scores: Of the pool.
        slots: int64[batch]: Of the rows; -1 is padding.
        loss: float[batch].
        correct: bool[batch]; None: nobody said.
        confidence: float[batch], in [0, 1]; None: nobody said.
        epoch: The running epoch.
    """
    rows = slots.cpu().numpy()
    valid = rows >= 0
    record(
        scores,
        rows[valid],
        loss=np.nan_to_num(_array(loss)[valid], nan=np.inf, posinf=np.inf),
        correct=None if correct is None else _array(correct)[valid].astype(np.bool_),
        confidence=None if confidence is None else _array(confidence)[valid],
        epoch=epoch,
    )


def _array(values: torch.Tensor) -> NDArray[np.float32]:
    return np.asarray(values.detach().to("cpu", torch.float32).numpy())
