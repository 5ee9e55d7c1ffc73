"""How much of a step's memory and traffic has a rank whose samples are cut into tiles?

Each line is the rank of a step that keeps most: what its forward pass keeps for the backward pass
(each memory counted once), weights left out, beside that of one process; and what the rank sends to
others in the step, but for sums. Ranks are played one after the other in this process. What they
would receive is not there, so that no numbers come out, but all sizes do.

    python -m benchmarks.studies.tiles
"""

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from examples.tiles.cosmoflow import CosmoFlow
from examples.tiles.unet2d import PictureUNet
from examples.tiles.unet3d import VolumeUNet
from examples.tiles.vit import PictureViT
from tonari.trainer.private.fakes import FakeStore
from tonari.trainer.tiles import Grid, tile_model

Make = Callable[[], nn.Module]
CASES: dict[str, tuple[Make, tuple[int, ...]]] = {
    "CosmoFlow": (lambda: CosmoFlow(side=64, width=8), (4, 64, 64, 64)),
    "U-Net, volumes": (lambda: VolumeUNet(width=8), (1, 48, 48, 48)),
    "U-Net, pictures": (lambda: PictureUNet(width=16), (3, 192, 256)),
    "ViT, pictures": (lambda: PictureViT(10, (192, 256), dropout=0.0), (3, 192, 256)),
}
PARTS = [(1,), (2,), (4,), (2, 2)]
LINE = (
    "{case:16} parts {parts:6}  kept {kept_bytes:11,} bytes, {kept_fraction:.3f} of one  "
    "sent {sent_bytes:9,} bytes"
)


@contextmanager
def played(ranks: int, rank: int) -> Iterator[dist.ProcessGroup | None]:
    """Be a rank of a job whose messages go nowhere."""
    if ranks == 1:
        yield None
        return
    dist.init_process_group("fake", rank=rank, world_size=ranks, store=FakeStore())
    try:
        yield dist.group.WORLD
    finally:
        dist.destroy_process_group()


def step(make: Make, shape: Sequence[int], grid: Grid) -> int:
    """Train a step on one sample; count the bytes that its forward pass keeps."""
    torch.manual_seed(0)
    model = tile_model(make(), grid, shape, try_it=False)
    weights = {each.data_ptr() for each in [*model.parameters(), *model.buffers()]}
    kept: dict[int, Any] = {}

    def keep(value: Tensor) -> Tensor:
        memory = value.untyped_storage()
        if memory.data_ptr() not in weights:
            kept[memory.data_ptr()] = memory  # held, so that no other memory has its address
        return value

    sample = grid.part_of(torch.rand(2, *shape), len(shape) - 1).clone()
    with saved_tensors_hooks(keep, lambda value: value):
        loss = model(sample).mean()
    found: int = sum(memory.nbytes() for memory in kept.values())
    loss.backward()
    return found


def measure(case: str, parts: tuple[int, ...]) -> dict[str, object]:
    """Play all ranks of a step; describe the one that keeps most."""
    make, shape = CASES[case]
    kept = []
    for rank in range(math.prod(parts)):
        with played(math.prod(parts), rank) as group:
            grid = Grid(parts, group)
            kept.append((step(make, shape, grid), grid.sent_bytes))
    most, sent = max(kept)
    return {
        "case": case, "parts": " x ".join(map(str, parts)), "kept_bytes": most,
        "kept_fraction": most / step(make, shape, Grid((1,))), "sent_bytes": sent,
    }  # fmt: skip


if __name__ == "__main__":
    for case in CASES:
        for parts in PARTS:
            print(LINE.format(**measure(case, parts)), flush=True)
