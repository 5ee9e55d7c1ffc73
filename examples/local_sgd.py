"""Replicas that train apart, each on classes of its own, and exchange models instead of rows.

    mpiexec -n 4 python examples/local_sgd.py
    mpiexec -n 4 python examples/local_sgd.py --saved runs/local-sgd --epochs 3
    mpiexec -n 4 python examples/local_sgd.py --saved runs/local-sgd --resume

The points are made here, sorted by class: with `Local` shuffling no node ever sees another's. Ranks
of one machine share its rows; TONARI_RANKS_PER_NODE=1 keeps them apart as nodes would be.
"""

import argparse
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn
from torch.nn.functional import cross_entropy

import dataio
import shuffle
from tonari.trainer import seeded

NUM_TRAIN, NUM_VAL, NUM_CLASSES, SIZE = 960, 400, 4, 8

Mode = Literal["average", "swap"]


def make_points(count: int, *, seed: int) -> dict[str, NDArray[np.generic]]:
    rng = np.random.default_rng(seed)
    labels = np.sort(rng.integers(NUM_CLASSES, size=count))
    points = 2.0 * np.eye(NUM_CLASSES, SIZE)[labels] + rng.normal(size=(count, SIZE))
    return {"point": points.astype(np.float32), "label": labels}


def make_loader() -> dataio.Loader:
    return dataio.Loader(
        dataio.NumpySource(make_points(NUM_TRAIN, seed=0)), batch_size=16, seed=0,
        fields={"point": dataio.Array("point", (SIZE,), "float32"), "label": dataio.Int("label")},
        shuffle=shuffle.Local(),
    )  # fmt: skip


class Replica:
    """One replica's model, what trains it, and what it exchanges, saved together."""

    def __init__(self, loader: dataio.Loader, mode: Mode, saved: Path | None) -> None:
        self.loader, self.saved = loader, saved
        # Equal on all replicas at first, and without DistributedDataParallel
        self.model = seeded(
            lambda: nn.Sequential(nn.Linear(SIZE, 32), nn.ReLU(), nn.Linear(32, NUM_CLASSES)),
            seed=0,
        )
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.02, momentum=0.9)
        self.exchange = shuffle.ModelExchange(
            self.model, self.optimizer, world=loader.world, every=5, mode=mode
        )

    def epoch(self) -> None:
        self.model.train()
        for batch in self.loader:
            cross_entropy(self.model(batch["point"]), batch["label"]).backward()  # type: ignore[no-untyped-call]
            self.optimizer.step()
            self.optimizer.zero_grad()
            self.exchange.step()
        if self.saved:
            self.save(self.saved)

    def save(self, saved: Path) -> None:
        self.loader.save(saved / "loader")
        parts: list[Any] = [self.model, self.optimizer, self.exchange]
        torch.save([part.state_dict() for part in parts], self.file(saved))

    def restore(self, saved: Path) -> None:
        model, optimizer, exchange = torch.load(self.file(saved), weights_only=True)
        self.model.load_state_dict(model)
        self.optimizer.load_state_dict(optimizer)
        self.exchange.load_state_dict(exchange)
        self.loader.restore(saved / "loader")

    def file(self, saved: Path) -> Path:
        return saved / f"replica-{self.loader.world.replica}.pt"

    @torch.no_grad()
    def accuracy(self) -> float:
        """Share of points of all classes that this replica's model gets right, mean of all."""
        self.model.eval()
        points = make_points(NUM_VAL, seed=1)
        right = self.model(torch.from_numpy(points["point"])).argmax(1).numpy() == points["label"]
        world = self.loader.world
        total = world.allreduce(np.array([right.mean()]), op="sum", doing="evaluating")
        return float(total[0] / world.world_size)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument("--mode", choices=["average", "swap"], default="average")
    parser.add_argument("--saved", type=Path, help="directory for checkpoints, seen by all nodes")
    parser.add_argument("--resume", action="store_true", help="go on from --saved")
    given = parser.parse_args()
    with make_loader() as loader:
        replica = Replica(loader, given.mode, given.saved)
        if given.resume:
            replica.restore(given.saved)
        for epoch in loader.epochs(given.epochs):
            replica.epoch()
            accuracy = replica.accuracy()
            if loader.world.rank == 0:
                print(f"epoch {epoch}: accuracy {accuracy:.2f} by one replica", flush=True)
        replica.exchange.average_all()
        accuracy, stats = replica.accuracy(), replica.exchange.stats()
        if loader.world.rank == 0:
            print(
                f"mean model: accuracy {accuracy:.2f} after {stats['rounds']} rounds of "
                f"{replica.exchange.round_bytes} bytes, {stats['overlap_fraction']:.0%} overlapped"
            )


if __name__ == "__main__":
    main()
