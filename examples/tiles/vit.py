"""Classify wide pictures by a vision transformer; each rank has the patches of its tile.

mpiexec -n 4 python examples/tiles/vit.py

Every patch attends to those of all tiles (Dosovitskiy et al., ICLR 2021). The pictures are made up.
"""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

import dataio
from tonari.trainer.mesh.average import average_gradients
from tonari.trainer.tiles import Grid, tile_model


class PictureViT(nn.Module):
    """Classify pictures of ``size``, height and width, by a class token before their patches."""

    def __init__(
        self, num_classes: int, size: tuple[int, int], *, channels: int = 3, patch: int = 4,
        width: int = 64, depth: int = 4, heads: int = 4, dropout: float = 0.1,
    ) -> None:  # fmt: skip
        super().__init__()
        self.patches = nn.Conv2d(channels, width, patch, patch)
        self.token = nn.Parameter(torch.zeros(1, 1, width))
        num_places = 1 + (size[0] // patch) * (size[1] // patch)
        self.positions = nn.Parameter(torch.randn(1, num_places, width) * 0.02)
        self.dropout = nn.Dropout(dropout)
        self.blocks = nn.Sequential(
            *(
                nn.TransformerEncoderLayer(
                    width, heads, 4 * width, dropout, F.gelu, batch_first=True, norm_first=True
                )
                for _ in range(depth)
            )
        )
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, num_classes)

    def forward(self, pictures: Tensor) -> Tensor:
        """Map floating[batch, channels, h, w] to floating[batch, num_classes]."""
        # floating[batch, places, width]
        places = self.patches(pictures).flatten(2).transpose(1, 2)
        places = torch.cat([self.token.expand(len(places), -1, -1), places], 1)
        places = self.blocks(self.dropout(places + self.positions))
        return self.head(self.norm(places[:, 0]))  # type: ignore[no-any-return]


def main() -> None:
    with dataio.join(device="cpu") as job:
        ranks = dist.get_world_size()
        grid = Grid((ranks,), dist.group.WORLD if ranks > 1 else None)
        torch.manual_seed(0)  # the same weights on each rank, and the same dropout
        model = tile_model(PictureViT(4, (32, 64)), grid, (3, 32, 64))
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        labels = torch.arange(16) % 4
        pictures = torch.randn(16, 3, 32, 64) + labels.view(-1, 1, 1, 1)
        for step in range(10):
            # Of a file each rank would read its part alone.
            loss = F.cross_entropy(model(grid.part_of(pictures, 2)), labels)
            optimizer.zero_grad()
            loss.backward()  # type: ignore[no-untyped-call]
            if grid.group is not None:
                average_gradients(model.parameters(), grid.group)
            optimizer.step()
            if job.world.rank == 0:
                print(f"step {step}  loss {loss.item():.4f}  sent {grid.sent_bytes:,} bytes")


if __name__ == "__main__":
    main()
