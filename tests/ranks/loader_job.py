"""One loader on every rank, as a training job drives it; reports what it trained and what it took.

Arguments: report directory, and a JSON object, see `Options`.
"""

import json
import os
import resource
import signal
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch

import shuffle
from dataio import Bytes, Field, Int, Loader, NodeCache, Reports, Staging, Workers
from dataio.base.errors import SourceError
from dataio.world import World, discover_world
from importance import Kakurenbo

FIELDS: dict[str, Field] = {"data": Bytes("bin"), "number": Int("cls")}


@dataclass(frozen=True)
class Options:
    """What the job does.

    Attributes:
        source: Pattern of shards.
        cache: Cache directory.
        copies: Nodes that hold each row.
        exchange: Fraction; -1 holds all rows on every node.
        by: What decides which rows go where: "uniform", or "dealing", of all rows anew.
        hides: Whether `Kakurenbo` hides rows.
        at: What to go on from: directory of a save, or a state; None: from the beginning.
        save: Directory for the save that ends the job after ``stop`` batches; else a state ends it.
        stop: Batches until the job ends; None: all epochs.
        num_descriptors: Limit of open files, 0: as it is.
        frozen: Rank that stops itself after its second batch of ``fall_epoch``; -1: none.
        killed: Likewise, for one that kills itself.
        failed: Likewise, for one that raises a named error.
    """

    source: str
    cache: str
    copies: int = 1
    epochs: int = 3
    batch_size: int = 4
    num_threads: int = 1
    num_processes: int = 0
    exchange: float = 0.3
    by: Literal["uniform", "dealing"] = "uniform"
    hides: bool = False
    stage: str = "before"
    at: Any = None
    save: str = ""
    stop: int | None = None
    num_descriptors: int = 0
    frozen: int = -1
    killed: int = -1
    failed: int = -1
    fall_epoch: int = 1
    timeout_s: float = 60.0
    memory: bool = False


def transform(sample, rng):
    """Tell whether the process that it runs in has MPI."""
    return sample | {"with_mpi": np.array("mpi4py" in sys.modules)}


def memory() -> dict[str, int]:
    """Bytes of this process, by the kernel's names."""
    lines = Path("/proc/self/smaps_rollup").read_text().splitlines()[1:]
    return {line.split(":")[0]: int(line.split()[1]) * 1024 for line in lines}


def shuffle_of(options: Options) -> shuffle.Global | shuffle.Partial:
    if options.exchange < 0 or options.by == "dealing":
        return shuffle.Global(moves=options.by == "dealing")
    return shuffle.Partial(options.exchange)


def make(options: Options, world: World) -> Loader:
    policy = Kakurenbo(0.3, drops=(), alphas=(1.0,), warmup_epochs=0) if options.hides else None
    return Loader(
        options.source,
        batch_size=options.batch_size,
        fields=FIELDS,
        cache=NodeCache(options.cache, copies=2 if options.copies == 2 else 1),
        shuffle=shuffle_of(options),
        importance=policy,
        transform=transform if options.num_processes else None,
        seed=3,
        world=world,
        workers=Workers(threads=options.num_threads, processes=options.num_processes),
        staging=Staging(when="overlap" if options.stage == "overlap" else "before"),
        reports=Reports(progress=False),
    )


def tell_memory(loader: Loader, report: dict[str, Any]) -> None:
    # Proportional sizes are only right while everybody has mapped what it maps.
    loader.world.barrier(doing="finish the epoch")
    found = memory()
    report["files"].append(found["Pss_File"])
    report["private"].append(found["Pss_Anon"])
    loader.world.barrier(doing="measure memory")


def fall(options: Options, world: World, epoch: int, step: int) -> None:
    if (epoch, step) == (options.fall_epoch, 2):
        if world.rank == options.failed:
            raise SourceError("train-7.tar: is damaged, expected the archive that was listed")
        for rank, end in ((options.frozen, signal.SIGSTOP), (options.killed, signal.SIGKILL)):
            if world.rank == rank:
                os.kill(os.getpid(), end)


def train(loader: Loader, options: Options, report: dict[str, Any]) -> None:
    if isinstance(options.at, str):
        loader.restore(options.at)
    elif options.at is not None:
        loader.load_state_dict(options.at)
    left = -1 if options.stop is None else options.stop
    for epoch in loader.epochs(options.epochs):
        for batch in loader:
            valid = batch["slot"] >= 0
            ids = batch["sample_id"][valid].tolist()
            report["trained"] += [[epoch, i] for i in ids]
            report["wrong"] += sum(
                data[:4] != (number + 1).to_bytes(4, "little")
                for data, number in zip(batch["data"], batch["number"].tolist(), strict=True)
            )
            report["with_mpi"] += int(batch["with_mpi"].sum()) if "with_mpi" in batch else 0
            # What a training step does, and what first stumbles over a process that is ending.
            loss = torch.tensor(batch["sample_id"].tolist(), dtype=torch.float32)
            loader.report(batch, loss, batch["sample_id"] >= 0)
            fall(options, loader.world, epoch, loader.step)
            left -= 1
            if left == 0:
                if options.save:
                    loader.save(options.save)
                report["state"] = loader.state_dict()
                return
        for batch in loader.refresh():
            loader.report(batch, batch["sample_id"].float(), batch["sample_id"] >= 0)
        report["steps"].append([epoch, loader.step, len(loader)])
        if options.memory:
            tell_memory(loader, report)
    report["stats"] = loader.stats()


def main() -> None:
    out, options = Path(sys.argv[1]), Options(**json.loads(sys.argv[2]))
    if options.num_descriptors:
        # The hard limit too: a world raises the other as far as it goes.
        resource.setrlimit(resource.RLIMIT_NOFILE, (options.num_descriptors,) * 2)
    world = discover_world(timeout_s=options.timeout_s)
    report: dict[str, Any] = {name: [] for name in ("trained", "steps", "files", "private")}
    report |= {"wrong": 0, "with_mpi": 0, "state": None, "files_before": memory()["Pss_File"]}
    (out / f"{world.rank}.pid").write_text(str(os.getpid()))
    with make(options, world) as loader:
        train(loader, options, report)
    (out / f"{world.rank}.json").write_text(json.dumps(report))
    world.close()


if __name__ == "__main__":
    main()
