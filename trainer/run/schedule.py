"""The learning rate of an epoch, or of a moment in it: a pure function."""

import math
from collections.abc import Sequence
from typing import Literal


def learning_rate(
    epoch: float,
    *,
    num_epochs: int,
    lr: float,
    schedule: Literal["cosine", "steps"] = "cosine",
    warmup_epochs: int = 0,
    milestones: Sequence[int] = (),
    decay: float = 0.1,
) -> float:
    """Compute an epoch's learning rate, before the importance policy's factor.

    Args:
        epoch: In [0, num_epochs); 1.5: half of epoch 1 is done.
        num_epochs: Length of the run.
        lr: The rate right after the warm-up.
        schedule: ``"cosine"`` falls to 0 at the end; ``"steps"`` is multiplied by ``decay`` at
            each of ``milestones``.
        warmup_epochs: Epochs of a linear rise that stays below ``lr``.
        milestones: Epochs.
        decay: In (0, 1].
    """
    if epoch < warmup_epochs:
        return lr * (epoch + 1) / (warmup_epochs + 1)
    if schedule == "steps":
        return lr * decay ** sum(epoch >= milestone for milestone in milestones)
    done = (epoch - warmup_epochs) / max(num_epochs - warmup_epochs, 1)
    return lr * (1 + math.cos(math.pi * done)) / 2
