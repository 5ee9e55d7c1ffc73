"""Learn numbers from volumes, such as cosmological parameters; each rank has a slab of each volume.

mpiexec -n 4 python examples/tiles/cosmoflow.py

The network is CosmoFlow's (Mathuriya et al., SC 2018, as in MLPerf HPC): five times convolution and
pooling, then three linear layers. The volumes here are made up.
"""

from itertools import pairwise

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

import dataio
from tonari.trainer.mesh.average import average_gradients
from tonari.trainer.tiles import Grid, tile_model


class CosmoFlow(nn.Module):
    """Predict ``num_targets`` numbers of a volume of ``side`` positions a dimension."""

    def __init__(
        self, channels: int = 4, side: int = 128, *, width: int = 32, num_targets: int = 4,
        dropout: float = 0.5, num_levels: int = 5,
    ) -> None:  # fmt: skip
        super().__init__()
        widths = [channels, *(width * 2**level for level in range(num_levels))]
        levels = [
            nn.Sequential(nn.Conv3d(a, b, 3, padding=1), nn.LeakyReLU(), nn.MaxPool3d(2))
            for a, b in pairwise(widths)
        ]
        self.levels = nn.Sequential(*levels)
        self.head = nn.Sequential(
            nn.Flatten(), nn.Linear(widths[-1] * (side >> num_levels) ** 3, 128), nn.LeakyReLU(),
            nn.Dropout(dropout), nn.Linear(128, 64), nn.LeakyReLU(),
            nn.Dropout(dropout), nn.Linear(64, num_targets), nn.Tanh(),
        )  # fmt: skip

    def forward(self, volumes: Tensor) -> Tensor:
        """Map floating[batch, channels, side, side, side] to floating[batch, num_targets]."""
        return 1.2 * self.head(self.levels(volumes))  # type: ignore[no-any-return]


def main() -> None:
    with dataio.join(device="cpu") as job:
        ranks = dist.get_world_size()
        grid = Grid((ranks,), dist.group.WORLD if ranks > 1 else None)
        torch.manual_seed(0)  # the same weights on each rank, and the same dropout
        model = CosmoFlow(side=32, width=4, num_levels=4)
        tile_model(model, grid, (4, 32, 32, 32))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9)
        volumes = torch.rand(8, 4, 32, 32, 32)
        targets = volumes.mean((2, 3, 4)) * 20 - 10
        for step in range(10):
            # Of a file each rank would read its slab alone.
            local = grid.part_of(volumes, 3)
            loss = F.mse_loss(model(local), targets)
            optimizer.zero_grad()
            loss.backward()  # type: ignore[no-untyped-call]
            if grid.group is not None:
                average_gradients(model.parameters(), grid.group)
            optimizer.step()
            if job.world.rank == 0:
                print(f"step {step}  loss {loss.item():.4f}  sent {grid.sent_bytes:,} bytes")


if __name__ == "__main__":
    main()
