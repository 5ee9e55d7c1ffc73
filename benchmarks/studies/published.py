r"""Does `tonari train` learn as well as a bare torch script of the same recipe?

The recipe is ``examples/cifar10_resnet.toml``. ``bare`` is a script of plain torch: images decoded
into memory, crops and flips of whole batches, the same model with the same first weights, SGD, the
same rates and the same average of the weights. ``full`` is `tonari train`. Beside them are runs
that hide rows, and the two honest controls: ``shorter`` trains all rows for fewer epochs,
``random`` hides rows by chance. Each way trains with each seed; differences are within a seed.

    OMP_NUM_THREADS=2 python -m benchmarks.studies.published --train cifar10-train.parquet \
        --test cifar10-test.parquet [--seeds 5] [--rows 50000] [--ways bare,full] \
        [--runs runs.jsonl] [SECTION.KEY=VALUE ...]

A run that the file of ``--runs`` has already, of the same rows and settings, is not repeated.
Prints a JSON line for each run, and one with means, and with differences from ``bare`` and their
95 % intervals (Student's t), at the end.
"""

import argparse
import io
import json
import math
import statistics
import tempfile
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import torch
import torch.nn.functional as F
from PIL import Image
from torch import Tensor, nn

from tonari.names import EXAMPLES
from tonari.report.machine import describe_machine
from tonari.trainer.config.config import Config, load_config
from tonari.trainer.models import seeded
from tonari.trainer.run.build import make_model
from tonari.trainer.run.loop import train

RECIPE = EXAMPLES / "cifar10_resnet.toml"
HIDDEN = 0.3
WAYS = ("bare", "full", "kakurenbo", "infobatch", "shorter", "random")
T_95 = {1: 12.706, 2: 4.303, 3: 3.182, 4: 2.776, 5: 2.571, 6: 2.447, 7: 2.365, 8: 2.306, 9: 2.262}


def take_rows(path: str, num_rows: int, directory: Path) -> Path:
    """Write some rows of a Parquet file, drawn once for all, as a file of its own."""
    out = directory / Path(path).name
    table = pq.read_table(path, columns=["jpg", "cls"])
    # Files may be in the order of the classes.
    chosen = np.random.default_rng(0).permutation(len(table))[:num_rows]
    pq.write_table(table.take(chosen), out)
    return out


def read_images(path: Path) -> tuple[Tensor, Tensor]:
    """Decode a file: uint8[rows, 3, 32, 32] and int64[rows]."""
    table = pq.read_table(path).to_pydict()
    pixels = [np.asarray(Image.open(io.BytesIO(data)).convert("RGB")) for data in table["jpg"]]
    return torch.from_numpy(np.stack(pixels)).permute(0, 3, 1, 2), torch.tensor(table["cls"])


