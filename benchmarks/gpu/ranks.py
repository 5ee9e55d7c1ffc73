"""Row 3: do several processes on one card train as one process does?

Each case is a mesh of 2 to 8 processes that train some steps of a small GPT in float32, each
replica on its part of the batch that one process trains alone; the losses must be those of one
process. By gloo all take the same card. NCCL takes one process a card, from 2.30 on several if
``NCCL_MULTI_RANK_GPU_ENABLE`` is 1 (these then want MPS); where neither is here, its cases are
left out. Nothing is timed: processes wait for each other's turn on a card.
"""

import json
import os
import statistics
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from benchmarks.gpu.jobs import filled, make_config
from benchmarks.gpu.row import Case, Goal, Setting, Ways
from dataio.rows.samples import Batch
from tonari.oracle.trace import make_batch
from tonari.trainer.run.build import build_rank
from tonari.trainer.run.optimizers import build_optimizer
from tonari.trainer.run.own import Own
from tonari.trainer.run.step import train_step

QUESTION = "Several processes on one card: losses as of one"

STEPS, ROWS = 4, 8
"""Of a training; rows of a step, all replicas together."""
TIMEOUT_S = 90
SEVERAL_A_CARD = (2, 30)
"""NCCL's version that takes several processes a card."""
BASE = (
    "model.vocabulary=256", "data.sequence_length=64", "model.width=64", "model.depth=4",
    "model.heads=4", "mesh.dtype=float32", "optimizer.clip=1.0", "optimizer.lr=3e-3",
)  # fmt: skip


@dataclass(frozen=True)
class Mesh:
    """How processes share a training."""

    name: str
    ranks: int
    replicas: int
    settings: tuple[str, ...]


MESHES = (
    Mesh("fsdp 2", 2, 2, ("mesh.dp_shard=2",)),
    Mesh("tp 2", 2, 1, ("mesh.tp=2",)),
    Mesh("pp 2", 2, 1, ("mesh.pp=2", "mesh.microbatches=2")),
    Mesh("hsdp 2 x 2", 4, 4, ("mesh.dp_replicate=2", "mesh.dp_shard=2")),
    Mesh("hsdp 2 x 2, tp 2", 8, 4, ("mesh.dp_replicate=2", "mesh.dp_shard=2", "mesh.tp=2")),
)


def cases(setting: Setting) -> Sequence[Case]:
    """List the meshes, by gloo and by NCCL."""
    goals = (Goal("several", "most_loss_difference", most=1e-4),)
    listed = []
    for backend in ("gloo", "nccl"):
        for mesh in MESHES:
            lacks = _lack(mesh) if backend == "nccl" else ""
            if setting.tiny and mesh is not MESHES[0]:
                lacks = "tiny: one mesh shows that all can begin"
            measured = partial(measure, setting, mesh, backend)
            listed.append(Case(f"{mesh.name}, {backend}", measured, goals, lacks))
    return listed


def _lack(mesh: Mesh) -> str:
    cards = torch.cuda.device_count()
    if not cards:
        return "NCCL needs a GPU"
    version = torch.cuda.nccl.version()  # type: ignore[no-untyped-call]
    if cards >= mesh.ranks or version >= SEVERAL_A_CARD:
        return ""
    found = ".".join(map(str, version))
    return f"NCCL {found} takes one process a card: {mesh.ranks} processes, {cards} cards here"


def measure(setting: Setting, mesh: Mesh, backend: str) -> Ways:
    """Train by one process, then by several."""
    alone = train(setting, Mesh("one", 1, 1, ()), backend)
    several = train(setting, mesh, backend)
    differences = [abs(found / due - 1) for found, due in zip(several, alone, strict=True)]
    return {
        "one": {"last_loss": alone[-1]},
        "several": {"last_loss": several[-1], "most_loss_difference": max(differences)},
    }


def train(setting: Setting, mesh: Mesh, backend: str) -> list[float]:
    """Train by one process, this one, or by several: each step's mean loss over all replicas."""
    with tempfile.TemporaryDirectory() as directory:
        given = setting, mesh, backend, directory
        if mesh.ranks == 1:
            be_rank(0, *given)
        else:
            mp.spawn(be_rank, given, nprocs=mesh.ranks)  # type: ignore[attr-defined,no-untyped-call]
        found = [json.loads(path.read_text()) for path in Path(directory).glob("*.json")]
    return [statistics.mean(step) for step in zip(*found, strict=True)]


class Losses:
    """Stands for a loader, and keeps the means of what is reported; a step has one batch."""

    needs_outcome = False

    def __init__(self) -> None:
        self.means: list[float] = []

    def report(self, batch: Batch, loss: torch.Tensor, *_: object) -> None:
        """Keep a batch's mean."""
        self.means.append(float(loss.float().mean()))


def be_rank(rank: int, setting: Setting, mesh: Mesh, backend: str, directory: str) -> None:
    """Be one of the processes; the scorer of each replica writes down its losses."""
    os.environ["NCCL_MULTI_RANK_GPU_ENABLE"] = "1"
    device = torch.device("cpu")
    if setting.device == "cuda":
        device = torch.device("cuda", rank % torch.cuda.device_count() if backend == "nccl" else 0)
        torch.cuda.set_device(device)
    dist.init_process_group(
        f"cpu:gloo,cuda:{backend}" if device.type == "cuda" else "gloo",
        init_method=f"file://{directory}/meeting", rank=rank, world_size=mesh.ranks,
        timeout=timedelta(seconds=TIMEOUT_S),
    )  # fmt: skip
    rows = ROWS // mesh.replicas
    config = make_config("gpt", setting, *BASE, *mesh.settings, f"data.batch_size={rows}")
    parallel = build_rank(config, rank=rank, world_size=mesh.ranks, device=device, own=Own())
    pipeline, losses = parallel.pipeline, Losses()
    optimizer = build_optimizer(config.optimizer, pipeline.parameters())
    whole = make_config("gpt", setting, *BASE, f"data.batch_size={ROWS}")
    batch = filled(make_batch(whole, Own(), parallel.task, pipeline.place))
    own = slice(pipeline.place.replica * rows, (pipeline.place.replica + 1) * rows)
    batch = {name: value[own].to(device) for name, value in batch.items()}
    for step in range(STEPS):
        train_step(pipeline, optimizer, losses, [batch], clip=config.optimizer.clip, step=step)
    if rank == pipeline.place.scorer:
        Path(directory, f"{rank}.json").write_text(json.dumps(losses.means))
    dist.barrier()
    dist.destroy_process_group()
