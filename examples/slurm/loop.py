"""A loop of your own that saves when Slurm asks it to end, and goes on where it was.

    python examples/slurm/loop.py "shards/train-{000000..000003}.tar" --saved runs/loop
    mpiexec -n 2 python examples/slurm/loop.py "shards/train-{000000..000003}.tar"
    sbatch examples/slurm/loop.sbatch "/shared/train-{000000..000003}.tar"

A sample is a picture (jpg) and its class (cls). Change `make_network` and `fields_of`, and keep the
rest. On the signal USR1 all ranks save after the same step and end with status 0. The same command
goes on behind that step.
"""

# ruff: noqa: E402
import signal

asked: list[int] = []
# Before the imports below, which take seconds: until then USR1 ends this process.
signal.signal(signal.SIGUSR1, lambda number, frame: asked.append(number))

import argparse
import shutil
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import cross_entropy

import dataio
import shuffle

KEPT_SAVES = 2


def make_network(classes: int) -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, 16, 3, stride=2, padding=1), nn.ReLU(), nn.AdaptiveAvgPool2d(4),
        nn.Flatten(), nn.Linear(16 * 4 * 4, classes),
    )  # fmt: skip


def fields_of(given: argparse.Namespace) -> dict[str, dataio.Field]:
    picture = dataio.Image(given.image, crop=dataio.RandomResizedCrop(given.size), flip=0.5)
    return {"image": picture, "label": dataio.Int(given.label)}


def train(loader: dataio.Loader, given: argparse.Namespace) -> None:
    torch.manual_seed(0)
    network = make_network(given.classes).to(loader.device)
    model = nn.parallel.DistributedDataParallel(network)
    optimizer = torch.optim.SGD(network.parameters(), lr=0.05, momentum=0.9)
    parts = {"network": network, "optimizer": optimizer}
    steps = go_on(loader, parts, given.saved)
    for epoch in loader.epochs(given.epochs):
        for batch in loader:
            loss = cross_entropy(model(batch["image"].float() / 255), batch["label"])
            loss.backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            optimizer.zero_grad()
            steps += 1
            if dist.get_rank() == 0:
                print(f"epoch {epoch}, step {steps}: loss {loss:.6f}", flush=True)
            if any_rank_is_asked(loader.device):
                save(loader, parts, given.saved, steps)
                return
        save(loader, parts, given.saved, steps)


def any_rank_is_asked(device: torch.device | None) -> bool:
    """Ask all ranks: the signal reaches some of them a step earlier than others."""
    flag = torch.tensor(len(asked), device=device)
    dist.all_reduce(flag, op=dist.ReduceOp.MAX)
    return bool(flag)


def save(loader: dataio.Loader, parts: dict[str, Any], saved: Path, steps: int) -> None:
    """Save everything in a directory of its own, which counts once it has parts.pt."""
    directory = saved / f"{steps:08d}"
    loader.save(directory / "loader")  # every rank calls it
    if dist.get_rank() == 0:
        states = {name: part.state_dict() for name, part in parts.items()}
        torch.save(states, directory / "parts.new")
        (directory / "parts.new").rename(directory / "parts.pt")
        print(f"saved {directory}", flush=True)
        for old in whole_saves(saved)[:-KEPT_SAVES]:
            shutil.rmtree(old)


def go_on(loader: dataio.Loader, parts: dict[str, Any], saved: Path) -> int:
    """Go on from the newest save, if there is one; returns the steps that were trained."""
    found = [whole_saves(saved)]
    dist.broadcast_object_list(found)  # all ranks take what rank 0 sees
    if not found[0]:
        return 0
    directory = found[0][-1]
    loader.restore(directory / "loader")
    states = torch.load(directory / "parts.pt", map_location="cpu", weights_only=True)
    for name, state in states.items():
        parts[name].load_state_dict(state)
    return int(directory.name)


def whole_saves(saved: Path) -> list[Path]:
    return sorted(path.parent for path in saved.glob("*/parts.pt"))


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("data", help="pattern, such as 'shards/train-{000000..000003}.tar'")
    parser.add_argument("--saved", type=Path, default=Path("runs/loop"), help="seen by all nodes")
    parser.add_argument("--image", default="jpg", help="extension or column of the pictures")
    parser.add_argument("--label", default="cls", help="extension or column of the classes")
    for name, default in (
        ("--epochs", 10),
        ("--batch-size", 32),
        ("--size", 32),
        ("--classes", 10),
    ):
        parser.add_argument(name, type=int, default=default)
    given = parser.parse_args()
    with dataio.join() as job, dataio.Loader(
        given.data, batch_size=given.batch_size, drop_last=True, fields=fields_of(given), seed=0,
        shuffle=shuffle.Partial(exchange=0.1), device=job.device,
    ) as loader:  # fmt: skip
        train(loader, given)


if __name__ == "__main__":
    main()
