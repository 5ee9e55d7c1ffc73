"""Choose the checkpoint that a run goes on from, check all its files, and load it."""

import inspect
import logging
from collections.abc import Callable, Collection, Mapping, Sequence
from operator import eq
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint import state_dict_loader
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict import set_model_state_dict, set_state_dict

from tonari.trainer.checkpoint.agree import file_group, from_rank_0, together
from tonari.trainer.checkpoint.directory import (
    Progress,
    read_progress,
    set_aside,
    whole_checkpoints,
)
from tonari.trainer.checkpoint.plain import PlainPlanner, PlainReader
from tonari.trainer.checkpoint.state import (
    OF_RANK,
    OPTIONS,
    Named,
    Saveable,
    by_plain_names,
    first_reason,
    plain_name,
    read_state,
    read_weights,
    tied_in,
)
from tonari.trainer.checkpoint.sums import check_sums
from tonari.trainer.errors import CheckpointError, ConfigError

logger = logging.getLogger(__name__)

STATE = "state."
"""What the names begin with of what an optimizer remembers of a parameter."""


def find(
    directory: Path, resume: str, *, fits: Callable[[Path], bool] = lambda _: True
) -> Path | None:
    """Choose the checkpoint to go on from, and read all of it: each rank a part. Collective.

    A damaged one is ignored, with a warning, and renamed, as the run comes to its step again.

    Args:
        directory: Of all checkpoints of the run.
        resume: ``"auto"`` for the newest that is sound, ``"never"`` for none, or its directory.
        fits: Whether one may be gone on from, asked on rank 0; without it any may.

    Raises:
        ConfigError: If a run is to start anew in a directory that holds another's checkpoints, or
            there are some and none fits.
        CheckpointError: If the one that was named is damaged, or all are.
    """
    # Rank 0's view decides: a shared filesystem may show the others an older one.
    if resume not in ("auto", "never"):
        path = Path(from_rank_0(resume))
        verify(path)
        return path
    whole = whole_checkpoints(directory)
    lines = from_rank_0("\n".join(f"{fits(path):d}{path}" for path in whole)).splitlines()
    found = [Path(line[1:]) for line in lines]
    if resume == "never":
        if found:
            raise ConfigError(
                f"{directory}: holds {found[-1].name} of an earlier run, expected no checkpoint "
                "with --resume never; give another run.directory, or remove this one"
            )
        return None
    if lines and not any(line.startswith("1") for line in lines):
        raise ConfigError(
            f"{directory}: all {len(lines)} checkpoints have trained steps of --skip-steps, the "
            f"oldest is {found[0].name}, expected one before them; give later steps, or another "
            "run.directory to start anew"
        )
    found = [Path(line[1:]) for line in lines if line.startswith("1")]
    damaged: list[tuple[Path, CheckpointError]] = []
    while found:
        try:
            verify(found[-1])
            break
        except CheckpointError as error:
            damaged.append((found.pop(), error))
    if damaged and not found:
        raise CheckpointError(
            f"{directory}: none of {len(damaged)} checkpoints is sound, the newest: "
            f"{damaged[0][1]}; bring one back from a copy, or start anew in another run.directory"
        ) from damaged[0][1]
    if damaged:
        together(lambda: set_aside(damaged, found[-1]) if dist.get_rank() == 0 else None)
    return found[-1] if found else None


def verify(path: Path) -> None:
    """Read a checkpoint's files, each rank a part, and compare them with their sums. Collective.

    Raises:
        CheckpointError: On every rank, if one is missing or damaged; names it.
    """
    rank, num_ranks = dist.get_rank(), dist.get_world_size()
    together(lambda: check_sums(path, rank=rank, num_ranks=num_ranks), file_group())


def restore(
    path: Path,
    parts: Sequence[nn.Module],
    optimizer: torch.optim.Optimizer,
    loader: Saveable,
    *,
    average: Mapping[str, Tensor] | None = None,
    of_rank: Mapping[str, Tensor] | None = None,
    trusted: bool = False,
) -> Progress:
    """Go on where ``Checkpoints.save`` was called, on any mesh. Collective.

    Args:
        path: What ``find`` returned: its sums are not checked again.
        parts: The stages that this rank owns.
        optimizer: Of all their parameters.
        loader: Restored with them.
        average: Averaged weights by name; what was saved is written into these tensors.
        of_rank: The same of what `Checkpoints` saved of each rank; left as it is, with a warning,
            where the checkpoint has none of these names and shapes.
        trusted: Whether to read what may run code; see `tonari.trainer.checkpoint.plain`.

    The optimizer's settings, such as the weight decay, stay as they are: what it remembers of each
    parameter is restored.

    Raises:
        ConfigError: If ``path`` is not a whole checkpoint, or not of this model.
        StateError: If it belongs to another loader.
    """
    progress = read_progress(path)
    whole = nn.ModuleList(parts)
    kept = {"params"} | _kept_in_groups(optimizer)
    settings = [
        {name: value for name, value in group.items() if name not in kept}
        for group in optimizer.param_groups
    ]
    own = read_state(whole, optimizer, average)
    loaded = by_plain_names(own, parts)
    names = {plain_name(name, parts): its for name, its in whole.named_parameters()}
    reader = PlainReader(path / "torch", trusted=trusted)
    unused = _leave_out_unused(loaded["optimizer"], reader, names)
    if of_rank:
        saved = reader.read_metadata().state_dict_metadata
        of_saved = (getattr(saved.get(f"{OF_RANK}.{name}"), "size", None) for name in of_rank)
        if all(map(eq, of_saved, (its.shape for its in of_rank.values()))):
            own[OF_RANK] = loaded[OF_RANK] = dict(of_rank)
        elif dist.get_rank() == 0:
            logger.warning(
                "[rank 0] %s: of another mesh or compress_rank, or without compressed gradients: "
                "what their compression has left out begins anew at zero", path,
            )  # fmt: skip
    _load(path, own, loaded, reader, parts, trusted=trusted)
    # torch looks for the settings of a group under the name of its first parameter.
    groups = optimizer.param_groups
    optimizer.param_groups = [group for group in groups if group["params"]]
    set_state_dict(
        whole, optimizer, options=OPTIONS,
        model_state_dict=own["model"], optim_state_dict=own["optimizer"],
    )  # fmt: skip
    filled = iter(optimizer.param_groups)
    optimizer.param_groups = [next(filled) if group["params"] else group for group in groups]
    for group, given in zip(optimizer.param_groups, settings, strict=True):
        group.update(given)
    for name in unused:
        optimizer.state.pop(names[name], None)
    loader.restore(path / "loader")
    return progress


