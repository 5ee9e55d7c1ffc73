"""Train cases of `tests.lab.plan_of_epochs` one after another, and probe; rank 0 writes figures.

Arguments: a JSON list of what to do, the file to which each answer is added. A step is emulated: a
small network on images, and a pause in its forward pass, as of a device that computes meanwhile.
"""

import io
import json
import os
import queue
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import torch
from PIL import Image
from torch import Tensor, nn

from oracle.probe.probe import probe, save_probe
from oracle.trace import NoReports
from trainer import train
from trainer.config.config import Config, load_config
from trainer.run.build import build_parallel
from trainer.run.optimizers import build_optimizer
from trainer.run.own import Own
from trainer.run.step import train_step
from trainer.watch.launch import join

WIDTH = 64
AHEAD = 2
"""Batches that a job without a cache makes ahead, as `dataio.Workers.prefetch` has it."""


class Waiting(nn.Module):
    """A network that is small, and takes its time.

    Args:
        pause_s: Of each forward pass.
    """

    def __init__(self, pause_s: float) -> None:
        super().__init__()
        self.pause_s = pause_s
        self.first, self.last = nn.Linear(3 * 32 * 32, WIDTH), nn.Linear(WIDTH, 10)

    def forward(self, images: Tensor) -> Tensor:
        time.sleep(self.pause_s)
        found: Tensor = self.last(self.first(images.flatten(1).float() / 255).relu())
        return found


def batches(directory: Path, epoch: int, batch_size: int) -> Iterator[dict[str, Tensor]]:
    """Read shards in random order, whole, and make batches of their rows; no row is kept."""
    rng = np.random.default_rng(epoch)
    paths = sorted(directory.glob("*.parquet"))
    images: list[np.ndarray] = []
    labels: list[int] = []
    for number in rng.permutation(len(paths)):
        table = pq.read_table(paths[number], columns=["png", "cls"])
        rows = list(zip(table["png"].to_pylist(), table["cls"].to_pylist(), strict=True))
        for at in rng.permutation(len(rows)):
            pixels = Image.open(io.BytesIO(rows[at][0])).convert("RGB")
            images.append(np.asarray(pixels).transpose(2, 0, 1))
            labels.append(rows[at][1])
            if len(images) == batch_size:
                yield _batch(images, labels)
                images, labels = [], []
    if images:
        # Padded, as the loader does it
        padding = batch_size - len(images)
        batch = _batch(images + images[:1] * padding, labels + labels[:1] * padding)
        batch["weight"][batch_size - padding :] = 0
        yield batch


def _batch(images: list[np.ndarray], labels: list[int]) -> dict[str, Tensor]:
    rows = len(labels)
    return {
        "image": torch.from_numpy(np.stack(images)), "label": torch.tensor(labels),
        "weight": torch.ones(rows), "sample_id": torch.zeros(rows, dtype=torch.int64),
        "slot": torch.zeros(rows, dtype=torch.int64),
    }  # fmt: skip


def made_ahead(found: Iterator[dict[str, Tensor]], ahead: int) -> Iterator[dict[str, Tensor]]:
    """Let a thread go through an iterator, so many ahead."""
    ready: queue.Queue[dict[str, Tensor] | None] = queue.Queue(ahead)

    def run() -> None:
        for each in found:
            ready.put(each)
        ready.put(None)

    threading.Thread(target=run, daemon=True).start()
    while (batch := ready.get()) is not None:
        yield batch


def stream(config: Config, own: Own) -> list[float]:
    """Train epochs of a job of one rank without a cache; seconds of each."""
    times = []
    data = config.data
    with join(device="cpu", timeout_s=config.run.timeout_s) as job:
        parallel = build_parallel(config, job, own)
        pipeline, step = parallel.pipeline, 0
        optimizer = build_optimizer(config.optimizer, pipeline.parameters())
        for epoch in range(config.run.epochs):
            started = time.perf_counter()
            directory = Path(str(data.train)).parent
            for batch in made_ahead(batches(directory, epoch, data.batch_size), AHEAD):
                train_step(
                    pipeline, optimizer, NoReports(), [batch], clip=config.optimizer.clip, step=step
                )
                step += 1
            times.append(time.perf_counter() - started)
    return times


def do(job: dict[str, Any]) -> dict[str, Any]:
    """Do one thing; what rank 0 saw."""
    model = partial(Waiting, job["pause_s"])
    with tempfile.TemporaryDirectory() as scratch:
        cache = f"{job['scratch']}/{job['number']}"
        overrides = [
            *job["overrides"], f"run.directory={scratch}/run", f"data.cache.path={cache}"
        ]  # fmt: skip
        config = load_config(Path(job["settings"]), overrides)
        if job["kind"] == "probe":
            os.environ.pop("TONARI_RANKS_PER_NODE", None)
            ranks = job["ranks"]
            found = probe(config, world_size=ranks, own=Own(model=model), steps=8, data=True)
            if not int(os.environ.get("PMI_RANK", "0")):
                save_probe(found, Path(job["out"]))
            return {}
        if job["kind"] == "stream":
            return {"epochs_s": stream(config, Own(model=model))}
        if job["pretends"]:
            os.environ["TONARI_RANKS_PER_NODE"] = "1"
        lines: list[dict[str, Any]] = []
        train(config, model=model, resume="never", on_epoch=lambda line: lines.append(dict(line)))
    if not lines:
        return {}
    return {
        "epochs_s": [line["epoch_s"] for line in lines], "staging_s": lines[0]["staging_s"],
        "last": lines[-1],
    }  # fmt: skip


def busy_s() -> float:
    """Read the processor time that this machine has used, by anybody."""
    user, nice, system, _, _, irq, softirq, *_ = map(
        int, Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:]
    )
    return (user + nice + system + irq + softirq) / os.sysconf("SC_CLK_TCK")


def main() -> None:
    """Do it all."""
    out = Path(sys.argv[2])
    for job in json.loads(Path(sys.argv[1]).read_text()):
        began_s, began_cpu_s = time.perf_counter(), busy_s()
        found = do(job)
        if not int(os.environ.get("PMI_RANK", "0")):
            busy = (busy_s() - began_cpu_s) / (time.perf_counter() - began_s)
            line = {"case": job["case"], "round": job["round"], "busy": busy, **found}
            with out.open("a") as file:
                file.write(json.dumps(line) + "\n")


if __name__ == "__main__":
    main()
