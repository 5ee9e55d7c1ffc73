"""Models whose constructors draw, each in its own way; what is said of them. Arguments: directory.

One line a case: how it draws and whether it is recorded, the words of the error, a weight.
"""

import json
import os
import random  # noqa: TID251
import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import nn

from dataio.job.launch import join
from tonari.trainer.errors import ConfigError
from tonari.trainer.mesh.mesh import make_mesh
from tonari.trainer.mesh.parallelize import parallelize
from tonari.trainer.models import Adapted, deferred, seeded


def draw(way: str) -> Any:
    """Give eight numbers."""
    drawn: dict[str, Any] = {
        "torch": lambda: torch.rand(8).numpy(),
        "numpy": lambda: np.random.rand(8),  # noqa: NPY002
        "python": lambda: [random.random() for _ in range(8)],
        "own": lambda: np.random.default_rng().random(8),
        "system": lambda: list(os.urandom(8)),
        "buffer": lambda: np.random.default_rng().random(8),
        "rank": lambda: np.full(8, dist.get_rank() + 1.0),
        "width": lambda: np.ones(8),
        "filled": lambda: np.ones(8),
    }
    return drawn[way]()


class DrawnModel(nn.Module):
    """A linear layer, and a weight that is drawn."""

    def __init__(self, way: str) -> None:
        super().__init__()
        self.body = nn.Linear(4, 8 + dist.get_rank() if way == "width" else 8)
        values = torch.tensor(np.asarray(draw(way)), dtype=torch.float32)
        if way == "buffer":
            self.register_buffer("scale", values)
        else:
            self.scale = nn.Parameter(values)
        if way == "filled":
            nn.init.constant_(self.scale, random.SystemRandom().random())


WAYS = ("torch", "numpy", "python", "own", "system", "buffer", "rank", "width", "filled")


def main() -> None:
    directory, found = Path(sys.argv[1]), {}
    with join(device="cpu") as job:
        mesh = make_mesh((1, 2, 1, 1, 1), device_type="cpu")
        for way in WAYS:
            for build in (seeded, deferred):
                words, weight = "", list[float]()
                try:
                    (part,) = parallelize(build(lambda: Adapted(DrawnModel(way)), seed=3), mesh)  # noqa: B023
                    weight = part.state_dict()["wrapped.scale"].tolist()
                except ConfigError as error:
                    words = str(error)
                found[f"{way} {build.__name__}"] = [words, weight]
    (directory / f"{job.world.rank}.json").write_text(json.dumps(found))


if __name__ == "__main__":
    main()
