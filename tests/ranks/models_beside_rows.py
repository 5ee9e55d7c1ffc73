"""Train apart on rows that are exchanged, models exchanged beside them; each alone is the same.

Arguments: report directory, cache directory, "thread" or "polling" for the rows.
"""

import json
import os
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import xxhash
from torch import nn

from dataio import Array, Loader, Reports, Workers
from dataio.world import World, discover_world
from importance import Kakurenbo
from shuffle import ModelExchange, Partial
from tests.dataio.store.test_quota import LargeShards

FIELDS = {"x": Array("x", (1000,), "int32")}
EPOCHS = 3
EVERY, OVERLAP = 5, 3


class Polling:
    """A world whose transport only one thread may call, but for whoever asks the other."""

    def __init__(self, world: World) -> None:
        self._world = world

    threaded = False

    def __getattr__(self, name: str) -> Any:
        return getattr(self._world, name)


class Model:
    """One replica's model; without others beside it, it trains alone."""

    def __init__(self, world: World | None) -> None:
        self.net = nn.Sequential(nn.Linear(1000, 40), nn.BatchNorm1d(40), nn.Linear(40, 1))
        for value in self.net.parameters():
            weights = torch.sin(torch.arange(value.numel()) + 0.5).reshape(value.shape)
            value.data.copy_(weights / 30)
        self.optimizer = torch.optim.SGD(self.net.parameters(), lr=0.01, momentum=0.9)
        self.exchange = world and ModelExchange(
            self.net, self.optimizer, world=world, every=EVERY, overlap=OVERLAP
        )

    def train(self, x: torch.Tensor) -> None:
        self.optimizer.zero_grad()
        self.net(x.float() / 3000).pow(2).mean().backward()
        self.optimizer.step()
        if self.exchange:
            self.exchange.step()

    def hash(self) -> str:
        if self.exchange:
            self.exchange.flush()
        values = self.net.state_dict().values()
        return xxhash.xxh3_64_hexdigest(b"".join(value.numpy().tobytes() for value in values))


def train(world: World, root: Path, *, model: Model | None) -> tuple[list[torch.Tensor], Any]:
    """Drive a loader; hand back what it delivered, and where its rows are in the end."""
    given = []
    with Loader(
        LargeShards(), cache=root, world=world, batch_size=8, fields=FIELDS, shuffle=Partial(0.5),
        importance=Kakurenbo(0.2, drops=(), alphas=(1.0,), warmup_epochs=0),
        workers=Workers(threads=0), seed=5,
        reports=Reports(progress=False),
    ) as loader:  # fmt: skip
        for _ in loader.epochs(EPOCHS):
            for batch in loader:
                given.append(batch["x"].clone())
                loader.report(batch, batch["sample_id"].float(), batch["sample_id"] % 2 == 0)
                if model is not None:
                    model.train(batch["x"])
            for batch in loader.refresh():
                loader.report(batch, batch["sample_id"].float(), batch["sample_id"] % 2 == 0)
        stats = loader.stats()
    return given, stats


def beside_and_alone(world: World, root: Path, driver: str) -> dict[str, Any]:
    """Rows and models together, then each alone, all on one world."""
    rows_world: Any = world if driver == "thread" else Polling(world)
    model = Model(world)
    together, stats = train(rows_world, root / "together", model=model)
    alone, _ = train(rows_world, root / "alone", model=None)
    again = Model(world)
    for x in alone:
        again.train(x)
    apart = Model(None)
    for x in alone:
        apart.train(x)
    return {
        "rows": len(together) == len(alone) and all(map(torch.equal, together, alone)),
        "models": model.hash() == again.hash(),
        "exchanged": model.hash() != apart.hash() and stats["exchanged_rows"] > 0,
        "rounds": model.exchange.stats()["rounds"] if model.exchange else 0,
        "steps": len(alone),
    }


def main() -> None:
    uses_torch = "TORCHELASTIC_RUN_ID" in os.environ
    if uses_torch:
        dist.init_process_group("gloo")
    with discover_world(timeout_s=60) as world:
        report = beside_and_alone(world, Path(sys.argv[2]), sys.argv[3])
        rank = world.rank
        world.barrier(doing="ending")
    Path(sys.argv[1], f"{rank}.json").write_text(json.dumps(report))
    if uses_torch:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
