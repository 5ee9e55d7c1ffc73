"""A run on disk: model and optimizer by torch's distributed checkpoint, the loader beside them.

One directory a checkpoint, named by its step. It is written under another name and renamed when
whole, so a kill at any point leaves the one before it usable. Nothing in it depends on how many
ranks share the parameters, or which of them owns which stage. Torch's files hold pickles: open only
directories you trust.
"""

import logging
import re
import shutil
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from datetime import timedelta
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol, Self

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
from torch.distributed.tensor import DTensor

from dataio.base.atomic import read_record, sync_directory, write_record
from dataio.base.errors import DamagedFileError
from trainer.checkpoint.agree import together, told
from trainer.checkpoint.sums import MANIFEST, check_sums, write_sums
from trainer.errors import CheckpointError, ConfigError

OPTIONS = StateDictOptions(flatten_optimizer_state_dict=True)
NAME = re.compile(r"step-\d{8}")
PARTIAL = re.compile(r"step-\d{8}\.partial")
PROGRESS = "progress.json"
PART = re.compile(r"^((?:state|param_groups)\.)?\d+\.")
"""The number of a part, in the name of a parameter or of its optimizer's state."""

DISK = timedelta(minutes=30)
"""Longest wait for the slowest rank's files, to be written or read."""

Named = dict[str, Any]
logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Progress:
    """How far a run has come.

    Attributes:
        epochs: Those that are done.
        steps: Those that are done.
        so_far: Figures of the running epoch, as `Meter.so_far` gave them.
    """

    epochs: int = 0
    steps: int = 0
    so_far: dict[str, float] = field(default_factory=dict)


class Saveable(Protocol):
    """What a checkpoint needs of the loader, on every rank."""

    def save(self, path: Path) -> None: ...

    def restore(self, path: Path) -> None: ...


class Checkpoints:
    """Writes a run's checkpoints. All methods are collective; an error that leaves it waits not.

    In the background one thread writes a copy of the state, in a process group of its own; the
    training thread reads what became of it in ``settle``.

    Args:
        directory: Of all checkpoints of the run; every rank sees it.
        keep: Newest checkpoints to keep, >= 1.
        background: Copy the state and let training go on while it is written. Takes memory for the
            copy.
    """

    def __init__(self, directory: Path, *, keep: int, background: bool = False) -> None:
        self._directory = directory
        self._keep = keep
        self._background = background
        self._group: dist.ProcessGroup | None = None
        self._thread = ThreadPoolExecutor(1, "checkpoint")
        self._under_way: tuple[Path, Future[None]] | None = None

    def save(
        self,
        parts: Sequence[nn.Module],
        optimizer: torch.optim.Optimizer,
        loader: Saveable,
        progress: Progress,
    ) -> Path:
        """Write a checkpoint, then remove all but the newest; waits for the one before it.

        Args:
            parts: The stages that this rank owns, as ``parallelize`` returned them.
            optimizer: Of all their parameters.
            loader: Saved with them, before this returns.
            progress: Names the checkpoint; one of the same step is left as it is.

        Returns:
            The checkpoint's directory, which is there after ``settle`` at the latest.

        Raises:
            CheckpointError: If this one, or the one before it, could not be written, or if a
                parameter is not finite: the older checkpoints, which would go, are of more use.
        """
        self.settle()
        final = self._directory / f"step-{progress.steps:08d}"
        if told(str(final.exists())) == "True":
            return final
        together(lambda: _check_finite(parts, progress))
        partial = final.with_suffix(".partial")
        together(lambda: _begin(partial, progress) if dist.get_rank() == 0 else None)
        loader.save(partial / "loader")
        state = _plain(_state(nn.ModuleList(parts), optimizer))
        if self._group is None:
            # Its own: what the background sends must not come between the training's collectives.
            self._group = _patient_group()
        if self._background:
            copied = state_dict_saver.async_save(
                state, checkpoint_id=partial / "torch", process_group=self._group
            )
            assert isinstance(copied, Future), "the stager in use copies before it returns"
            self._under_way = partial, self._thread.submit(self._end_background, copied, final)
            return final
        try:
            state_dict_saver.save(state, checkpoint_id=partial / "torch", process_group=self._group)
            self._end(final)
        except (CheckpointException, CheckpointError, OSError) as error:
            raise _not_written(partial, error) from error
        return final

    def settle(self) -> None:
        """Wait until what is under way lies on disk.

        Raises:
            CheckpointError: If it could not be written; the run may go on without it.
        """
        if self._under_way is None:
            return
        partial, written = self._under_way
        self._under_way = None
        try:
            written.result()
        except Exception as error:
            raise _not_written(partial, error) from error

    def close(self) -> None:
        """Wait as ``settle`` does, then end the thread."""
        try:
            self.settle()
        finally:
            self._thread.shutdown()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if error is None:
            self.close()
        else:
            # Other ranks may be gone.
            self._thread.shutdown(wait=False)

    def _end_background(self, copied: "Future[Any]", final: Path) -> None:
        copied.result()
        self._end(final)

    def _end(self, final: Path) -> None:
        """Sum the files and give them their name. Collective."""
        partial = final.with_suffix(".partial")
        dist.barrier(self._group)
        write_sums(partial, self._group)

        def rename() -> None:
            sync_directory(partial)
            partial.rename(final)
            sync_directory(final.parent)
            try:
                _remove_old(final.parent, self._keep)
            except OSError as error:
                # A shared filesystem may refuse for a while; the new one is whole all the same.
                logger.warning(
                    "[rank 0] %s: an old checkpoint could not be removed: %s; the next one to be "
                    "written tries again: see that there is room",
                    final.parent, error,
                )  # fmt: skip

        together(lambda: rename() if dist.get_rank() == 0 else None, self._group)