def bare_batches(
    images: Tensor, labels: Tensor, size: int, rng: torch.Generator
) -> Iterator[tuple[Tensor, Tensor]]:
    """Shuffle, crop and flip an epoch's whole batches."""
    padded = F.pad(images, (4, 4, 4, 4))
    order = torch.randperm(len(images), generator=rng)
    for rows in torch.split(order, size)[: len(images) // size]:
        tops, lefts = torch.randint(9, (2, size), generator=rng)
        # int64[batch, 32]
        down, across = (first[:, None] + torch.arange(32) for first in (tops, lefts))
        flipped = torch.rand(size, generator=rng) < 0.5
        across = torch.where(flipped[:, None], across.flip(1), across)
        # uint8[batch, 32, 32, 3], then channels first
        cut = padded.permute(0, 2, 3, 1)[rows[:, None, None], down[:, :, None], across[:, None, :]]
        yield cut.permute(0, 3, 1, 2), labels[rows]


def train_bare(config: Config) -> dict[str, float]:
    """Train in plain torch; the accuracy of the weights, and of their average."""
    images, labels = read_images(Path(str(config.data.train)))
    test = read_images(Path(str(config.data.test)))
    optimizer_config, epochs = config.optimizer, config.run.epochs
    model = seeded(partial(make_model, config), seed=config.run.seed)
    decayed = [p for p in model.parameters() if p.ndim > 1]
    rest = [p for p in model.parameters() if p.ndim <= 1]
    groups: list[dict[str, Any]] = [{"params": decayed}, {"params": rest, "weight_decay": 0.0}]
    optimizer = torch.optim.SGD(
        groups, lr=optimizer_config.lr, momentum=optimizer_config.momentum,
        weight_decay=optimizer_config.weight_decay,
    )  # fmt: skip
    average = {name: value.clone() for name, value in model.state_dict().items()}
    rng = torch.Generator().manual_seed(config.run.seed)
    size, step = config.data.batch_size, 0
    num_steps, warm = len(images) // size, int(optimizer_config.warmup_epochs)
    for epoch in range(epochs):
        for number, (batch, target) in enumerate(bare_batches(images, labels, size, rng)):
            now = epoch + number / num_steps
            done = (now - warm) / (epochs - warm)
            rate = (1 + math.cos(math.pi * done)) / 2
            if now < warm:
                rate = (now + 1 / num_steps) / (warm + 1 / num_steps)
            for group in optimizer.param_groups:
                group["lr"] = optimizer_config.lr * rate
            F.cross_entropy(model(batch), target).backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            optimizer.zero_grad()
            step += 1
            kept = min(optimizer_config.ema, (1 + step) / (10 + step))
            for name, value in model.state_dict().items():
                if value.is_floating_point():
                    average[name].lerp_(value, 1 - kept)
    found = {"accuracy": accuracy_of(model, *test)}
    model.load_state_dict(average)
    return found | {"ema_accuracy": accuracy_of(model, *test)}


@torch.no_grad()
def accuracy_of(model: nn.Module, images: Tensor, labels: Tensor) -> float:
    model.eval()
    right = [(model(part).argmax(1) == its).sum() for part, its in
             zip(torch.split(images, 500), torch.split(labels, 500), strict=True)]  # fmt: skip
    model.train()
    return float(sum(right)) / len(labels)


def settings_of(way: str, epochs: int) -> list[str]:
    """Say what a way sets beside the recipe."""
    if way == "shorter":
        return [f"run.epochs={max(round(epochs * (1 - HIDDEN)), 2)}"]
    if way in ("kakurenbo", "random"):
        return [f"importance.kind={way}", f"importance.fraction={HIDDEN}"]
    return [f"importance.kind={way}"] if way == "infobatch" else []


def run_way(way: str, given: list[str], directory: Path) -> dict[str, float]:
    """Train one way; its accuracies and time."""
    epochs = load_config(RECIPE, given).run.epochs
    runs = f"run.directory={directory}/runs"
    config = load_config(RECIPE, [*given, runs, *settings_of(way, epochs)])
    started = time.perf_counter()
    if way == "bare":
        found = train_bare(config)
    else:
        hidden: list[float] = []
        trained = train(
            config,
            quiet=True,
            on_epoch=lambda line: hidden.append(float(line["hidden_fraction"] or 0)),
        )
        last = trained.last
        if last is None or not trained.finished:
            raise SystemExit(f"{way}: the run was stopped; start again with the same --runs")
        found = {name: float(last[name] or 0) for name in ("accuracy", "ema_accuracy")}
        found["hidden_fraction"] = statistics.fmean(hidden)
    return found | {"run_s": round(time.perf_counter() - started, 1)}


def summary(found: dict[str, list[dict[str, float]]]) -> dict[str, object]:
    """Average each way, and its differences from ``bare`` within a seed."""
    said: dict[str, object] = {}
    for way, runs in found.items():
        for name in ("accuracy", "ema_accuracy"):
            said[f"{way}_{name}"] = round(statistics.fmean(run[name] for run in runs), 4)
            if way == "bare" or "bare" not in found:
                continue
            pairs = zip(runs, found["bare"], strict=True)
            apart = [mine[name] - bare[name] for mine, bare in pairs]
            half = None
            if len(apart) in range(2, 11):
                half = T_95[len(apart) - 1] * statistics.stdev(apart) / math.sqrt(len(apart))
            said[f"{way}_{name}_over_bare"] = [statistics.fmean(apart), half]
    return said


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--train", required=True)
    parser.add_argument("--test", required=True)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--rows", type=int, default=50_000, help="to train on")
    parser.add_argument("--test-rows", type=int, default=10_000)
    parser.add_argument("--ways", default=",".join(WAYS))
    parser.add_argument("--runs", type=Path, help="where finished runs are kept, a line each")
    parser.add_argument("settings", nargs="*", metavar="SECTION.KEY=VALUE")
    given = parser.parse_args()
    ways = given.ways.split(",")
    found: dict[str, list[dict[str, float]]] = {way: [] for way in ways}
    about = {
        "rows": given.rows, "test_rows": given.test_rows, "settings": given.settings,
    }  # fmt: skip
    with tempfile.TemporaryDirectory() as scratch:
        root = Path(scratch)
        data = [
            f"data.train={take_rows(given.train, given.rows, root)}",
            f"data.test={take_rows(given.test, given.test_rows, root)}",
            f"data.cache={root}/cache", "run.checkpoint_epochs=0", *given.settings,
        ]  # fmt: skip
        machine = describe_machine(root)
        for seed in range(given.seeds):
            for way in ways:
                named = {"way": way, "seed": seed, **about}
                run = finished(given.runs, named)
                if run is None:
                    directory = root / f"{way}-{seed}"
                    run = run_way(way, [*data, f"run.seed={seed}"], directory)
                    line = json.dumps({**named, "run": run})
                    print(line, flush=True)
                    if given.runs is not None:
                        with given.runs.open("a") as file:
                            file.write(f"{line}\n")
                found[way].append(run)
    about["seeds"] = given.seeds
    print(json.dumps({"question": "published", **about, **summary(found), **machine}))


def finished(kept: Path | None, named: dict[str, object]) -> dict[str, float] | None:
    """Find a run that was finished before."""
    if kept is not None and kept.exists():
        for line in map(json.loads, kept.read_text().splitlines()):
            run: dict[str, float] = line.pop("run")
            if line == named:
                return run
    return None


if __name__ == "__main__":
    main()
