"""The recipe of ImageNet: random crops, flips, mixup, bf16, averaged weights, evaluation crops.

python examples/pictures.py pictures
python examples/imagenet.py "pictures/train-{000000..000001}.tar" pictures/val/val-000000.tar

and with `mpiexec -n 2 python` or `torchrun --nproc-per-node 2` in place of the second `python`.

A sample is a picture (jpg) and its class (cls). The same command goes on after the last epoch that
was saved. For ImageNet: --classes 1000 --batch-size 256 --epochs 90 --ema 0.9999, and a network.
"""

import argparse
import math
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, one_hot
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import dataio

CROP, LABEL = dataio.RandomResizedCrop(224), dataio.Int("cls")
TRAIN: dict[str, dataio.Field] = {"image": dataio.Image("jpg", crop=CROP, flip=0.5), "label": LABEL}
SHORT, CENTER = dataio.ResizeShort(256), dataio.CenterCrop(224)
VAL = TRAIN | {"image": dataio.Image("jpg", resize=SHORT, crop=CENTER)}


class Residual(nn.Sequential):
    """Layers whose result is added to what they were given."""

    def forward(self, features: Tensor) -> Tensor:
        return features + super().forward(features)  # type: ignore[no-any-return, no-untyped-call]


def make_network(classes: int) -> nn.Module:
    layers: list[nn.Module] = [nn.Conv2d(3, 16, 7, stride=4, padding=3)]
    for width in (16, 32):
        conv = nn.Conv2d(width, width, 3, padding=1)
        layers += [Residual(nn.GroupNorm(8, width), nn.ReLU(), conv)]
        layers += [nn.Conv2d(width, 2 * width, 3, stride=2, padding=1)]
    layers += [nn.GroupNorm(8, 64), nn.ReLU()]
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(64, classes))


def mixup(batch: dict[str, Tensor], rng: np.random.Generator, classes: int) -> dict[str, Tensor]:
    share, image = rng.beta(0.2, 0.2), batch["image"].float()
    target = one_hot(batch["label"], classes).float()
    image = image.lerp(image.flip(0), share).round().to(torch.uint8)
    return batch | {"image": image, "target": target.lerp(target.flip(0), share)}


def forward(model: nn.Module, image: Tensor) -> Tensor:
    with torch.autocast(image.device.type, torch.bfloat16):
        logits: Tensor = model(image.to(memory_format=torch.channels_last) / 127.5 - 1)
    return logits.float()


def train(loader: dataio.Loader, given: argparse.Namespace) -> None:
    val = loader.evaluation(given.val, fields=VAL)
    torch.manual_seed(0)
    network = make_network(given.classes).to(loader.device)
    network.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    decay = get_ema_multi_avg_fn(given.ema)  # type: ignore[no-untyped-call]
    average = AveragedModel(network, multi_avg_fn=decay)
    model = nn.parallel.DistributedDataParallel(network)
    optimizer = torch.optim.SGD(network.parameters(), given.lr, momentum=0.9, weight_decay=5e-5)
    parts: list[Any] = [network, average, optimizer]
    if done := sorted(given.saved.glob("*/parts.pt")):
        loader.restore(done[-1].parent / "loader")
        for part, state in zip(parts, torch.load(done[-1], "cpu"), strict=True):
            part.load_state_dict(state)
    for epoch in loader.epochs(given.epochs):
        total = torch.zeros(3, device=loader.device)
        for batch in loader:
            lr_factor = (1 + math.cos(math.pi * loader.progress)) / 2
            optimizer.param_groups[0]["lr"] = given.lr * lr_factor
            logits = forward(model, batch["image"])
            loss = cross_entropy(logits, batch["target"], label_smoothing=0.1)
            loss.backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            optimizer.zero_grad()
            average.update_parameters(network)
            total[0] += loss.detach() / len(loader) / dist.get_world_size()
        with torch.no_grad():
            for batch in val:
                right = forward(average, batch["image"]).argmax(1) == batch["label"]
                total[1:] += torch.stack([(right & batch["valid"]).sum(), batch["valid"].sum()])
        dist.all_reduce(total)
        loader.save(given.saved / f"{epoch:03d}" / "loader")
        if dist.get_rank() == 0:
            file = given.saved / f"{epoch:03d}" / "parts.pt"
            torch.save([part.state_dict() for part in parts], f"{file}.new")
            Path(f"{file}.new").rename(file)  # last: an epoch that has it was saved whole
            accuracy = float(total[1] / total[2])
            print(f"epoch {epoch}: loss {total[0]:.6f}, accuracy {accuracy:.3f}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("shards", help="pattern, such as 'train-{000000..000127}.tar'")
    parser.add_argument("val", help="pattern of the shards to evaluate on")
    parser.add_argument("--saved", type=Path, default=Path("runs/imagenet"))
    for name, default in (("--epochs", 4), ("--classes", 4), ("--batch-size", 16)):
        parser.add_argument(name, type=int, default=default)
    parser.add_argument("--lr", type=float, default=0.05)
    parser.add_argument("--ema", type=float, default=0.9, help="share of the average that stays")
    given = parser.parse_args()
    with dataio.join() as job, dataio.Loader(
        given.shards, batch_size=given.batch_size, drop_last=True, fields=TRAIN, seed=0,
        batch_transform=partial(mixup, classes=given.classes), device=job.device,
    ) as loader:  # fmt: skip
        train(loader, given)


if __name__ == "__main__":
    main()
