"""Train apart on discovered ranks and exchange models; stop and resume in the middle of a round."""

import io
import json
import sys
from pathlib import Path
from typing import Any

import torch
import xxhash
from torch import nn

from dataio.world import World, discover_world
from shuffle import ModelExchange

EVERY, OVERLAP, STEPS, STOP = 4, 3, 19, 9
WIDTH = 400
"""Its state is over a megabyte: far above what MPI sends before the receiver asks."""


class ExchangeRun:
    """One replica: momentum on batches that are a function of replica and step."""

    def __init__(self, world: World, mode: Any) -> None:
        torch.manual_seed(0)
        self.model = nn.Sequential(
            nn.Linear(8, WIDTH), nn.BatchNorm1d(WIDTH), nn.Linear(WIDTH, WIDTH)
        )
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.01, momentum=0.9)
        self.exchange = ModelExchange(
            self.model, self.optimizer, world=world, every=EVERY, overlap=OVERLAP, mode=mode
        )
        self.world, self.steps = world, 0

    def to(self, stop: int) -> None:
        while self.steps < stop:
            source = torch.Generator().manual_seed(1000 * self.world.replica + self.steps)
            self.optimizer.zero_grad()
            loss = self.model(torch.randn(4, 8, generator=source)).pow(2).mean()
            loss.backward()
            self.optimizer.step()
            self.steps += 1
            self.exchange.step()

    def state(self) -> list[Any]:
        return [self.model.state_dict(), self.optimizer.state_dict(), self.exchange.state_dict()]

    def load(self, file: io.BytesIO) -> None:
        model, optimizer, exchange = torch.load(file, weights_only=True)
        self.model.load_state_dict(model)
        self.optimizer.load_state_dict(optimizer)
        self.exchange.load_state_dict(exchange)
        self.steps = exchange["step"]

    def hash(self) -> str:
        values = self.model.state_dict().values()
        return xxhash.xxh3_64_hexdigest(b"".join(value.numpy().tobytes() for value in values))


def main() -> None:
    with discover_world(timeout_s=60) as world:
        report: dict[str, Any] = {}
        for mode in ("average", "swap"):
            whole = ExchangeRun(world, mode)
            whole.to(STEPS)
            begun = ExchangeRun(world, mode)
            begun.to(STOP)
            file = io.BytesIO()
            torch.save(begun.state(), file)
            begun.exchange.close()
            file.seek(0)
            resumed = ExchangeRun(world, mode)
            resumed.load(file)
            resumed.to(STEPS)
            report[mode] = {"whole": whole.hash(), "resumed": resumed.hash()}
            report[mode]["stats"] = whole.exchange.stats()
            whole.exchange.close()
            resumed.exchange.close()
            whole.exchange.average_all()
            report[mode]["mean"] = whole.hash()
        rank = world.rank
        world.barrier(doing="ending")
    Path(sys.argv[1], f"{rank}.json").write_text(json.dumps(report))


if __name__ == "__main__":
    main()
