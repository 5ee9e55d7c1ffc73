r"""What does a step of the trainer cost on two ranks, beside a bare torch loop of the same calls?

``trainer`` is a step of `tonari.trainer.run.loop.train`, from one step to the next: batches from
the loader, delivery to the stages, losses back, metrics, the watchdog. ``bare`` is the forward
pass, backward pass and optimizer's step of the same model, divided by the same calls of torch, on
tokens in memory. The two take turns, a step each, so that what else the machine does hits both. The
difference is taken within a turn; shown are medians, and the interval that holds 95 % of medians of
drawn turns (bootstrap). Steps that hold an epoch's end, and the first ones, do not count.

    OMP_NUM_THREADS=1 mpiexec -n 2 python -m benchmarks.studies.mesh_step --mesh pp [--epochs 8]
"""

import argparse
import os
import statistics
import tempfile
import time
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
from torch import Tensor
from torch.distributed.fsdp import FSDPModule
from torch.distributed.pipelining import PipelineStage, Schedule1F1B

from dataio.base.seeding import generator, key
from tonari.trainer.config.config import Config, load_config
from tonari.trainer.mesh.average import average_gradients
from tonari.trainer.mesh.parallelize import parallelize
from tonari.trainer.mesh.pipeline import Pipeline
from tonari.trainer.models import seeded
from tonari.trainer.run import loop
from tonari.trainer.run.build import make_model
from tonari.trainer.run.optimizers import build_optimizer
from tonari.trainer.run.step import train_step
from tonari.trainer.run.tasks import cross_entropy

SETTINGS = """
[data]
kind = "text"
train = "{root}/text"
cache = "{root}/cache"
sequence_length = 64
batch_size = 8
[shuffle]
exchange = 0.1
[model]
kind = "gpt"
width = 192
depth = 4
heads = 6
[optimizer]
kind = "adamw"
lr = 0.001
[run]
directory = "{root}/run"
log_steps = 20
checkpoint_epochs = 0
device = "cpu"
"""
MESHES = {
    "dp": (),
    "fsdp": ("mesh.dp_shard=2",),
    "tp": ("mesh.tp=2",),
    "pp": ("mesh.pp=2", "mesh.microbatches=2"),
}
NUM_BYTES, WARM_UP = 120_000, 20

Times = tuple[float, float]
"""Wall and processor time of this rank, s."""


class Bare:
    """The same model and mesh, and nothing else."""

    def __init__(self, config: Config, pipeline: Pipeline) -> None:
        place, rows = pipeline.place, config.data.batch_size
        model = seeded(partial(make_model, config), seed=0)
        (self.part,) = parallelize(model, pipeline.mesh, place)
        self.optimizer = build_optimizer(config.optimizer, self.part.parameters())
        self.place, self.group = place, pipeline.mesh.get_group("dp_replicate")
        rng = torch.Generator().manual_seed(1)
        self.tokens = torch.randint(256, (rows, config.data.sequence_length + 1), generator=rng)
        self.schedule = None
        if place.sizes[0] > 1:
            if isinstance(self.part, FSDPModule):
                self.part.set_reshard_after_forward(False)
            half = rows // 2
            stage = PipelineStage(
                self.part, place.stages[0], 2, torch.device("cpu"),
                input_args=self.part.input_shape(half), output_args=self.part.output_shape(half),
                group=pipeline.mesh.get_group("pp"),
            )  # fmt: skip
            # The loss has its scale, as the trainer's: torch would pass over all gradients again.
            self.schedule = Schedule1F1B(stage, 2, loss_fn=self.loss, scale_grads=False)

    def loss(self, logits: Tensor, target: Tensor) -> Tensor:
        """Average over all tokens of the whole batch."""
        losses = cross_entropy(logits.flatten(0, 1), target.flatten())
        return losses.sum() / self.tokens[:, 1:].numel()

    def step(self) -> None:
        """Train once."""
        inputs, target = self.tokens[:, :-1].contiguous(), self.tokens[:, 1:].contiguous()
        if self.schedule is None:
            self.loss(self.part(inputs), target).backward()  # type: ignore[no-untyped-call]
            if self.place.num_replicas > 1 and not isinstance(self.part, FSDPModule):
                average_gradients(self.part.parameters(), self.group)
        elif self.place.has_input:
            self.schedule.step(inputs, return_outputs=False)
        else:
            self.schedule.step(target=target, return_outputs=False)
        self.optimizer.step()
        self.optimizer.zero_grad()


def measure(config: Config) -> tuple[list[tuple[Times, Times]], int]:
    """Train by the settings with a bare step after each of the trainer's.

    Returns:
        The times of the trainer's step and of the bare one, of each turn; and this rank.
    """
    turns: list[tuple[Times, Times]] = []
    bare, before = list[Bare](), list[Times]()

    def in_turn(pipeline: Pipeline, optimizer: Any, loader: Any, *given: Any, **named: Any) -> Any:
        if not bare:
            bare.append(Bare(config, pipeline))
        done = train_step(pipeline, optimizer, loader, *given, **named)
        trained = _now()
        bare[0].step()
        after = _now()
        # What an epoch's end takes lies before the first step of the next.
        if before and loader.step > 1:
            turns.append((_since(before[0], trained), _since(trained, after)))
        before[:] = [after]
        return done

    with patch.object(loop, "train_step", in_turn):
        ended = loop.train(config, resume="never")
    return turns[WARM_UP:], ended.rank


def interval(values: list[float]) -> tuple[float, float]:
    """Find where 95 % of the medians of drawn values lie."""
    drawn = generator(key(0, "bootstrap")).choice(values, (2000, len(values)))
    low, high = np.percentile(np.median(drawn, axis=1), [2.5, 97.5])
    return float(low), float(high)


def main() -> None:
    """Measure one mesh."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--mesh", choices=tuple(MESHES), default="pp", help="how two ranks divide")
    parser.add_argument("--epochs", type=int, default=3, help="each of some 115 or 230 steps")
    given = parser.parse_args()
    # All ranks are on one node, and write the same.
    shared = Path(tempfile.gettempdir()) / f"tonari-mesh-step-{os.getppid()}"
    shared.mkdir(exist_ok=True)
    _run(given.mesh, given.epochs, shared)


def _run(mesh: str, epochs: int, root: Path) -> None:
    text = bytes(torch.randint(97, 123, (NUM_BYTES,), generator=torch.Generator()).tolist())
    (root / "text").write_bytes(text)
    settings = root / "run.toml"
    settings.write_text(SETTINGS.format(root=root))
    config = load_config(settings, (*MESHES[mesh], f"run.epochs={epochs}"))
    turns, rank = measure(config)
    for number, name in enumerate(("wall", "processor")):
        trained, bare = ([turn[way][number] * 1e3 for turn in turns] for way in (0, 1))
        more = [a - b for a, b in zip(trained, bare, strict=True)]
        low, high = interval(more)
        whole = statistics.median(bare)
        print(
            f"{mesh} rank {rank}, {name} time: trainer {statistics.median(trained):.2f} ms, bare "
            f"{whole:.2f} ms, difference {statistics.median(more):.2f} [{low:.2f}, {high:.2f}] ms, "
            f"{100 * statistics.median(more) / whole:.1f} % [{100 * low / whole:.1f}, "
            f"{100 * high / whole:.1f}] of {len(turns)} steps",
            flush=True,
        )


def _now() -> Times:
    return time.perf_counter(), time.thread_time()


def _since(before: Times, after: Times) -> Times:
    return after[0] - before[0], after[1] - before[1]


if __name__ == "__main__":
    main()