def restore(
    path: Path, parts: Sequence[nn.Module], optimizer: torch.optim.Optimizer, loader: Saveable
) -> Progress:
    """Go on where ``Checkpoints.save`` was called, on any mesh. Collective.

    Args:
        path: What ``find`` returned: its sums are not looked at again.
        parts: The stages that this rank owns.
        optimizer: Of all their parameters.
        loader: Restored with them.

    The optimizer's settings, such as the weight decay, stay as they are: what it remembers of each
    parameter is restored.

    Raises:
        ConfigError: If ``path`` is not a whole checkpoint, or not of this model.
        StateError: If it is of another loader.
    """
    progress = read_progress(path)
    whole = nn.ModuleList(parts)
    settings = [
        {name: value for name, value in group.items() if name != "params"}
        for group in optimizer.param_groups
    ]
    own = _state(whole, optimizer)
    loaded = _plain(own)
    try:
        state_dict_loader.load(loaded, checkpoint_id=path / "torch", process_group=_patient_group())
    except (CheckpointException, RuntimeError, ValueError) as error:
        raise ConfigError(
            f"{path}: does not fit the model and optimizer: {_reason(error)}; set [model] and "
            "[optimizer] as they were when it was written, or start anew in another run.directory"
        ) from error
    for kind, named in own.items():
        named.update({name: loaded[kind][_plain_name(name)] for name in named})
    set_state_dict(
        whole, optimizer, options=OPTIONS,
        model_state_dict=own["model"], optim_state_dict=own["optimizer"],
    )  # fmt: skip
    for group, given in zip(optimizer.param_groups, settings, strict=True):
        group.update(given)
    loader.restore(path / "loader")
    return progress


def set_aside_later(directory: Path, taken: Path) -> None:
    """Rename the checkpoints of steps that the run will come to again. Collective.

    Where a run goes on from an older checkpoint, those after it are of another course: they would
    stand in the way of its own, and the newest of them be taken for the run's end.

    Args:
        directory: Of all checkpoints of the run.
        taken: The one that was restored.
    """
    together(lambda: _leave_later(directory, taken) if dist.get_rank() == 0 else None)


def find(directory: Path, resume: str) -> Path | None:
    """Choose the checkpoint to go on from, and read all of it: each rank a part. Collective.

    A damaged one is left out, with a warning, and renamed so that the run can come by its step
    again.

    Args:
        directory: Of all checkpoints of the run.
        resume: ``"auto"`` for the newest that is sound, ``"never"`` for none, else its directory.

    Raises:
        ConfigError: If a run is to start anew in a directory that holds another's checkpoints.
        CheckpointError: If the one that was named is damaged, or all are.
    """
    # Rank 0's view decides: a shared filesystem may show the others an older one.
    if resume not in ("auto", "never"):
        path = Path(told(resume))
        verify(path)
        return path
    found = [Path(line) for line in told("\n".join(map(str, _all(directory)))).splitlines()]
    if resume == "never":
        if found:
            raise ConfigError(
                f"{directory}: holds {found[-1].name} of an earlier run, expected no checkpoint "
                "with --resume never; give another run.directory, or remove this one"
            )
        return None
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
        together(lambda: _set_aside(damaged, found[-1]) if dist.get_rank() == 0 else None)
    return found[-1] if found else None


