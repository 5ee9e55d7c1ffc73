"""What the shipped loader trains, holds and remembers, epoch by epoch, where rows move."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch

from dataio import Loader, Reports, Workers
from dataio.plan.history import Candidates, ScoreColumn
from dataio.plan.layout import Layout
from dataio.plan.policies import Selection, Shuffle
from dataio.world import World
from tests.memory_source import FIELDS, MemorySource

STEPS = 7
"""About so many an epoch."""

Look = Callable[[Loader], Any]


@dataclass(frozen=True)
class Watching:
    """An importance policy that keeps what it is shown of its node's rows as each epoch begins.

    Attributes:
        hidden_fraction: Of the rows it hides, other ones each epoch.
        shown: Samples and losses of all slots, by epoch.
    """

    hidden_fraction: float = 0.0
    columns: tuple[ScoreColumn, ...] = ("loss",)
    shown: dict[int, tuple[list[int], list[float]]] = field(
        default_factory=dict, repr=False, compare=False
    )

    def select(self, rows: Candidates, *, epoch: int, num_epochs: int | None) -> Selection:
        self.shown[epoch] = rows.sample_id.tolist(), rows.scores["loss"].tolist()
        num_hidden = int(self.hidden_fraction * len(rows.scores))
        return Selection(np.argsort(rows.places)[:num_hidden])

    def due(self, hidden: np.ndarray, *, epoch: int) -> np.ndarray:
        return hidden[:0]


def score_of(sample_id: int, epoch: int) -> float:
    """A score that names its sample and the epoch that it was trained in."""
    return sample_id + 1000.0 * epoch


def open_loader(
    world: World, root: Path, policy: Shuffle, source: MemorySource, *,
    seed: int, hidden_fraction: float = 0.0,
) -> tuple[Loader, Watching]:  # fmt: skip
    layout = Layout(world.replicas_per_node, source.num_samples)
    watching = Watching(hidden_fraction)
    loader = Loader(
        source, batch_size=max(layout.share_rows(layout.num_replicas - 1) // STEPS, 1),
        fields=FIELDS, cache=root, shuffle=policy, importance=watching, seed=seed, world=world,
        workers=Workers(threads=0), reports=Reports(progress=False),
    )  # fmt: skip
    return loader, watching


def train_epoch(loader: Loader, source: MemorySource) -> dict[str, Any]:
    """Train and report what is left of an epoch.

    Returns:
        Slots and samples trained, and those samples of which any byte is not their own.
    """
    slots, trained, wrong = list[int](), list[int](), list[int]()
    for batch in loader:
        losses = torch.zeros(len(batch["slot"]))
        each = zip(batch["slot"].tolist(), batch["sample_id"].tolist(), strict=True)
        for row, (slot, sample_id) in enumerate(each):
            if slot < 0:
                continue
            slots.append(slot)
            trained.append(sample_id)
            losses[row] = score_of(sample_id, loader.epoch)
            whole = bytes(batch["data"][row]) == source.payload(sample_id)
            if not whole or batch["label"][row] != sample_id % 10:
                wrong.append(sample_id)
        loader.report(batch, losses)
    return {"slots": slots, "trained": trained, "wrong": wrong}


def run_epochs(
    world: World, root: Path, policy: Shuffle, source: MemorySource, *,
    epochs: int, seed: int, hidden_fraction: float = 0.0, look: Look = lambda loader: None,
) -> list[dict[str, Any]]:  # fmt: skip
    """Train all epochs on one rank.

    Args:
        world: All ranks.
        root: Of the caches.
        policy: Which node holds which row.
        source: Of the samples; of its own on each rank, as it counts what is read.
        epochs: How many.
        seed: Of the loader.
        hidden_fraction: Of a node's rows are not trained in an epoch.
        look: Asked as each epoch begins, while no rank trains.

    Returns:
        For each epoch what `train_epoch` tells; the samples and losses of the node's slots as it
        began, and its samples by the policy's own trace; rows that this rank had
        exchanged, and rows read from the source since all were staged; what ``look`` saw.
    """
    layout, history = Layout(world.replicas_per_node, source.num_samples), list[dict[str, Any]]()
    loader, watching = open_loader(
        world, root, policy, source, seed=seed, hidden_fraction=hidden_fraction
    )
    with loader:
        for epoch in loader.epochs(epochs):
            if not epoch:
                source.rows_read.clear()
            ids, losses = watching.shown[epoch]
            world.barrier(doing="begin to look")
            seen = look(loader)
            world.barrier(doing="end looking")
            traced = policy.placement(layout, node=world.node, epoch=epoch, seed=seed).tolist()
            found = {
                "ids": ids, "losses": losses, "traced": traced, "seen": seen,
                "exchanged": loader.stats()["exchanged_rows"],
            }  # fmt: skip
            found |= train_epoch(loader, source) | {"read": list(source.rows_read)}
            history.append(found)
    return history


def check_epochs(
    histories: list[list[dict[str, Any]]], replicas: Sequence[int], *, num_samples: int,
    hidden_fraction: float = 0.0,
) -> None:  # fmt: skip
    """Check every sample's owner, bytes and score, and that the visible ones are trained once.

    Args:
        histories: Of all ranks.
        replicas: Ranks of each node.
        num_samples: Of the source.
        hidden_fraction: Of a node's rows were not trained in an epoch.

    Raises:
        AssertionError: If there is anything else than what must be.
    """
    everything = list(range(num_samples))
    firsts = np.cumsum([0, *replicas[:-1]]).tolist()
    expected = dict.fromkeys(everything, np.inf)
    for epoch in range(len(histories[0])):
        now = [history[epoch] for history in histories]
        owned = [sample for first in firsts for sample in now[first]["ids"]]
        assert sorted(owned) == everything, f"epoch {epoch}: every sample has one owner"
        for node, first in enumerate(firsts):
            for rank in now[first : first + replicas[node]]:
                assert rank["ids"] == now[first]["ids"], "ranks of a node see the same rows"
                assert len(rank["ids"]) == len(histories[first][0]["ids"]), "a pool keeps its size"
                assert rank["traced"] == rank["ids"], "the trace is what happened"
                scores = [expected[sample] for sample in rank["ids"]]
                assert rank["losses"] == scores, f"epoch {epoch}: scores follow their rows"
                assert [rank["ids"][slot] for slot in rank["slots"]] == rank["trained"]
                assert rank["wrong"] == [], "every byte is the sample's own"
                assert rank["read"] == [], "no row was lost and read from the source again"
        trained = [sample for rank in now for sample in rank["trained"]]
        assert len(set(trained)) == len(trained), f"epoch {epoch}: no sample is trained twice"
        hidden = sum(int(hidden_fraction * len(now[first]["ids"])) for first in firsts)
        assert len(trained) == num_samples - hidden, f"epoch {epoch}: no sample is left out"
        expected |= {sample: score_of(sample, epoch) for sample in trained}
