"""Read a checkpoint in one process, without the mesh that wrote it, and write plain weights."""

import json
import math
import os
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
from torch import Tensor
from torch.distributed.checkpoint import state_dict_loader
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from tonari.trainer.checkpoint.plain import PlainPlanner, PlainReader
from tonari.trainer.checkpoint.state import first_reason
from tonari.trainer.checkpoint.sums import check_sums
from tonari.trainer.errors import CheckpointError

Value = Tensor | float | int | bool | None
StoredTensor = TensorStorageMetadata | None
MODEL, AVERAGE = "model.", "ema."
"""Before the names of weights in a checkpoint, and of their averages."""


def read_checkpoint(
    path: Path, *, optimizer: bool = False, trusted: bool = False
) -> dict[str, dict[str, Value]]:
    """Put the shards of a checkpoint together, on the CPU.

    Args:
        path: What ``Checkpoints.save`` wrote; all of its files are checked.
        optimizer: Whether to read the optimizer's state too.
        trusted: Whether to read what may run code; see `tonari.trainer.checkpoint.plain`.

    Returns:
        The ``"model"``'s state by name, as the plain model's ``state_dict`` has it, and the
        ``"optimizer"``'s, flat: ``state.NAME.momentum_buffer``, ``param_groups.NAME.lr``.

    Raises:
        CheckpointError: If a file is missing or damaged, or a part of a tensor was never written.
    """
    stored = stored_tensors(path, trusted=trusted)
    kinds = ("model", "optimizer") if optimizer else ("model",)
    names = [name for name in stored if name.split(".", 1)[0] in kinds]
    flat = read_tensors(path, names, stored, trusted=trusted)
    return {
        kind: {
            name.removeprefix(f"{kind}."): value
            for name, value in flat.items()
            if name.startswith(f"{kind}.")
        }
        for kind in kinds
    }


def read_averaged(path: Path, *, trusted: bool = False) -> dict[str, Value]:
    """Put the averaged weights of a checkpoint together, with all else that its model holds.

    Args:
        path: What ``Checkpoints.save`` wrote.
        trusted: As `read_checkpoint`.

    Returns:
        The model's state by name, as `read_checkpoint` gives it.

    Raises:
        CheckpointError: If a file is missing or damaged, or there are no averaged weights.
    """
    stored = stored_tensors(path, trusted=trusted)
    kept = [name for name in stored if name.startswith((MODEL, AVERAGE))]
    flat = read_tensors(path, kept, stored, trusted=trusted)
    model, average = (
        {name.removeprefix(kind): its for name, its in flat.items() if name.startswith(kind)}
        for kind in (MODEL, AVERAGE)
    )
    if not average:
        raise no_average(path)
    found: dict[str, Value] = {}
    for name, value in model.items():
        if name in average or not (isinstance(value, Tensor) and value.is_floating_point()):
            found[name] = average.get(name, value)
            continue
        # The average has one name of a tied weight, of which the model's state has all.
        same = [other for other in average if _is_same(model.get(other), value)]
        if not same or not all(_is_same(average[other], average[same[0]]) for other in same):
            raise CheckpointError(
                f"{path}: found {len(same)} averages that may be that of {name}, expected one of "
                "each weight; the checkpoint is not whole: give another"
            )
        found[name] = average[same[0]]
    return found


def no_average(path: Path) -> CheckpointError:
    """Say that a checkpoint has no averaged weights."""
    return CheckpointError(
        f"{path}: holds no averaged weights, expected those of a run with optimizer.ema; leave "
        "--ema out for the weights themselves"
    )


def _is_same(value: Value, other: Value) -> bool:
    return (
        isinstance(value, Tensor)
        and isinstance(other, Tensor)
        and value.dtype == other.dtype
        and bool(torch.equal(value, other))
    )


def stored_tensors(path: Path, *, trusted: bool = False) -> dict[str, StoredTensor]:
    """List what a checkpoint holds, by name, ``model.`` or ``optimizer.`` before it.

    Returns:
        The shape and dtype of each tensor; None for another value.

    Raises:
        CheckpointError: If a file is missing or damaged.
    """
    check_sums(path)
    found = PlainReader(path / "torch", trusted=trusted).read_metadata().state_dict_metadata
    return {
        name: its if isinstance(its, TensorStorageMetadata) else None
        for name, its in sorted(found.items())
    }


def read_tensors(
    path: Path,
    names: Sequence[str],
    stored: Mapping[str, StoredTensor],
    *,
    trusted: bool = False,
) -> dict[str, Value]:
    """Put the shards of some tensors together, on the CPU.

    Args:
        path: The checkpoint.
        names: Of the values to read.
        stored: What `stored_tensors` gave.
        trusted: As `read_checkpoint`.

    Raises:
        CheckpointError: If a part of a tensor was never written.
    """
    flat: dict[str, Value] = {}
    for name in names:
        its = stored[name]
        if its is None:
            flat[name] = None
            continue
        held = sum(math.prod(chunk.sizes) for chunk in its.chunks)
        if held != math.prod(its.size):
            raise CheckpointError(
                f"{path}: {name} is {list(its.size)}, {math.prod(its.size)} numbers, but the ranks "
                f"that wrote it held {held}; it was written by a mesh that did not fit its model: "
                "give another checkpoint"
            )
        flat[name] = torch.empty(its.size, dtype=its.properties.dtype)
    with warnings.catch_warnings():
        # That there is one process is what is meant here.
        warnings.filterwarnings("ignore", "torch.distributed is disabled", UserWarning)
        _load(
            flat, storage_reader=PlainReader(path / "torch", trusted=trusted),
            planner=PlainPlanner(trusted=trusted),
        )  # fmt: skip
    return flat


def _load(flat: dict[str, Value], *, storage_reader: PlainReader, planner: PlainPlanner) -> None:
    try:
        state_dict_loader.load(flat, storage_reader=storage_reader, planner=planner, no_dist=True)
    except CheckpointException as error:
        reason = first_reason(error)
        if isinstance(reason, CheckpointError):
            raise reason from None
        raise


def write_safetensors(out: Path, model: Mapping[str, Value], notes: Mapping[str, object]) -> None:
    """Write tensors alone, in a file that runs no code when it is read.

    Args:
        out: Replaced when the new one is whole.
        model: Tensors by name.
        notes: Kept in the file's header.
    """
    from safetensors import SafetensorError
    from safetensors.torch import save_file

    tensors = {name: value for name, value in model.items() if isinstance(value, Tensor)}
    header = {"format": "pt", **{name: json.dumps(value) for name, value in notes.items()}}
    partial = out.with_name(out.name + ".partial")
    try:
        save_file(tensors, partial, metadata=header)
    except SafetensorError as error:
        raise OSError(str(error)) from error
    # safetensors writes for its owner alone.
    mask = os.umask(0o077)
    os.umask(mask)
    partial.chmod(0o666 & ~mask)
    os.replace(partial, out)


def write_torch(out: Path, state: object) -> None:
    """Write what ``torch.load(out, weights_only=True)`` reads; replaces ``out`` when whole."""
    partial = out.with_name(out.name + ".partial")
    with partial.open("wb") as file:
        torch.save(state, file)
    os.replace(partial, out)
