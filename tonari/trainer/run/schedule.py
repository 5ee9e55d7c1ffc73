"""The learning rate at a moment of a run: a pure function."""

import math
from collections.abc import Sequence

from tonari.trainer.config.optimizer import ScheduleKind


def learning_rate(
    moment: float,
    *,
    length: float,
    lr: float,
    schedule: ScheduleKind = "cosine",
    min_lr: float = 0.0,
    warmup: float = 0,
    tick: float = 1,
    milestones: Sequence[int] = (),
    decay: float = 0.1,
    decay_fraction: float = 0.1,
) -> float:
    """Compute the learning rate of a moment, before the importance policy's factor.

    All times are epochs, or all are steps.

    Args:
        moment: In [0, length): what is done; 1.5 epochs: half of epoch 1 is done.
        length: Of the run.
        lr: The rate right after the warm-up.
        schedule: ``"cosine"`` and ``"linear"`` fall to ``min_lr`` at the end; ``"steps"`` is
            multiplied by ``decay`` at each of ``milestones``; ``"wsd"`` (warm-up, stable, decay)
            stays, and falls on a line over the last ``decay_fraction`` of the length.
        min_lr: The lowest rate after the warm-up.
        warmup: Time of a linear rise that stays below ``lr``.
        tick: Time between two changes of the rate: the rise begins one of its steps above 0.
        milestones: Times.
        decay: In (0, 1].
        decay_fraction: In (0, 1].

    Source: of ``"wsd"``, Hu et al., MiniCPM, 2024.
    """
    if moment < warmup:
        return lr * (moment + tick) / (warmup + tick)
    if schedule == "steps":
        return max(lr * decay ** sum(moment >= milestone for milestone in milestones), min_lr)
    if schedule == "wsd":
        left = min((length - moment) / (decay_fraction * length), 1.0)
        return min_lr + (lr - min_lr) * max(left, 0.0)
    done = min((moment - warmup) / max(length - warmup, tick), 1.0)
    if schedule == "linear":
        return min_lr + (lr - min_lr) * (1 - done)
    return min_lr + (lr - min_lr) * (1 + math.cos(math.pi * done)) / 2
