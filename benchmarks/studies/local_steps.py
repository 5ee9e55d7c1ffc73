"""Local steps beside an exchange: which H and Q train class-sorted nodes well, and for what bytes?

Eight nodes of one replica are simulated in one process. Rows of CIFAR-10, sorted by class, lie on
them as a job stages them, move as `shuffle.Partial` of Q moves them, and are trained in the batches
that a loader deals (the shipped functions, `shuffle.mixing.full_batches` and `shuffle.placement`).
Each node takes H steps of AdamW from the same weights; then the mean of their differences is the
gradient of one outer step, Nesterov's momentum (DiLoCo, Douillard et al. 2311.08105: 0.7 and 0.9).
H = 1 is plain data parallelism: the mean gradient, one AdamW. Nodes keep their AdamW's moments.

A round costs a node the bytes of an all-reduce of float32 weights in a ring; the exchange Q of its
rows, as compressed JPEG. Controls: H = 1 with all rows exchanged; and for each cell with H > 1 and
Q > 0, no exchange, its bytes spent on more frequent rounds (``"instead"``).

    python -m benchmarks.studies.local_steps --parquet DIRECTORY [--epochs 16] [--seeds 5]

The inner learning rate is chosen for each H, with rows that move and without, among ``--lrs`` by a
seed that is not among those reported. ``--outer 1 0`` averages models, without momentum.
``--fragments 2`` exchanges the two layers H / 2 steps apart (Streaming DiLoCo, Douillard et al.
2501.18512, without its overlap). Prints a line of JSON for each cell; the corners of the map with
more seeds.
"""

import argparse
import io
import json
import statistics
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from PIL import Image
from torch import Tensor

from dataio.base.seeding import key
from dataio.plan.layout import Layout
from shuffle.mixing import full_batches
from shuffle.plan import num_leaving, placement
from tonari.report.machine import describe_machine

NODES, ROWS, BATCH, SIDE, HIDDEN, CLASSES = 8, 512, 16, 16, 96, 10
BETAS, WEIGHT_DECAY = (0.9, 0.95), 0.01


@dataclass(frozen=True)
class Labelled:
    """Labelled pictures: float32[n, features], int64[n], and the mean bytes of a stored one."""

    features: Tensor
    labels: Tensor
    mean_bytes: float


