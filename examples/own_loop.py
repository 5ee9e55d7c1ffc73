"""A training loop of one's own, fed by Tonari: the same in one process and in each rank of a job.

    python examples/own_loop.py "shards/train-{000000..000003}.tar" --epochs 3
    mpiexec -n 4 python examples/own_loop.py "shards/train-{000000..000003}.tar"
    torchrun --nproc-per-node 4 examples/own_loop.py "shards/train-{000000..000003}.tar"

The samples hold an image (png or jpg) and its class in text; `tonari pack` makes such shards.
"""

import argparse

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import cross_entropy

import dataio
import importance
import shuffle


def main() -> None:
    given = parse_arguments()
    with dataio.join() as job:
        fields: dict[str, dataio.Field] = {
            "image": dataio.Image(
                given.image, resize=dataio.Resize(given.size), channels=given.channels
            ),
            "label": dataio.Int("cls"),
        }
        with dataio.Loader(
            given.shards, batch_size=given.batch_size, fields=fields, seed=0, device=job.device,
            shuffle=shuffle.Partial(exchange=0.1), importance=importance.Kakurenbo(0.3),
        ) as loader:  # fmt: skip
            train(loader, given, job.device)


def train(loader: dataio.Loader, given: argparse.Namespace, device: torch.device) -> None:
    torch.manual_seed(0)
    network = nn.Sequential(
        nn.Conv2d(given.channels, 32, 3, padding=1), nn.ReLU(), nn.AdaptiveAvgPool2d(4),
        nn.Flatten(), nn.Linear(32 * 16, given.classes),
    )  # fmt: skip
    # As pictures are.
    network.to(device).to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    model = nn.parallel.DistributedDataParallel(network)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    for epoch in loader.epochs(given.epochs):
        for group in optimizer.param_groups:
            group["lr"] = 0.05 * loader.lr_factor
        total = torch.zeros((), device=device)
        for batch in loader:
            logits = model(batch["image"].float() / 255)
            loss = cross_entropy(logits, batch["label"], reduction="none")
            mean = (loss * batch["weight"]).mean()
            mean.backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            optimizer.zero_grad()
            loader.report(batch, loss, *importance.outcome(logits, batch["label"]))
            total += mean.detach() / len(loader)
        model.eval()  # new scores change no batch statistics
        with torch.no_grad():
            for batch in loader.refresh():
                logits = model(batch["image"].float() / 255)
                loss = cross_entropy(logits, batch["label"], reduction="none")
                loader.report(batch, loss, *importance.outcome(logits, batch["label"]))
        model.train()  # type: ignore[no-untyped-call]
        dist.all_reduce(total)
        if dist.get_rank() == 0:
            mean_loss = float(total) / dist.get_world_size()
            hidden = loader.stats()["hidden_fraction"]
            print(f"epoch {epoch}: loss {mean_loss:.4f}, {hidden:.0%} hidden", flush=True)


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("shards", help="pattern, such as 'shards/train-{000000..000003}.tar'")
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--batch-size", type=int, default=32, help="per replica")
    parser.add_argument("--image", default="png", help="extension of the images")
    parser.add_argument("--size", type=int, default=8, help="height and width")
    parser.add_argument("--channels", type=int, default=1)
    parser.add_argument("--classes", type=int, default=10)
    return parser.parse_args()


if __name__ == "__main__":
    main()
