"""Hide the rows with the lowest last losses, as long as the model is right and sure about them."""

import math
from dataclasses import KW_ONLY, dataclass
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from dataio.policies import Scores, Selection
from importance.schedule import check_fraction, run_fraction


@dataclass(frozen=True)
class Kakurenbo:
    """Hide up to ``fraction * alpha(epoch)`` of each pool: rows of low loss, right and confident.

    Nothing is hidden in epoch 0, nor a row that was never reported. The learning rate grows by the
    cap, not by what was hidden, so every rank computes the same factor. The default schedule is the
    authors' for CIFAR-100.

    Args:
        fraction: Largest share of a pool to hide, in [0, 1).
        tau: Least confidence of a hidden row, in [0, 1]; a softmax over classes
            (``docs/adr/0003``).
        drops: Fractions of the run at which alpha moves on, strictly increasing, in (0, 1).
        alphas: What ``fraction`` is multiplied by before, between and after the drops,
            each in [0, 1].
        warmup_epochs: Epochs of the learning rate's warm-up, which keeps a factor of 1, >= 0.
        refresh_every: Hidden rows get a new score at the end of every so many epochs, >= 1.

    Raises:
        ValueError: If a setting is out of range.

    Source: Nguyen et al., KAKURENBO, NeurIPS 2023.
    """

    fraction: float = 0.3
    _: KW_ONLY
    tau: float = 0.7
    drops: tuple[float, ...] = (0.3, 0.6, 0.8)
    alphas: tuple[float, ...] = (1.0, 0.8, 0.6, 0.4)
    warmup_epochs: int = 1
    refresh_every: int = 1

    def __post_init__(self) -> None:
        check_fraction("Kakurenbo: fraction", self.fraction, below_one=True)
        check_fraction("Kakurenbo: tau", self.tau)
        for alpha in self.alphas:
            check_fraction("Kakurenbo: a value of alphas", alpha)
        if not all(before < after for before, after in pairwise((0.0, *self.drops, 1.0))):
            raise ValueError(
                f"Kakurenbo: drops are {self.drops}, expected fractions of the run that increase "
                f"strictly between 0 and 1; divide epochs by the number of epochs"
            )
        if len(self.alphas) != len(self.drops) + 1:
            raise ValueError(
                f"Kakurenbo: {len(self.alphas)} alphas for {len(self.drops)} drops, expected one "
                f"alpha more than drops; give the alpha of the time before the first drop too"
            )
        if self.warmup_epochs < 0:
            raise ValueError(
                f"Kakurenbo: warmup_epochs is {self.warmup_epochs}, expected >= 0; "
                f"0 means no warm-up"
            )
        if self.refresh_every < 1:
            raise ValueError(
                f"Kakurenbo: refresh_every is {self.refresh_every}, expected >= 1; "
                f"1 means every epoch"
            )

    @property
    def uses_scores(self) -> bool:
        """Whether reports change what it selects."""
        return True

    def select(
        self, scores: Scores, *, epoch: int, num_epochs: int | None, rng: np.random.Generator
    ) -> Selection:
        """Select the rows of one pool for an epoch; draws no random numbers.

        Of equal losses the lower slot is hidden first, so a pool hides at most
        ``floor(fraction * alpha * num_slots)`` rows.

        Raises:
            ValueError: If there are drops and the length of the run is not known.
        """
        cap = self.fraction * self._alpha(epoch, num_epochs)
        if epoch == 0:
            return Selection(top_up=True)
        # A loss that is not a number counts as the highest.
        loss = np.fmin(scores["loss"], np.float32(np.inf))
        candidates = _lowest(loss, math.floor(cap * len(scores)))
        known = scores[candidates]
        sure = known["correct"] & (known["confidence"] >= self.tau) & (known["epoch"] >= 0)
        hidden = candidates[sure]
        factor = 1 / (1 - cap) if epoch >= self.warmup_epochs else 1.0
        order = np.argsort(loss[hidden], kind="stable")
        return Selection(hidden=hidden[order], lr_factor=factor, top_up=True)

    def due(self, hidden: NDArray[np.int64], *, epoch: int) -> NDArray[np.int64]:
        """Choose all hidden slots every ``refresh_every`` epochs, else none."""
        return hidden if epoch % self.refresh_every == 0 else hidden[:0]

    def _alpha(self, epoch: int, num_epochs: int | None) -> float:
        if not self.drops:
            return self.alphas[0]
        otherwise = "Kakurenbo(drops=(), alphas=(1.0,)), which never hides less"
        done = run_fraction("Kakurenbo", epoch, num_epochs, otherwise=otherwise)
        return self.alphas[sum(done >= drop for drop in self.drops)]


def _lowest(loss: NDArray[np.float32], count: int) -> NDArray[np.int64]:
    """int64[count]: Slots of the lowest losses; of equal ones the lower slots, in order."""
    if count == 0:
        return np.empty(0, np.int64)
    # Linear time: only what is hidden gets sorted.
    largest = np.partition(loss, count - 1)[count - 1]
    below = np.flatnonzero(loss < largest)
    return np.concatenate([below, np.flatnonzero(loss == largest)[: count - len(below)]])
