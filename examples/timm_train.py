"""timm's recipe fed by Tonari: beside each `create_loader` one line more, `feed`.

python examples/timm_train.py imagenet --model resnet18
torchrun --nproc-per-node 2 examples/timm_train.py imagenet --model resnet18
torchrun --nproc-per-node 2 examples/timm_train.py imagenet --resume runs/last.pth.tar

The directory holds train and val, each with a directory of pictures a class. The rest is what
timm's own train.py does: FastCollateMixup, random erasing, its optimizers and its checkpoints.
"""

import argparse
from pathlib import Path
from typing import Any

import timm
import timm.optim
import torch
import torch.distributed as dist
from timm.data import FastCollateMixup, create_dataset, create_loader
from timm.loss import SoftTargetCrossEntropy
from timm.models import resume_checkpoint
from timm.utils import AverageMeter, CheckpointSaver, accuracy
from torch import nn

from dataio import join
from tonari.frameworks.timm import feed


def make_loaders(
    data: Path, device: torch.device, *, batch_size: int, size: int, classes: int, erasing: float
) -> tuple[Any, Any]:
    made = {
        "input_size": (3, size, size), "batch_size": batch_size, "device": device,
        "distributed": dist.get_world_size() > 1,
    }  # fmt: skip
    mixup = FastCollateMixup(mixup_alpha=0.2, cutmix_alpha=1.0, num_classes=classes)
    files = create_dataset("", str(data / "train"))
    train = create_loader(files, is_training=True, collate_fn=mixup, re_prob=erasing, **made)
    train = feed(train, data / "train", seed=0)
    val = create_loader(create_dataset("", str(data / "val")), **made)
    return train, feed(val, data / "val", training=train)


def train_one_epoch(model: nn.Module, loader: Any, optimizer: torch.optim.Optimizer) -> list[float]:
    losses = []
    model.train()
    for images, targets in loader:
        loss = SoftTargetCrossEntropy()(model(images), targets)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


@torch.no_grad()
def validate(model: nn.Module, loader: Any) -> AverageMeter:
    meter = AverageMeter()
    model.eval()
    for images, targets in loader:
        (right,) = accuracy(model(images), targets)
        meter.update(right.item(), len(targets))
    return meter


def fit(
    data: Path, saved: Path, model: nn.Module, device: torch.device, *, epochs: int, size: int,
    batch_size: int, classes: int, erasing: float, resume: Path | None = None,
) -> tuple[list[float], AverageMeter]:  # fmt: skip
    train, val = make_loaders(
        data, device, batch_size=batch_size, size=size, classes=classes, erasing=erasing
    )
    optimizer = timm.optim.create_optimizer_v2(model, "sgd", lr=0.05)
    start = (resume_checkpoint(model, str(resume), optimizer) or 0) if resume else 0
    parallel = nn.parallel.DistributedDataParallel(model)
    saved.mkdir(parents=True, exist_ok=True)
    saver = CheckpointSaver(model, optimizer, checkpoint_dir=str(saved), recovery_dir=str(saved))
    losses = []
    for epoch in range(start, epochs):
        train.sampler.set_epoch(epoch)  # timm's script does so when it is distributed
        losses += train_one_epoch(parallel, train, optimizer)
        right = validate(parallel, val)
        if dist.get_rank() == 0:
            saver.save_checkpoint(epoch, metric=right.avg)
            print(f"epoch {epoch}: {right.avg:.1f} % of {right.count} pictures", flush=True)
    train.loader.batches.close()
    return losses, right


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("data", type=Path)
    parser.add_argument("--model", default="resnet18")
    parser.add_argument("--saved", type=Path, default=Path("runs"), help="seen by all nodes")
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument("--size", type=int, default=224)
    parser.add_argument("--classes", type=int, default=1000)
    parser.add_argument("--resume", type=Path, help="checkpoint to go on from")
    given = parser.parse_args()
    with join() as job:
        torch.manual_seed(0)
        model = timm.create_model(given.model, num_classes=given.classes).to(
            job.device, memory_format=torch.channels_last
        )
        fit(
            given.data, given.saved, model, job.device, epochs=given.epochs, size=given.size,
            batch_size=64, classes=given.classes, erasing=0.25, resume=given.resume,
        )  # fmt: skip


if __name__ == "__main__":
    main()