def restore_weights(
    path: Path, parts: Sequence[nn.Module], *, average: Mapping[str, Tensor] | None,
    trusted: bool = False,
) -> None:  # fmt: skip
    """Load the weights of a checkpoint, or of what was handed over, on any mesh. Collective.

    Args:
        path: All of its files are checked.
        parts: The stages that this rank owns.
        average: As of `restore`.
        trusted: As of `restore`.

    Raises:
        CheckpointError: If it is damaged.
        ConfigError: If it is not of this model.
    """
    verify(path)
    whole = nn.ModuleList(parts)
    own = read_weights(whole, average)
    reader = PlainReader(path / "torch", trusted=trusted)
    _load(path, own, by_plain_names(own, parts), reader, parts, trusted=trusted)
    set_model_state_dict(whole, own["model"])


def _load(
    path: Path, own: dict[str, Named], loaded: dict[str, Named], reader: PlainReader,
    parts: Sequence[nn.Module], *, trusted: bool,
) -> None:  # fmt: skip
    """Read values by plain names into ``loaded``, and from there into ``own``. Collective."""
    try:
        state_dict_loader.load(
            loaded, storage_reader=reader,
            planner=PlainPlanner(trusted=trusted), process_group=file_group(),
        )  # fmt: skip
    except (CheckpointException, RuntimeError, ValueError) as error:
        reason = first_reason(error)
        if isinstance(reason, CheckpointError):
            raise reason from error
        raise ConfigError(
            f"{path}: does not fit the model and optimizer: {reason}; set [model] and "
            "[optimizer] as they were when it was written, or start anew in another run.directory"
        ) from error
    for kind, named in own.items():
        for name, value in named.items():
            plain = plain_name(name, tied_in(kind, parts))
            if plain not in loaded[kind]:
                continue  # of a parameter that no step had used
            read = loaded[kind][plain]
            if isinstance(value, Tensor) and isinstance(read, Tensor) and value is not read:
                # A tied weight of two stages of this rank was read into one of its copies; each
                # remembers for itself, or a step would count for both in one place.
                value.detach().copy_(read)
            else:
                named[name] = read


def _kept_in_groups(optimizer: torch.optim.Optimizer) -> set[str]:
    """Name what an optimizer's groups have that nobody gave, such as a count of its steps."""
    given = {
        name
        for kind in type(optimizer).__mro__
        if "__init__" in vars(kind)
        for name in inspect.signature(vars(kind)["__init__"]).parameters
    }
    return set(optimizer.defaults) - given


def _leave_out_unused(named: Named, reader: PlainReader, parameters: Collection[str]) -> set[str]:
    """Ask a checkpoint for nothing about parameters that no step had used.

    Args:
        named: What this start's optimizer remembers, by plain names; some are removed.
        reader: Of the checkpoint.
        parameters: The plain names of this rank's.

    Returns:
        Those of the parameters.
    """
    metadata = reader.read_metadata().state_dict_metadata
    kept = [name.removeprefix("optimizer.") for name in metadata if name.startswith("optimizer.")]
    if not any(name.startswith(STATE) for name in kept):
        return set()  # of another optimizer, which is refused
    saved = {_parameter_of(name, parameters) for name in kept}
    unused = {each for name in named if (each := _parameter_of(name, parameters))} - saved
    for name in [name for name in named if _parameter_of(name, unused)]:
        del named[name]
    return unused


def _parameter_of(name: str, parameters: Collection[str]) -> str | None:
    """Find the parameter whose state has a name; None if it is no such name."""
    parameter = name.removeprefix(STATE) if name.startswith(STATE) else ""
    while parameter and parameter not in parameters:
        parameter = parameter.rpartition(".")[0]
    return parameter or None
