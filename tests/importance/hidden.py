"""Train on a source without files, with losses that follow from (sample, epoch), and look on."""

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

import shuffle
from dataio import Loader, Reports, Workers
from dataio.plan.history import Candidates, ScoreColumn
from dataio.plan.policies import ByCost, ByFields, Importance, Selection, Shuffle
from dataio.world import World
from importance import (
    Auto,
    CostAware,
    Forgetting,
    Full,
    InfoBatch,
    Kakurenbo,
    KeepAgreed,
    Learnable,
    RandomPrune,
    SelectiveBackprop,
    SeTa,
    StoppedLearning,
    Weighted,
)
from tests.memory_source import FIELDS, MemorySource

NUM_SAMPLES = 97
NUM_EPOCHS = 6

POLICIES: dict[str, Importance] = {
    "auto": Auto(0.6, begins=2, second_guess=1.0),
    # What rows cost is measured, so no two worlds need agree: tests/dataio/test_costs.py
    "cost_aware": CostAware(0.5, by_cost=False, value="loss"),
    "full": Full(columns=("loss",)),
    "kakurenbo": Kakurenbo(0.4, alphas=(1.0, 0.8), drops=(3,), rate="realised"),
    "keep_agreed": KeepAgreed(0.6, begins=1),
    "learnable": Learnable(0.6, least_fall=0.9, begins=3, refresh_every=1),
    "infobatch": InfoBatch(0.5, delta=0.8),
    "selective_backprop": SelectiveBackprop(0.4),
    "random": RandomPrune(0.3, delta=0.8),
    "weighted": Weighted(num_samples=70),
    "forgetting": Forgetting(0.4, begins=1),
    "seta": SeTa(0.1, groups=5, window=0.6),
    "stopped_learning": StoppedLearning(2.0),
}
SHUFFLES: dict[str, Callable[[], Shuffle]] = {
    "local": shuffle.Local,
    "partial": lambda: shuffle.Partial(0.3),
    "dealt anew": lambda: shuffle.Global(moves=True),
    "all on every node": shuffle.Global,
}


@dataclass(frozen=True)
class Watched:
    """A policy, and what it selected: a list per epoch of sample ids, and weights by sample."""

    policy: Importance
    hidden: dict[int, list[int]] = field(default_factory=dict, repr=False)
    weights: dict[int, dict[int, float]] = field(default_factory=dict, repr=False)
    lr_factors: list[float] = field(default_factory=list, repr=False)

    @property
    def columns(self) -> tuple[ScoreColumn, ...]:
        return self.policy.columns

    @property
    def by_fields(self) -> tuple[str, ...]:
        return self.policy.by_fields if isinstance(self.policy, ByFields) else ()

    @property
    def by_cost(self) -> bool:
        return isinstance(self.policy, ByCost) and self.policy.by_cost

    def select(self, rows: Candidates, *, epoch: int, num_epochs: int | None) -> Selection:
        chosen = self.policy.select(rows, epoch=epoch, num_epochs=num_epochs)
        self.hidden[epoch] = sorted(rows.sample_id[chosen.hidden].tolist())
        weights = np.ones(len(rows.sample_id)) if chosen.weights is None else chosen.weights
        told = dict(zip(rows.sample_id.tolist(), weights.tolist(), strict=True))
        self.weights[epoch] = {i: w for i, w in told.items() if i not in set(self.hidden[epoch])}
        self.lr_factors.append(chosen.lr_factor)
        return chosen

    def due(self, hidden: NDArray[np.int64], *, epoch: int) -> NDArray[np.int64]:
        return self.policy.due(hidden, epoch=epoch)


def losses(ids: torch.Tensor, epoch: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Losses with ties, exact in any number of rows at once; four of five rows are easy."""
    loss = ((ids * 37 + epoch * 11) % 61).float() / 16
    return loss, ids % 5 > 0, torch.where(ids % 7 > 0, 0.9, 0.4)


@dataclass(frozen=True)
class Seen:
    """What one rank saw of a run.

    Attributes:
        watched: Its policy.
        batches: By epoch, (sample ids, weights) of each batch; -1 is padding.
        refreshed: By epoch, sample ids.
        steps: By epoch, as the loader said.
    """

    watched: Watched
    batches: list[list[tuple[list[int], list[float]]]] = field(default_factory=list)
    refreshed: list[list[int]] = field(default_factory=list)
    steps: list[int] = field(default_factory=list)


def train(world: World, root: Path, policy: Importance, shuffled: Shuffle) -> Seen:
    """Run all epochs on one rank."""
    seen = Seen(Watched(policy))
    with Loader(
        MemorySource(NUM_SAMPLES), cache=root, world=world, batch_size=4, fields=FIELDS, seed=3,
        workers=Workers(threads=0), reports=Reports(progress=False), shuffle=shuffled,
        importance=seen.watched,
    ) as loader:  # fmt: skip
        for epoch in loader.epochs(NUM_EPOCHS):
            seen.steps.append(len(loader))
            seen.batches.append([])
            seen.refreshed.append([])
            for batch in loader:
                loader.report(batch, *losses(batch["sample_id"], epoch))
                ids = torch.where(batch["slot"] >= 0, batch["sample_id"], -1)
                seen.batches[-1].append((ids.tolist(), batch["weight"].tolist()))
            for batch in loader.refresh():
                loader.report(batch, *losses(batch["sample_id"], epoch))
                seen.refreshed[-1] += batch["sample_id"][batch["slot"] >= 0].tolist()
    return seen


def hidden_of_all(hidden_by_rank: list[dict[int, list[int]]]) -> list[list[int]]:
    """Bring together what the ranks' policies hid: by epoch, ascending, each sample once."""
    epochs = range(NUM_EPOCHS)
    return [sorted({i for told in hidden_by_rank for i in told[epoch]}) for epoch in epochs]
