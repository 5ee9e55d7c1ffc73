"""The mean of a replica's recent losses, added up without holding up a step."""

import torch
from torch import Tensor

STEPS_AT_ONCE = 16
"""Batches whose losses are added up together: between two steps all code is cold, and each call of
torch costs ten times what it costs the second time."""


class MeanLoss:
    """Adds up weighted losses on the device that has them; waits for it in `take` alone."""

    def __init__(self) -> None:
        self._sum, self._num_batches = torch.zeros((), dtype=torch.float64), 0
        self._weighted: list[Tensor] = []

    def add(self, loss: Tensor, weight: Tensor) -> None:
        """Take in a batch: floating[batch] each, which the caller may change afterwards."""
        self._weighted.append(loss * weight)
        if len(self._weighted) >= STEPS_AT_ONCE:
            self._add_up()

    def take(self) -> float | None:
        """Return the mean over the batches since the last call; None if there were none."""
        self._add_up()
        if not self._num_batches:
            return None
        mean = float(self._sum) / self._num_batches
        self._sum, self._num_batches = torch.zeros((), dtype=torch.float64), 0
        return mean

    def _add_up(self) -> None:
        if self._weighted:
            means = torch.stack(self._weighted).double().mean(dim=1)
            self._sum = self._sum.to(means.device) + means.sum()
        self._num_batches += len(self._weighted)
        self._weighted.clear()
