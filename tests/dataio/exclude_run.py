"""Train with some samples left out, and look on: what each rank was given, step by step."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from dataio import Loader, Reports, Workers
from dataio.plan.policies import Importance
from dataio.world import World
from importance import Full, InfoBatch, Kakurenbo, KeepAgreed, RandomPrune
from tests.importance.hidden import losses
from tests.memory_source import FIELDS, MemorySource

NUM_SAMPLES = 103
BATCH = 4
EPOCHS = 3

POLICIES: dict[str, Importance | None] = {
    "none": None,
    "full": Full(columns=("loss",)),
    "kakurenbo": Kakurenbo(0.4, drops=(), alphas=(1.0,), warmup_epochs=0),
    "keep_agreed": KeepAgreed(0.6, begins=1),
    "infobatch": InfoBatch(0.5, delta=1.0),
    "random": RandomPrune(0.3, delta=1.0),
}


@dataclass
class SeenByRank:
    """What one rank saw.

    Attributes:
        batches: By epoch, the valid sample ids of each batch.
        weights: By epoch, the weights of each batch, padding included.
        refreshed: By epoch, sample ids.
        steps: By epoch, as the loader said.
        hidden: By epoch, samples of this node that the policy hid.
        stats: Of each epoch.
    """

    batches: list[list[list[int]]] = field(default_factory=list)
    weights: list[list[list[float]]] = field(default_factory=list)
    refreshed: list[list[int]] = field(default_factory=list)
    steps: list[int] = field(default_factory=list)
    hidden: list[list[int]] = field(default_factory=list)
    stats: list[dict[str, float]] = field(default_factory=list)


def make(world: World, root: Path, **options: object) -> Loader:
    """Open a loader with small batches over samples without files."""
    chosen: dict[str, object] = {
        "cache": root, "batch_size": BATCH, "seed": 3, "fields": FIELDS,
        "workers": Workers(threads=0), "reports": Reports(progress=False),
    }  # fmt: skip
    source = options.pop("source", None) or MemorySource(NUM_SAMPLES)
    return Loader(source, world=world, **chosen | options)  # type: ignore[arg-type]


def watch(loader: Loader, *, epochs: int = EPOCHS, stop: int | None = None) -> SeenByRank:
    """Train to the end, or for some steps."""
    seen, left = SeenByRank(), stop
    for epoch in loader.epochs(epochs):
        plan, ids = loader._run.running.plan, loader._session.pool.sample_ids
        seen.hidden.append(sorted(ids[plan.selection.hidden].tolist()))
        seen.batches.append([])
        seen.weights.append([])
        seen.refreshed.append([])
        seen.steps.append(len(loader))
        seen.stats.append(loader.stats())
        for batch in loader:
            loader.report(batch, *losses(batch["sample_id"], epoch))
            seen.batches[-1].append(batch["sample_id"][batch["slot"] >= 0].tolist())
            seen.weights[-1].append(batch["weight"].tolist())
            if left is not None:
                left -= 1
                if not left:
                    return seen
        for batch in loader.refresh():
            loader.report(batch, *losses(batch["sample_id"], epoch))
            seen.refreshed[-1] += batch["sample_id"][batch["slot"] >= 0].tolist()
    return seen


def trained(everyone: Sequence[SeenByRank], epoch: int) -> list[int]:
    """All ranks' samples of an epoch, ascending."""
    return sorted(i for seen in everyone for batch in seen.batches[epoch] for i in batch)


def some(share: float, *, seed: int = 0, num_samples: int = NUM_SAMPLES) -> list[int]:
    """Choose a share of the samples."""
    rng = np.random.default_rng(seed)
    return sorted(rng.permutation(num_samples)[: round(share * num_samples)].tolist())
