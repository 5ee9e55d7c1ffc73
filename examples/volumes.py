"""Segment made-up volumes by random patches: one decoded copy a node, which all its ranks share.

python examples/volumes.py runs/volumes
mpiexec -n 2 python examples/volumes.py runs/volumes
"""

import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch import nn

import dataio

NUM_VOLUMES, SIDE, PATCH = 24, 40, 16


def write_volumes(directory: Path) -> None:
    """Write volumes with a bright ball each, and where the ball is."""
    rng = np.random.default_rng(0)
    places = np.stack(np.meshgrid(*[np.arange(SIDE)] * 3, indexing="ij"))
    centres = rng.integers(8, SIDE - 8, (NUM_VOLUMES, 3, 1, 1, 1))
    # [volumes, side, side, side]
    labels = ((places - centres) ** 2).sum(axis=1) < 36
    noise = rng.normal(0, 0.7, labels.shape)
    np.save(directory / "images.npy", (labels + noise).astype(np.float32))
    np.save(directory / "labels.npy", labels.astype(np.uint8))


def cut_patch(sample: dict[str, Any], rng: np.random.Generator) -> dict[str, Any]:
    """Cut a patch, every other time about a voxel of the ball."""
    ball: NDArray[np.int64] = np.argwhere(sample["label"])
    centre = rng.choice(ball) if rng.random() < 0.5 else rng.integers(0, SIDE, 3)
    low = np.clip(centre - PATCH // 2, 0, SIDE - PATCH)
    box = tuple(slice(start, start + PATCH) for start in low)
    return {key: sample[key][box] for key in ("image", "label")}


def main(directory: Path) -> None:
    with dataio.join() as job:
        if dist.get_rank() == 0:
            directory.mkdir(parents=True, exist_ok=True)
            write_volumes(directory)
        dist.barrier()
        shape = (SIDE, SIDE, SIDE)
        with dataio.Loader(
            {key: directory / f"{key}s.npy" for key in ("image", "label")},
            fields={
                "image": dataio.Array("image", shape, "float32"),
                "label": dataio.Array("label", shape, "uint8"),
            },
            batch_size=4, transform=cut_patch, cache=directory / "cache", device=job.device,
        ) as loader:  # fmt: skip
            train(loader, job.device)


def train(loader: dataio.Loader, device: torch.device) -> None:
    torch.manual_seed(0)
    network = nn.Sequential(nn.Conv3d(1, 8, 3, padding=1), nn.ReLU(), nn.Conv3d(8, 1, 3, padding=1))
    model = nn.parallel.DistributedDataParallel(network.to(device))
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-2)
    for epoch in loader.epochs(8):
        overlap = torch.zeros(2, device=device)
        for batch in loader:
            labels = batch["label"][:, None].float()
            found = model(batch["image"][:, None]).sigmoid()
            both, sums = (each.flatten(1).sum(1) for each in (found * labels, found + labels))
            losses = 1 - (2 * both + 1) / (sums + 1)  # of each patch: its Dice, from 1
            optimizer.zero_grad()
            (losses * batch["weight"]).mean().backward()
            optimizer.step()
            overlap += torch.stack([2 * both.sum(), sums.sum()]).detach()
        dist.all_reduce(overlap)
        if dist.get_rank() == 0:
            print(f"epoch {epoch}: Dice {overlap[0] / overlap[1]:.3f}", flush=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
