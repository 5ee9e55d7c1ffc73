"""A loader of tiles on every rank, which saves in each epoch and goes on from its save; reports.

Arguments: report directory, directory of the job, and whether rank 3 kills itself in epoch 2.
"""

import json
import os
import signal
import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch

import shuffle
from dataio import Array, Field, Int, Loader, Reports, Tiles, Workers, discover_world
from importance import Kakurenbo


def main(out: Path, root: Path, killed: str) -> None:
    tiles = Tiles((-2,), (2,), 1)
    fields: dict[str, Field] = {"x": Array("x", (10, 8), "float32", tiles), "y": Int("y")}
    source: dict[str, Any] = {"x": root / "x.npy", "y": np.arange(24)}
    hides = Kakurenbo(0.3, drops=(), alphas=(1.0,), warmup_epochs=0)
    steps = []
    with discover_world() as world, Loader(
        source, fields=fields, batch_size=3, cache=root / "cache", world=world, seed=1,
        shuffle=shuffle.Partial(0.4), importance=hides,
        workers=Workers(threads=0), reports=Reports(progress=False),
    ) as loader:  # fmt: skip
        if (root / "save").exists():
            loader.restore(root / "save")
        for epoch in loader.epochs(4):
            for batch in loader:
                steps.append([epoch, loader.step, batch["sample_id"].tolist(), batch["x"].tolist()])
                sure = torch.ones(3)
                loader.report(batch, batch["y"].float().sin() + 2, sure.bool(), sure)
                if loader.step == 2:
                    loader.save(root / "save")
                if killed == "killed" and (epoch, loader.step, world.rank) == (2, 3, 3):
                    os.kill(os.getpid(), signal.SIGKILL)
        (out / f"{world.rank}.json").write_text(json.dumps(steps))


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3])
