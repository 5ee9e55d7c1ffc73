"""Rank 1 leaves without a word in the middle of a round; rank 0 must name it."""

import os
import signal
import sys
from pathlib import Path

import torch
from torch import nn

from dataio import StallError
from dataio.world import discover_world
from shuffle import ModelExchange


def main() -> None:
    world = discover_world(timeout_s=60)
    torch.manual_seed(0)
    model = nn.Linear(1000, 1000)
    exchange = ModelExchange(model, world=world, every=2, overlap=1)
    for step in range(1, 6):
        if step == 4:
            world.timeout_s = 2
        with torch.no_grad():
            model.weight += world.rank + step
        if world.rank == 1 and step == 4:
            Path(sys.argv[1], "1.json").write_text("{}")
            os.kill(os.getpid(), signal.SIGSTOP)  # stopped: alive for MPI, silent for its partner
        try:
            exchange.step()
        except StallError as error:
            print(f"found: {error}", flush=True)
            world.abort("the partner is gone")


if __name__ == "__main__":
    main()
