"""Hide the rows with the lowest last losses, as long as the model is right and sure about them."""

import math
from dataclasses import KW_ONLY, dataclass
from itertools import pairwise
from typing import ClassVar, Literal

import numpy as np
from numpy.typing import NDArray

from dataio.base.checked import Count, Fraction, Share, Whole, checked
from dataio.plan.history import Candidates, ScoreColumn, alone
from dataio.plan.policies import Selection
from importance.schedule import run_fraction
from importance.threshold import key_bits, loss_keys, lowest

NOTED_EPOCH = 3
"""In which the log says why nothing is hidden: before, no model is sure."""


@checked
@dataclass(frozen=True)
class Kakurenbo:
    """Hide up to ``fraction * alpha(epoch)`` of the rows: those of low loss, right and confident.

    The lowest losses are candidates, of equal ones those of lower places; candidates that are wrong
    or unsure are moved back. Nothing is hidden in epoch 0, nor a row that was never reported. The
    default schedule is the authors' for CIFAR-100.

    Args:
        fraction: Largest share of the rows to hide, in [0, 1).
        tau: Least confidence of a hidden row, in [0, 1]; a softmax over classes
            (``docs/adr/0003``).
        drops: When alpha moves on, strictly increasing: fractions of the run in (0, 1), or epochs
            >= 1, such as those in which the learning rate drops (`lr_drops`).
        alphas: What ``fraction`` is multiplied by before, between and after the drops, each in
            [0, 1]; the last one stays if there are more drops.
        threshold: ``"global"``: the lowest losses of all pools. ``"pool"``: of each pool, however
            its rows compare with the others'.
        rate: What the learning rate grows by: ``"cap"``, 1 / (1 - fraction * alpha), as the authors
            do; ``"realised"``, 1 / (1 - the share that is hidden in all pools), before steps are
            topped up; ``"none"``.
        warmup_epochs: Epochs of the learning rate's warm-up, which keeps a factor of 1, >= 0.
        refresh_every: Hidden rows get a new score at the end of every so many epochs, >= 1; None:
            never, and a hidden row comes back only as the cap falls or others' losses do.

    Raises:
        ValueError: If a setting is out of range.

    Source: Nguyen et al., KAKURENBO, NeurIPS 2023, section 3.
    """

    fraction: Share = 0.3
    _: KW_ONLY
    tau: Fraction = 0.7
    drops: tuple[float, ...] = (0.3, 0.6, 0.8)
    alphas: tuple[Fraction, ...] = (1.0, 0.8, 0.6, 0.4)
    threshold: Literal["global", "pool"] = "global"
    rate: Literal["cap", "realised", "none"] = "cap"
    warmup_epochs: Whole = 1
    refresh_every: Count | None = 1

    columns: ClassVar[tuple[ScoreColumn, ...]] = ("loss", "confidence", "correct")
    """The last loss, and how the row was predicted."""

    def __post_init__(self) -> None:
        as_epochs = self.drops and all(isinstance(drop, int) for drop in self.drops)
        ends = () if as_epochs else (1.0,)
        if not all(before < after for before, after in pairwise((0, *self.drops, *ends))):
            raise ValueError(
                f"Kakurenbo: drops are {self.drops}, expected fractions of the run that increase "
                f"strictly between 0 and 1, or epochs from 1 on; give for example (0.3, 0.6) or "
                f"(30, 60)"
            )
        if not 1 <= len(self.alphas) <= len(self.drops) + 1:
            raise ValueError(
                f"Kakurenbo: {len(self.alphas)} alphas for {len(self.drops)} drops, expected at "
                f"most one alpha more than drops; give the alpha of the time before the first drop "
                f"and one for each drop"
            )

    def select(self, rows: Candidates, *, epoch: int, num_epochs: int | None) -> Selection:
        """Select the rows of one pool for an epoch. Collective where ``rows.total`` is.

        Raises:
            ValueError: If there are drops by fractions and the length of the run is not known.
        """
        cap = self.fraction * self._alpha(epoch, num_epochs)
        if epoch == 0:
            return Selection(top_up=True)
        total = rows.total if self.threshold == "global" else alone
        num_rows = rows.num_samples if self.threshold == "global" else len(rows.sample_id)
        keys = loss_keys(rows)
        candidates = lowest(keys, math.floor(cap * num_rows), total, num_bits=key_bits(rows))
        known = rows.scores[candidates]
        sure = known["correct"] & (known["confidence"] >= self.tau) & (known["epoch"] >= 0)
        hidden = candidates[sure]
        figures = {"hidden_cap": cap, "moved_back": float(len(candidates) - len(hidden))}
        nothing = (
            f"nothing is hidden: none of this node's {len(candidates)} rows of lowest loss is "
            f"right with a confidence >= {self.tau}; wait, or lower tau"
        )
        return Selection(
            # Keys are distinct: any sort gives the same order
            hidden=hidden[np.argsort(keys[hidden])],
            lr_factor=self._lr_factor(epoch, cap, len(hidden), rows),
            top_up=True,
            figures=figures,
            note=nothing if epoch == NOTED_EPOCH and len(candidates) > len(hidden) == 0 else "",
        )

    def due(self, hidden: NDArray[np.int64], *, epoch: int) -> NDArray[np.int64]:
        """Choose all hidden slots every ``refresh_every`` epochs, and none in the others."""
        due = self.refresh_every is not None and epoch % self.refresh_every == 0
        return hidden if due else hidden[:0]

    def _alpha(self, epoch: int, num_epochs: int | None) -> float:
        done: float = epoch
        if not all(isinstance(drop, int) for drop in self.drops):
            otherwise = "Kakurenbo(drops=(), alphas=(1.0,)), which never hides less"
            done = run_fraction("Kakurenbo", epoch, num_epochs, otherwise=otherwise)
        passed = sum(done >= drop for drop in self.drops)
        return self.alphas[min(passed, len(self.alphas) - 1)]

    def _lr_factor(self, epoch: int, cap: float, num_hidden: int, rows: Candidates) -> float:
        share = cap if self.rate == "cap" else 0.0
        if self.rate == "realised":
            share = int(rows.total(np.array([num_hidden]))[0]) / rows.num_samples
        return 1 / (1 - share) if epoch >= self.warmup_epochs else 1.0
