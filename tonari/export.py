"""`tonari export`: a checkpoint of any mesh as one plain file of weights."""

from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated

import tyro

from tonari.errors import CommandError

SUFFIXES = (".safetensors", ".pt")


@dataclass(frozen=True, kw_only=True)
class Export:
    """Write the weights of a checkpoint, of any mesh, as a plain state_dict.

    model.load_state_dict takes it as it is. With --hub it is a directory in Hugging Face's layout:
    of a llama, and of a model of transformers, from_pretrained takes it, with the tokenizer of
    packed text. Torch's files can run code: a checkpoint that holds more than tensors, numbers and
    text is refused without --trust.
    """

    checkpoint: Annotated[Path, tyro.conf.Positional]
    """A step-NUMBER directory, or a run.directory for its newest."""
    out: Path
    """model.safetensors (needs the extra tonari[export]) or model.pt; with --hub, a directory."""
    hub: bool = False
    """Write a directory: safetensors by the names that others know, and config.json."""
    max_file_bytes: int = 5_000_000_000
    """With --hub: of one file."""
    trust: bool = False
    """Read a checkpoint that holds more than tensors, numbers and text, which may run code."""
    ema: bool = False
    """Write the averaged weights of optimizer.ema, in the place of those of the last step."""
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
    if given.ema and given.optimizer:
        raise CommandError(
            "--ema writes the averaged weights, which no optimizer goes on from; leave --ema or "
            "--optimizer out"
        )
    if given.hub:
        return _export_hub(given)
    _check(given.out, optimizer=given.optimizer)
    # Only now: `--help` and wrong arguments should not wait for torch.
    from torch import Tensor

    from tonari.trainer.checkpoint.directory import read_progress
    from tonari.trainer.checkpoint.export import (
        read_averaged,
        read_checkpoint,
        write_safetensors,
        write_torch,
    )

    checkpoint = _find(given.checkpoint)
    if given.ema:
        state = {"model": read_averaged(checkpoint, trusted=given.trust)}
    else:
        state = read_checkpoint(checkpoint, optimizer=given.optimizer, trusted=given.trust)
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


def _export_hub(given: Export) -> int:
    _check_directory(given)
    import torch

    from tonari.trainer.checkpoint.directory import read_progress
    from tonari.trainer.checkpoint.hub_export import write_hub, write_library_files
    from tonari.trainer.checkpoint.weights import read_hub_config
    from tonari.trainer.config.saved import read_settings
    from tonari.trainer.run.build import make_model
    from tonari.trainer.run.packed import packed_info, tokenizer_of

    checkpoint = _find(given.checkpoint)
    config = read_settings(checkpoint.absolute().parents[1] / "config.json")
    weights, is_packed = config.model.weights, config.text.is_packed
    try:
        with torch.device("meta"):
            model = make_model(config)
    except RuntimeError:
        # A function of one's own may read its weights, as from_pretrained does, which meta refuses.
        if not config.model.is_own:
            raise
        model = make_model(config)
    progress = read_progress(checkpoint)
    end = packed_info(config).end if is_packed else None
    tokenizer = tokenizer_of(config) if is_packed else None
    try:
        num_tensors, num_numbers = write_hub(
            given.out, checkpoint, model, max_file_bytes=given.max_file_bytes,
            published=dict(read_hub_config(Path(weights)) if weights else {})
            | ({} if end is None else {"eos_token_id": end}),
            notes={"epochs": progress.epochs, "steps": progress.steps}, average=given.ema,
            trusted=given.trust,
            write_beside=partial(
                write_library_files, model=model, tokenizer=tokenizer, eos_token_id=end
            ),
        )  # fmt: skip
    except OSError as error:
        raise CommandError(
            f"{given.out}: cannot be written: {error}; give --out a directory beside others, with "
            "room"
        ) from error
    print(f"{given.out}: {num_tensors} tensors, {num_numbers:,} numbers, from {checkpoint}")
    return 0


def _check_directory(given: Export) -> None:
    out = given.out
    if given.optimizer:
        raise CommandError(
            f"--hub writes weights alone to {out}, and --optimizer asks for more; leave one "
            "of them out"
        )
    if out.is_file() or (out.is_dir() and any(out.iterdir())):
        raise CommandError(
            f"--out is {out}, which holds something, expected no directory yet, or an empty one; "
            "give another --out"
        )
    if given.max_file_bytes < 1:
        raise CommandError(
            f"--max-file-bytes is {given.max_file_bytes}, expected at least 1; give a larger one"
        )


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
    from tonari.trainer.checkpoint.directory import latest

    found = latest(path / "checkpoints") or latest(path) or path
    if not (found / "torch").is_dir():
        raise CommandError(
            f"{path}: found no checkpoint, expected a step-NUMBER directory of `tonari train`, or "
            "its run.directory; give one of these"
        )
    return found
