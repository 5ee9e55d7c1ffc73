"""torch DataLoader over Pillow: the recipe as torchvision's transforms do it for Pillow's images.

Its own transforms are not used, because its wheel does not load beside every build of torch: these
are its calls of Pillow, and its draws.
"""

import io
import math

import numpy as np
import torch
from PIL import Image
from torch.utils.data import DataLoader, Dataset

from tonari.bench.loader.peers.harness import PeerFeed, PeerTask, copy_set, run
from tonari.bench.loader.peers.torch_packed import sampled_feed
from tonari.bench.loader.sets import CROP, PackedSet

Parts = tuple[int, int, torch.Tensor]
"""Id, label and payload of a sample."""

ATTEMPTS = 10


class Photos(Dataset[Parts]):
    """Photos that are cropped one by one."""

    def __init__(self, packed: PackedSet) -> None:
        self.packed = packed

    def __len__(self) -> int:
        return self.packed.spec.num_samples

    def __getitem__(self, index: int) -> Parts:
        with Image.open(io.BytesIO(self.packed.sample(index).tobytes())) as file:
            image = file.convert("RGB")
        left, top, width, height = draw_box(image.width, image.height)
        image = image.crop((left, top, left + width, top + height))
        image = image.resize((CROP, CROP), Image.Resampling.BILINEAR)
        if torch.rand(1).item() < 0.5:
            image = image.transpose(Image.Transpose.FLIP_LEFT_RIGHT)
        return index, int(self.packed.labels[index]), torch.from_numpy(np.array(image))


def draw_box(width: int, height: int) -> tuple[int, int, int, int]:
    """Draw left, top, width and height of a crop, by torch's generator."""
    bounds = math.log(3 / 4), math.log(4 / 3)
    for _ in range(ATTEMPTS):
        area = width * height * torch.empty(1).uniform_(0.08, 1.0).item()
        ratio = math.exp(torch.empty(1).uniform_(*bounds).item())
        wide, tall = round(math.sqrt(area * ratio)), round(math.sqrt(area / ratio))
        if 0 < wide <= width and 0 < tall <= height:
            top = int(torch.randint(0, height - tall + 1, (1,)).item())
            left = int(torch.randint(0, width - wide + 1, (1,)).item())
            return left, top, wide, tall
    side = min(width, height)
    return (width - side) // 2, (height - side) // 2, side, side


def open_feed(task: PeerTask) -> PeerFeed:
    """Make the loader."""
    return sampled_feed(DataLoader, Photos(task.open_copy()), task)


if __name__ == "__main__":
    run(copy_set, open_feed)
