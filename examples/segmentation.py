"""Segmentation: masks that are cropped and flipped with their pictures, a tiny U-Net, mean IoU.

python examples/pictures.py pictures
python examples/segmentation.py "pictures/train-{000000..000001}.tar" pictures/val/val-000000.tar

and with `mpiexec -n 2 python` or `torchrun --nproc-per-node 2` in place of the second `python`.

A sample is a picture (jpg) and its mask (png, gray or indexed; 255 is no class). The same command
goes on after the last epoch that was saved.
"""

import argparse
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

import dataio

# One crop and one flip for both: a sample's fields draw the same numbers.
CROP, FLIP = dataio.RandomResizedCrop(96, scale=(0.3, 1.0)), 0.5
TRAIN: dict[str, dataio.Field] = {
    "image": dataio.Image("jpg", crop=CROP, flip=FLIP),
    "mask": dataio.Mask("png", crop=CROP, flip=FLIP),
}
SHORT, CENTER = dataio.ResizeShort(96), dataio.CenterCrop(96)
VAL: dict[str, dataio.Field] = {
    "image": dataio.Image("jpg", resize=SHORT, crop=CENTER),
    "mask": dataio.Mask("png", resize=SHORT, crop=CENTER),
}


def layer(inputs: int, width: int, stride: int = 1) -> nn.Module:
    conv = nn.Conv2d(inputs, width, 3, stride, padding=1)
    return nn.Sequential(conv, nn.GroupNorm(8, width), nn.ReLU())


class UNet(nn.Module):
    """Three scales; each layer on the way up is given that of its scale on the way down too."""

    def __init__(self, classes: int, width: int = 16) -> None:
        super().__init__()
        self.first, self.down = layer(3, width), layer(width, 2 * width, 2)
        self.middle, self.bottom = layer(2 * width, 4 * width, 2), layer(4 * width, 2 * width)
        self.up, self.last = layer(4 * width, width), layer(2 * width, width)
        self.grow, self.head = nn.Upsample(scale_factor=2), nn.Conv2d(width, classes, 1)

    def forward(self, image: Tensor) -> Tensor:
        """Map uint8[batch, 3, height, width] to float32[batch, classes, height, width]."""
        first = self.first(image / 127.5 - 1)
        down = self.down(first)
        bottom = self.grow(self.bottom(self.middle(down)))
        up = self.grow(self.up(torch.cat([bottom, down], 1)))
        logits: Tensor = self.head(self.last(torch.cat([up, first], 1)))
        return logits


def train(loader: dataio.Loader, given: argparse.Namespace) -> None:
    val, classes = loader.evaluation(given.val, fields=VAL), given.classes
    torch.manual_seed(0)
    network = UNet(classes).to(loader.device)
    model = nn.parallel.DistributedDataParallel(network)
    optimizer = torch.optim.Adam(network.parameters(), 0.003)
    parts: list[Any] = [network, optimizer]
    if done := sorted(given.saved.glob("*/parts.pt")):
        loader.restore(done[-1].parent / "loader")
        for part, state in zip(parts, torch.load(done[-1], "cpu"), strict=True):
            part.load_state_dict(state)
    for epoch in loader.epochs(given.epochs):
        mean_loss = torch.zeros((), device=loader.device)
        for batch in loader:
            loss = cross_entropy(model(batch["image"]), batch["mask"].long(), ignore_index=255)
            loss.backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            optimizer.zero_grad()
            mean_loss += loss.detach() / len(loader) / dist.get_world_size()
        # Pixels by their true and their predicted class
        counts = torch.zeros(classes * classes, device=loader.device, dtype=torch.int64)
        with torch.no_grad():
            for batch in val:
                mask, found = batch["mask"].long(), network(batch["image"]).argmax(1)
                known = batch["valid"][:, None, None] & (mask != 255)
                counts += torch.bincount((mask * classes + found)[known], minlength=classes**2)
        for figure in (mean_loss, counts):
            dist.all_reduce(figure)
        table = counts.reshape(classes, classes)
        iou = table.diag() / (table.sum(0) + table.sum(1) - table.diag())
        loader.save(given.saved / f"{epoch:03d}" / "loader")
        if dist.get_rank() == 0:
            file = given.saved / f"{epoch:03d}" / "parts.pt"
            torch.save([part.state_dict() for part in parts], f"{file}.new")
            Path(f"{file}.new").rename(file)  # last: an epoch that has it was saved whole
            print(f"epoch {epoch}: loss {mean_loss:.6f}, mean IoU {iou.nanmean():.3f}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("shards", help="pattern, such as 'train-{000000..000127}.tar'")
    parser.add_argument("val", help="pattern of the shards to evaluate on")
    parser.add_argument("--saved", type=Path, default=Path("runs/segmentation"))
    for name, default in (("--epochs", 4), ("--classes", 5), ("--batch-size", 8)):
        parser.add_argument(name, type=int, default=default)
    given = parser.parse_args()
    with dataio.join() as job, dataio.Loader(
        given.shards, batch_size=given.batch_size, drop_last=True, fields=TRAIN, seed=0,
        device=job.device,
    ) as loader:  # fmt: skip
        train(loader, given)


if __name__ == "__main__":
    main()
