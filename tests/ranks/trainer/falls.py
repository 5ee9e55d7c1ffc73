"""Train whole runs, one after the other; in one of them, one rank may fall in some way, somewhere.

Arguments: report directory, configuration, then for each run its overrides joined by "|". One of
them may be "fall=WAY:WHERE:RANK": see ``PLANTS`` and ``fall``. A single run is started as the
command does it; of several, all share one process group.
"""

import contextlib
import json
import os
import signal
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

import dataio.batch.assemble
import dataio.store.staging
import tonari.trainer.checkpoint.checkpoint
import tonari.trainer.deliver.relay
import tonari.trainer.run.loop
import tonari.trainer.watch.stop
from dataio.job.launch import join
from tonari.trainer.config.config import load_config
from tonari.trainer.deliver.ring import Ring
from tonari.trainer.models.transformer import Block

STEP = 9
"""In the second epoch: rows are hidden, and a checkpoint is there to go on from."""

SIGNALS = {
    "kill": signal.SIGKILL,
    "stop": signal.SIGSTOP,
    "term": signal.SIGTERM,
    "twice": signal.SIGTERM,
    "launcher": signal.SIGTERM,
    "usr1": signal.SIGUSR1,
}

BATCH = 16
"""The same among all batches: of the first epoch's training, new scores and evaluation too."""

PARTS = 8
"""Of a batch: two threads work on them."""


def fall(way: str, report: Path) -> None:
    """Fail, hang or get a signal, the first time that any thread of this process comes here."""
    with contextlib.suppress(FileExistsError):
        (report / "fallen").touch(exist_ok=False)
        while way == "spin":
            pass
        if way == "sleep":
            threading.Event().wait()
        if way == "raise":
            raise ValueError("this rank is on fire")
        os.kill(find_launcher() if way == "launcher" else os.getpid(), SIGNALS[way])
        if way == "twice":
            tonari.trainer.watch.stop.AGAIN_S = 0.0
            os.kill(os.getpid(), SIGNALS[way])


def find_launcher() -> int:
    """Find the process that the job was started by: torchrun, or mpiexec behind its proxy."""
    parent = os.getppid()
    if "PMI_RANK" not in os.environ:
        return parent
    return int(Path(f"/proc/{parent}/stat").read_text().rpartition(")")[2].split()[1])


def counted(holder: object, name: str, at: int, rank: int, falls: Callable[[], None]) -> None:
    """Fall in a rank's call of a function, once it has been called so often."""
    made, calls = getattr(holder, name), iter(range(1, 1_000_000))

    def planted(*args: Any, **kwargs: Any) -> Any:
        if dist.get_rank() == rank and next(calls) >= at:
            falls()
        return made(*args, **kwargs)

    setattr(holder, name, planted)


class Armed:
    """Falls inside a block of the model: while a step trains it, or while it is evaluated."""

    def __init__(self, where: str, rank: int, falls: Callable[[], None]) -> None:
        self._where, self._rank, self._falls = where, rank, falls
        self._steps, self._evaluates = 0, False
        for name in ("build_parallel", "train_step", "evaluate"):
            setattr(
                tonari.trainer.run.loop,
                name,
                getattr(self, name)(getattr(tonari.trainer.run.loop, name)),
            )

    def build_parallel(self, made: Callable[..., Any]) -> Callable[..., Any]:
        def build(*args: Any) -> Any:
            parallel = made(*args)
            if dist.get_rank() == self._rank:
                for part in parallel.pipeline.parts:
                    # Not the block's own end: peers of tp wait inside it.
                    for block in part.modules():
                        if isinstance(block, Block):
                            block.up.register_forward_hook(self._passed)
            return parallel

        return build

    def train_step(self, made: Callable[..., Any]) -> Callable[..., Any]:
        def step(*args: Any, **kwargs: Any) -> Any:
            self._steps += 1
            return made(*args, **kwargs)

        return step

    def evaluate(self, made: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any) -> Any:
            self._evaluates = True
            try:
                return made(*args)
            finally:
                self._evaluates = False

        return run

    def _passed(self, block: nn.Module, given: object, made: torch.Tensor) -> None:
        if self._where == "evaluation":
            # That of the second epoch.
            if self._evaluates and self._steps >= STEP:
                self._falls()
        elif self._steps >= STEP and self._where == "forward":
            self._falls()
        elif self._steps >= STEP and made.requires_grad:
            made.register_hook(lambda gradient: self._falls())


def plant(way: str, where: str, rank: int, report: Path) -> None:
    """Make one rank fall."""

    def falls() -> None:
        fall(way, report)

    relay = tonari.trainer.deliver.relay
    places: dict[str, tuple[object, str, int]] = {
        "decode": (dataio.batch.assemble.Assembler, "run", BATCH * PARTS),
        "delivery": (relay.Inlet if rank else relay.Outlet, "_take" if rank else "hand_on", BATCH),
        "opening": (relay.Inlet, "_open", 1),
        "checkpoint": (tonari.trainer.checkpoint.checkpoint, "write_sums", 2),
        "staging": (dataio.store.staging.StagingRun, "_read_piece", 1),
    }
    if where in places:
        holder, name, at = places[where]
        counted(holder, name, at, rank, falls)
    else:
        Armed(where, rank, falls)


def watch_rings(report: Path) -> None:
    """Tell which files of shared memory were made."""
    create = Ring.create

    def told(slot_bytes: int) -> Any:
        ring = create(slot_bytes)
        with (report / "rings").open("a") as file:
            file.write(f"{ring.path}\n")
        return ring

    Ring.create = told  # type: ignore[method-assign]


def tell_pid(report: Path) -> None:
    """Tell each rank's process as soon as it knows its rank."""
    build: Callable[..., Any] = getattr(tonari.trainer.run.loop, "build_parallel")  # noqa: B009

    def tell(*args: Any) -> Any:
        (report / f"{dist.get_rank()}.pid").write_text(str(os.getpid()))
        return build(*args)

    setattr(tonari.trainer.run.loop, "build_parallel", tell)  # noqa: B010


def train(config: Path, case: str, report: Path) -> dict[str, Any]:
    given = [override for override in case.split("|") if not override.startswith("fall=")]
    summary = tonari.trainer.run.loop.train(load_config(config, given))
    return {
        "steps": summary.progress.steps, "finished": summary.finished, "by": summary.stopped_by,
    }  # fmt: skip


def main() -> None:
    report, config, *cases = Path(sys.argv[1]), Path(sys.argv[2]), *sys.argv[3:]
    watch_rings(report)
    for override in cases[0].split("|"):
        if override.startswith("fall="):
            way, where, rank = override.removeprefix("fall=").split(":")
            plant(way, where, int(rank), report)
    if len(cases) == 1:
        tell_pid(report)
        told = [train(config, cases[0], report)]
        own = int(os.environ.get("PMI_RANK", os.environ.get("RANK", "0")))
    else:
        with join(device="cpu") as job:
            told = [train(config, case, report) for case in cases]
            own = job.world.rank
    (report / f"{own}.json").write_text(json.dumps(told))


if __name__ == "__main__":
    main()