def read(path: Path, number: int) -> Labelled:
    """Take as many rows of each class, sorted by class, and shrink them."""
    table = pq.read_table(path)
    labels = table["cls"].to_numpy()
    picked = np.concatenate([np.flatnonzero(labels == each)[: -(-number // CLASSES)]
                             for each in range(CLASSES)])[:number]  # fmt: skip
    files = [table["jpg"][int(row)].as_py() for row in picked]
    small = [Image.open(io.BytesIO(each)).resize((SIDE, SIDE)) for each in files]
    features = torch.tensor(np.stack(list(map(np.asarray, small)))).float().flatten(1) / 128 - 1
    return Labelled(
        features, torch.from_numpy(labels[picked]).long(), statistics.mean(map(len, files))
    )


class LocalModels:
    """The same two-layer network on each node, and an AdamW of each."""

    def __init__(self, seed: int, *, lr: float, outer: tuple[float, float]) -> None:
        self.outer_lr, self.outer_momentum = outer
        drawn = torch.Generator().manual_seed(key(seed, "weights") % 2**63)
        shapes = ((3 * SIDE**2, HIDDEN), (1, HIDDEN), (HIDDEN, CLASSES), (1, CLASSES))
        self.shared = [torch.randn(shape, generator=drawn) * (shape[0] > 1) * shape[0] ** -0.5
                       for shape in shapes]  # fmt: skip
        self.outer = [torch.zeros_like(each) for each in self.shared]
        # float32[nodes, ...]
        self.own = [each.repeat(NODES, 1, 1).requires_grad_() for each in self.shared]
        self.inner = torch.optim.AdamW(self.own, lr=lr, betas=BETAS, weight_decay=WEIGHT_DECAY)
        self.model_bytes = 4 * sum(each.numel() for each in self.shared)

    def step(self, features: Tensor, labels: Tensor, *, average: bool) -> None:
        """Take a step on float32[nodes, batch, features]; by the mean gradient, if ``average``."""
        logits = forward(self.own, features)
        loss = F.cross_entropy(logits.flatten(0, 1), labels.flatten()) * NODES
        loss.backward()  # type: ignore[no-untyped-call]
        for each in self.own if average else ():
            assert each.grad is not None
            each.grad.copy_(each.grad.mean(0).expand_as(each.grad))
        self.inner.step()
        self.inner.zero_grad()

    @torch.no_grad()
    def round(self, part: slice = slice(None)) -> None:
        """Make one model of all, or one part of it, by an outer step."""
        parts = (weights[part] for weights in (self.shared, self.outer, self.own))
        for shared, momentum, own in zip(*parts, strict=True):
            difference = shared - own.mean(0)
            momentum.mul_(self.outer_momentum).add_(difference)
            shared.sub_(self.outer_lr * (difference + self.outer_momentum * momentum))
            own.copy_(shared.expand_as(own))


def forward(weights: list[Tensor], features: Tensor) -> Tensor:
    """floating[nodes, batch, classes]."""
    first, first_bias, last, last_bias = weights
    return torch.relu(features @ first + first_bias) @ last + last_bias


def batches(layout: Layout, seed: int, epoch: int, exchange: float) -> NDArray[np.int64]:
    """int64[steps, nodes, batch]: The samples that each node trains."""
    found = []
    for node in range(NODES):
        held = placement(layout, node=node, exchange=exchange, seed=seed, epoch=epoch)
        slots = full_batches(
            layout, replica=node, holds_all=False, seed=seed, epoch=epoch, batch_size=BATCH
        )
        found.append(held[slots])
    return np.stack(found, axis=1)


def train(
    rows: Labelled,
    test: Labelled,
    *,
    seed: int,
    every: int,
    exchange: float,
    epochs: int,
    lr: float,
    outer: tuple[float, float],
    fragments: int,
) -> dict[str, float]:
    """Train a run; its accuracy at the end, and the bytes that a node has sent."""
    layout, nodes = Layout((1,) * NODES, len(rows.labels)), LocalModels(seed, lr=lr, outer=outer)
    size = len(nodes.shared) // fragments
    parts = [slice(size * part, size * (part + 1)) for part in range(fragments)]
    taken, sent = 0, 0.0

    def exchange_models(part: slice) -> None:
        nonlocal sent
        nodes.round(part)
        sent += 4 * sum(each.numel() for each in nodes.shared[part])

    for epoch in range(epochs):
        for samples in torch.from_numpy(batches(layout, seed, epoch, exchange)):
            for group in nodes.inner.param_groups:
                group["lr"] = lr * (1 - taken / (epochs * ROWS // BATCH))
            nodes.step(rows.features[samples], rows.labels[samples], average=every == 1)
            taken += 1
            for number, part in enumerate(parts):
                if every > 1 and (taken + number * every // fragments) % every == 0:
                    exchange_models(part)
    for number, part in enumerate(parts):
        if (taken + number * every // fragments) % every:
            exchange_models(part)
    shared = [each[0] for each in nodes.own]
    right = forward(shared, test.features).argmax(-1) == test.labels
    sent = 2 * (NODES - 1) / NODES * (nodes.model_bytes * taken if every == 1 else sent)
    moved = num_leaving(layout, exchange) * (epochs - 1) * rows.mean_bytes
    return {"accuracy": float(right.float().mean()), "model_bytes": sent, "row_bytes": moved}


def sum_up(found: list[dict[str, float]]) -> dict[str, Any]:
    """Mean accuracy over seeds, its standard deviation, and the bytes of a node."""
    got = [each["accuracy"] for each in found]
    return {
        "accuracy": round(statistics.mean(got), 4),
        "deviation": round(statistics.stdev(got), 4) if len(got) > 1 else None,
        "seeds": len(got), "model_mb": round(found[0]["model_bytes"] / 1e6, 2),
        "row_mb": round(found[0]["row_bytes"] / 1e6, 3),
    }  # fmt: skip


def measure(rows: Labelled, test: Labelled, args: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Train every cell, then what its bytes would buy without an exchange."""

    def run(seed: int, every: int, exchange: float, lr: float) -> dict[str, float]:
        return train(
            rows, test, seed=seed, every=every, exchange=exchange, epochs=args.epochs, lr=lr,
            outer=(args.outer[0], args.outer[1]), fragments=args.fragments,
        )  # fmt: skip

    chosen = {
        (every, moves): max(
            args.lrs, key=lambda lr: run(1000, every, moves * max(args.exchanges), lr)["accuracy"]
        )
        for every in args.every for moves in (False, True)
    }  # fmt: skip
    for every in args.every:
        for exchange in args.exchanges:
            is_corner = every in args.every[:: len(args.every) - 1]
            is_corner &= exchange in args.exchanges[:: len(args.exchanges) - 1]
            seeds = range(args.seeds if is_corner else args.seeds_within)
            lr = chosen[every, exchange > 0]
            cell = {"H": every, "Q": exchange, "lr": lr, "outer": args.outer}
            cell |= {"fragments": args.fragments}
            whole = [run(seed, every, exchange, lr) for seed in seeds]
            yield {**cell, **sum_up(whole)}
            if every > 1 and exchange:
                total = whole[0]["model_bytes"] + whole[0]["row_bytes"]
                instead = max(2, int(every * whole[0]["model_bytes"] / total))
                found = [run(seed, instead, 0.0, chosen[every, False]) for seed in seeds]
                yield {**cell, "instead": {"H": instead, "Q": 0.0}, **sum_up(found)}


def main() -> None:
    """Print a line of JSON for each cell."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--parquet", type=Path, required=True)
    parser.add_argument("--every", type=int, nargs="*", default=[1, 8, 32, 128])
    parser.add_argument("--exchanges", type=float, nargs="*", default=[0.0, 0.05, 0.25, 1.0])
    parser.add_argument("--outer", type=float, nargs=2, default=[0.7, 0.9])
    parser.add_argument("--fragments", type=int, default=1, choices=(1, 2))
    parser.add_argument("--lrs", type=float, nargs="*", default=[1e-4, 3e-4, 1e-3, 3e-3, 1e-2])
    for name, value in (("epochs", 16), ("seeds", 5), ("seeds_within", 2)):
        parser.add_argument(f"--{name.replace('_', '-')}", type=int, default=value)
    args = parser.parse_args()
    torch.set_num_threads(1)
    rows = read(args.parquet / "cifar10-train.parquet", NODES * ROWS)
    test = read(args.parquet / "cifar10-test.parquet", 2500)
    machine = describe_machine(Path(tempfile.gettempdir()))
    for figures in measure(rows, test, args):
        print(json.dumps(figures | machine), flush=True)


if __name__ == "__main__":
    main()
