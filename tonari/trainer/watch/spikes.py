"""Steps whose loss is far above that of the steps around them. Pure."""

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

NEAR = 50
"""Lines before one, and behind it, that it is compared with."""

LEAST_SPREAD = 0.01
"""Of the median: what the spread of the losses around is taken for at least."""


@dataclass(frozen=True)
class Logged:
    """A line of a run's metrics.

    Attributes:
        epoch: From 0 on.
        steps: Optimizer steps, from 1 on, whose mean loss it has.
        loss: Not finite where the run's was not.
    """

    epoch: int
    steps: range
    loss: float


@dataclass(frozen=True)
class Spike:
    """Steps whose loss rose.

    Attributes:
        logged: Their line.
        usual: Median loss of the lines around.
    """

    logged: Logged
    usual: float

    @property
    def excess(self) -> float:
        """By how much."""
        return self.logged.loss - self.usual


def find_spikes(lines: Sequence[Logged], *, times: float) -> tuple[list[Spike], list[Spike]]:
    """Find the lines whose loss is far above those around.

    Args:
        lines: In their order.
        times: How far above their median, in their spread: the median distance from it, times
            1.4826, which is the standard deviation of normal ones.

    Returns:
        The spikes, and apart from them those of the start of training, which is before the first
        line that is no higher than the median around it: its loss is high as it is yet to fall.
    """
    found: tuple[list[Spike], list[Spike]] = ([], [])
    is_start = True
    for number, line in enumerate(lines):
        around = lines[max(number - NEAR, 0) : number + NEAR + 1]
        losses = [one.loss for one in around if math.isfinite(one.loss)]
        usual = statistics.median(losses) if losses else math.inf
        spread = 1.4826 * statistics.median(abs(loss - usual) for loss in losses) if losses else 0
        is_start = is_start and line.loss > usual
        if not math.isfinite(line.loss) or line.loss > usual + times * max(
            spread, LEAST_SPREAD * abs(usual)
        ):
            found[is_start and math.isfinite(line.loss)].append(Spike(line, usual))
    return found
