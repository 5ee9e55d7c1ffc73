"""`tonari export`: a checkpoint of any mesh as one plain file of weights."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro

from tonari.errors import CommandError

SUFFIXES = (".safetensors", ".pt")


@dataclass(frozen=True, kw_only=True)
class Export:
    """Write the weights of a checkpoint, of any mesh, as a plain state_dict.

    model.load_state_dict takes it as it is. Open only checkpoints that you trust: torch's files can
    run code.
    """

    checkpoint: Annotated[Path, tyro.conf.Positional]
    """A step-NUMBER directory, or a run.directory for its newest."""
    out: Path
    """model.safetensors (needs the extra tonari[export]) or model.pt."""
    optimizer: bool = False
    """Write a .pt of two state_dicts, model and optimizer; the optimizer's is flat, by the names of
    parameters: torch.distributed.checkpoint.state_dict.set_optimizer_state_dict takes it, with
    flatten_optimizer_state_dict=True."""


def main(argv: list[str]) -> int:
    """Run the command, in one process.

    Args:
        argv: Its arguments, without the command's name.

    Returns:
        The exit status.

    Raises:
        CommandError: If there is no checkpoint, or the file cannot be written.
        CheckpointError: If the checkpoint is damaged.
    """
    given = tyro.cli(
        Export, args=argv, prog="tonari export", config=(tyro.conf.FlagCreatePairsOff,)
    )
    _check(given.out, optimizer=given.optimizer)
    # Only now: `--help` and wrong arguments should not wait for torch.
    from torch import Tensor

    from trainer.checkpoint.directory import read_progress
    from trainer.checkpoint.export import read_checkpoint, write_safetensors, write_torch

    checkpoint = _find(given.checkpoint)
    state = read_checkpoint(checkpoint, optimizer=given.optimizer)
    model = state["model"]
    try:
        if given.out.suffix == ".pt":
            write_torch(given.out, state if given.optimizer else model)
        else:
            progress = read_progress(checkpoint)
            notes = {"epochs": progress.epochs, "steps": progress.steps}
            write_safetensors(given.out, model, notes)
    except OSError as error:
        raise CommandError(
            f"{given.out}: cannot be written: {error}; give --out a file in a directory that "
            "exists, with room"
        ) from error
    sizes = [value.numel() for value in model.values() if isinstance(value, Tensor)]
    print(f"{given.out}: {len(sizes)} tensors, {sum(sizes):,} numbers, from {checkpoint}")
    return 0


def _check(out: Path, *, optimizer: bool) -> None:
    if out.suffix not in SUFFIXES:
        raise CommandError(
            f"--out is {out}, expected a file that ends with {' or '.join(SUFFIXES)}; name it so"
        )
    if optimizer and out.suffix != ".pt":
        raise CommandError(
            f"--out is {out}, which holds tensors alone, and --optimizer has numbers beside them; "
            f"give --out {out.with_suffix('.pt')}, or leave --optimizer out"
        )


def _find(path: Path) -> Path:
    from trainer.checkpoint.directory import latest

    found = latest(path / "checkpoints") or latest(path) or path
    if not (found / "torch").is_dir():
        raise CommandError(
            f"{path}: found no checkpoint, expected a step-NUMBER directory of `tonari train`, or "
            "its run.directory; give one of these"
        )
    return found
