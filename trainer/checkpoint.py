"""A run on disk: model and optimizer by torch's distributed checkpoint, the loader beside them.

One directory a checkpoint, named by its step. It is written under another name and renamed when
whole, so a kill at any point leaves the one before it usable. Nothing in it depends on how many
ranks share the parameters. Torch's files hold pickles: open only directories you trust.
"""

import json
import os
import re
import shutil
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint import state_dict_loader, state_dict_saver
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_state_dict,
    set_state_dict,
)

from trainer.errors import ConfigError

OPTIONS = StateDictOptions(flatten_optimizer_state_dict=True)
NAME = re.compile(r"step-\d{8}")


@dataclass(frozen=True)
class Progress:
    """How far a run has come: epochs and steps that are done."""

    epochs: int = 0
    steps: int = 0


class Saveable(Protocol):
    """What a checkpoint needs of the loader."""

    def save(self, path: Path) -> None: ...

    def restore(self, path: Path) -> None: ...


def save(
    directory: Path,
    *,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    loader: Saveable,
    progress: Progress,
    keep: int,
) -> Path:
    """Write a checkpoint, then remove all but the newest. Collective.

    Args:
        directory: Of all checkpoints of the run; every rank sees it.
        model: As ``parallelize`` returned it.
        optimizer: Its optimizer.
        loader: Saved with it.
        progress: Names the checkpoint; one of the same step is left as it is.
        keep: Newest checkpoints to keep, >= 1.

    Returns:
        The checkpoint's directory.
    """
    final = directory / f"step-{progress.steps:08d}"
    partial = final.with_suffix(".partial")
    if _agreed(final.exists()):
        return final
    if dist.get_rank() == 0:
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)
    dist.barrier()
    state, optimizer_state = get_state_dict(model, optimizer, options=OPTIONS)
    both = {"model": state, "optimizer": optimizer_state}
    state_dict_saver.save(both, checkpoint_id=partial / "torch")
    loader.save(partial / "loader")
    dist.barrier()
    if dist.get_rank() == 0:
        (partial / "progress.json").write_text(json.dumps(asdict(progress)))
        _sync(partial / "progress.json")
        _sync(partial)
        partial.rename(final)
        _sync(directory)
        _remove_old(directory, keep)
    dist.barrier()
    return final


def restore(
    path: Path, *, model: nn.Module, optimizer: torch.optim.Optimizer, loader: Saveable
) -> Progress:
    """Go on where ``save`` was called, on any mesh of as many replicas. Collective.

    Raises:
        ConfigError: If ``path`` is not a whole checkpoint, or not of this model.
        StateError: If it is of another loader.
    """
    progress = _load_progress(path)
    state, optimizer_state = get_state_dict(model, optimizer, options=OPTIONS)
    both: dict[str, dict[str, Any]] = {"model": state, "optimizer": optimizer_state}
    try:
        state_dict_loader.load(both, checkpoint_id=path / "torch")
    except (CheckpointException, RuntimeError, ValueError) as error:
        raise ConfigError(
            f"{path}: does not fit the model and optimizer: {_reason(error)}; set [model] and "
            "[optimizer] as they were when it was written, or start anew in another run.directory"
        ) from error
    set_state_dict(
        model, optimizer, model_state_dict=both["model"], optim_state_dict=both["optimizer"],
        options=OPTIONS,
    )  # fmt: skip
    loader.restore(path / "loader")
    return progress


def latest(directory: Path) -> Path | None:
    """Find the newest whole checkpoint of a run."""
    found = _all(directory)
    return found[-1] if found else None


def _reason(error: BaseException) -> object:
    # The exception's own text holds each rank's whole traceback.
    failures = error.failures if isinstance(error, CheckpointException) else {}
    return next((failure for failure, _ in failures.values()), error)


def _all(directory: Path) -> list[Path]:
    if not directory.is_dir():
        return []
    return sorted(path for path in directory.iterdir() if NAME.fullmatch(path.name))


def _load_progress(path: Path) -> Progress:
    try:
        return Progress(**json.loads((path / "progress.json").read_text()))
    except (OSError, ValueError, TypeError) as error:
        raise ConfigError(
            f"{path}: not a whole checkpoint: {error}; give a step-NUMBER directory of a run's "
            "checkpoints, or --resume auto for the newest"
        ) from error


def _remove_old(directory: Path, keep: int) -> None:
    for path in _all(directory)[:-keep]:
        # Renamed first: a kill here must not leave half a checkpoint under a whole one's name.
        path.rename(path.with_suffix(".partial"))
    for path in directory.glob("step-*.partial"):
        shutil.rmtree(path)


def _agreed(value: bool) -> bool:
    # Rank 0's view decides: a shared filesystem may show the others an older one.
    told = torch.tensor([value])
    dist.broadcast(told, src=0)
    return bool(told.item())


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