def verify(path: Path) -> None:
    """Read a checkpoint's files, each rank a part, and compare them with their sums. Collective.

    Raises:
        CheckpointError: On every rank, if one is missing or damaged; names it.
    """
    rank, num_ranks = dist.get_rank(), dist.get_world_size()
    together(lambda: check_sums(path, rank=rank, num_ranks=num_ranks), _patient_group())


def latest(directory: Path) -> Path | None:
    """Find the newest whole checkpoint of a run, sound or not."""
    found = _all(directory)
    return found[-1] if found else None


def _patient_group() -> dist.ProcessGroup:
    """Make a group whose ranks wait for each other's files. Collective."""
    made = dist.new_group(backend="gloo", timeout=DISK)
    assert isinstance(made, dist.ProcessGroup), "every rank is in the group"
    return made


def _state(whole: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Named]:
    # The parts are children of one module: torch wants the model of all of an optimizer's weights.
    state, optimizer_state = get_state_dict(whole, optimizer, options=OPTIONS)
    return {"model": state, "optimizer": optimizer_state}


def _plain(state: dict[str, Named]) -> dict[str, Named]:
    """Name the values as in the whole model, whichever parts of it are here."""
    return {
        kind: {_plain_name(name): value for name, value in named.items()}
        for kind, named in state.items()
    }


def _plain_name(name: str) -> str:
    return PART.sub(r"\1", name)


def _check_finite(parts: Sequence[nn.Module], progress: Progress) -> None:
    for name, parameter in nn.ModuleList(parts).named_parameters():
        own = parameter.to_local() if isinstance(parameter, DTensor) else parameter
        if not bool(own.isfinite().all()):
            raise CheckpointError(
                f"step {progress.steps}: {_plain_name(name)} is not finite, expected numbers to go "
                "on from; no checkpoint was written, and those before it are kept: go on from one "
                "of them with a smaller optimizer.lr, or with optimizer.clip"
            )


def _begin(partial: Path, progress: Progress) -> None:
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    write_record(partial / PROGRESS, asdict(progress))


def _not_written(partial: Path, error: BaseException) -> CheckpointError:
    return CheckpointError(
        f"{partial}: was not written: {_reason(error)}; the one before it is whole: make room or "
        "mend the filesystem, and the same command goes on from there"
    )


def _reason(error: BaseException) -> object:
    # The exception's own text holds each rank's whole traceback.
    failures = error.failures if isinstance(error, CheckpointException) else {}
    return next((failure for failure, _ in failures.values()), error)


def _all(directory: Path) -> list[Path]:
    if not directory.is_dir():
        return []
    return sorted(path for path in directory.iterdir() if NAME.fullmatch(path.name))


def read_progress(path: Path) -> Progress:
    """Read how far the run of a checkpoint had come.

    Raises:
        ConfigError: If ``path`` is not a whole checkpoint.
    """
    try:
        return Progress(**read_record(path / PROGRESS))
    except (OSError, DamagedFileError, TypeError) as error:
        raise ConfigError(
            f"{path}: not a whole checkpoint: {error}; give a step-NUMBER directory of a run's "
            "checkpoints, or --resume auto for the newest"
        ) from error


def _remove_old(directory: Path, keep: int) -> None:
    for path in _all(directory)[:-keep]:
        if not (path / MANIFEST).exists():
            continue  # Of no run.
        # Renamed first: a kill here must not leave half a checkpoint under a whole one's name.
        path.rename(path.with_suffix(".partial"))
    for path in directory.iterdir():
        if PARTIAL.fullmatch(path.name):
            shutil.rmtree(path)


def _set_aside(damaged: list[tuple[Path, CheckpointError]], taken: Path) -> None:
    for path, error in damaged:
        aside = _rename(path, ".damaged")
        logger.warning(
            "[rank 0] %s; left out, and renamed to %s: going on from %s",
            error, aside.name, taken.name,
        )  # fmt: skip


def _leave_later(directory: Path, taken: Path) -> None:
    for path in _all(directory):
        if path.name >= taken.name and path.resolve() != taken.resolve():
            aside = _rename(path, ".later")
            logger.warning(
                "[rank 0] %s: renamed to %s: the run goes on from %s, and comes to this step again",
                path, aside.name, taken,
            )  # fmt: skip


def _rename(path: Path, suffix: str) -> Path:
    aside = path.with_suffix(suffix)
    shutil.rmtree(aside, ignore_errors=True)
    path.rename(aside)
    return aside
