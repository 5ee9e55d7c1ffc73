"""Writes checkpoints: model and optimizer by torch's distributed checkpoint, and the loader.

A checkpoint is one directory, named by its step. It is written under another name and renamed when
it is complete, so a kill at any point leaves the one before it usable. Nothing in it depends on how
many ranks share the parameters, or which of them owns which stage. Torch's files hold pickles: open
only directories that you trust.
"""

import logging
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint import state_dict_saver
from torch.distributed.checkpoint.api import CheckpointException
from typing_extensions import Self

from dataio.base.atomic import sync_directory, write_record
from tonari.trainer.checkpoint.agree import file_group, from_rank_0, together
from tonari.trainer.checkpoint.directory import Progress, begin, remove_old
from tonari.trainer.checkpoint.state import (
    OF_RANK,
    Named,
    Saveable,
    by_plain_names,
    check_finite,
    first_reason,
    read_state,
    read_weights,
)
from tonari.trainer.checkpoint.sums import write_sums
from tonari.trainer.errors import CheckpointError

HANDED = "evaluation.json"
"""Beside weights that were handed over: how they are to be evaluated."""

logger = logging.getLogger(__name__)


class Checkpoints:
    """Writes a run's checkpoints. All methods are collective.

    An error that leaves the ``with`` block does not wait for other ranks.

    In the background one thread writes a copy of the state, in a process group of its own; the
    training thread learns whether it succeeded in ``flush``.

    Args:
        directory: Of all checkpoints of the run; every rank sees it.
        keep: Newest checkpoints to keep, >= 1.
        background: Copy the state and let training go on while it is written. Takes memory for the
            copy.
        of_rank: Saved too: tensors by names that no other rank of the mesh has.
    """

    def __init__(
        self, directory: Path, *, keep: int, background: bool = False,
        of_rank: Mapping[str, Tensor] | None = None,
    ) -> None:  # fmt: skip
        self._of_rank = dict(of_rank or {})
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
        *,
        average: Mapping[str, Tensor] | None = None,
    ) -> Path:
        """Write a checkpoint, then remove all but the newest; waits for the one before it.

        Args:
            parts: The stages that this rank owns, as ``parallelize`` returned them.
            optimizer: Of all their parameters.
            loader: Saved with them, before this returns.
            progress: Names the checkpoint; one of the same step is left as it is.
            average: Averaged weights, named as in ``ModuleList(parts)``; saved with them.

        Returns:
            The checkpoint's directory, which exists after ``flush`` at the latest.

        Raises:
            CheckpointError: If this one, or the one before it, could not be written, or if a
                parameter is not finite: the older checkpoints, which would go, are of more use.
        """
        self.flush()
        final = self._directory / f"step-{progress.steps:08d}"
        if from_rank_0(str(final.exists())) == "True":
            return final
        together(lambda: check_finite(parts, progress))
        partial = final.with_suffix(".partial")
        together(lambda: begin(partial, progress) if dist.get_rank() == 0 else None)
        loader.save(partial / "loader")
        state = by_plain_names(read_state(nn.ModuleList(parts), optimizer, average), parts)
        if self._of_rank:
            state[OF_RANK] = self._of_rank
        self._write(state, final, background=self._background, keep=self._keep)
        return final

    def hand_over(
        self,
        directory: Path,
        parts: Sequence[nn.Module],
        progress: Progress,
        *,
        average: Mapping[str, Tensor] | None,
        notes: Mapping[str, object],
        background: bool,
    ) -> None:
        """Write the weights alone, for another process; waits for what is under way.

        Args:
            directory: Of the weights that are handed over; all ranks see it.
            parts: As of `save`, and so are ``progress`` and ``average``.
            notes: A record that lies beside the weights: `HANDED`.
            background: Copy them, and let training go on while they are written.

        Raises:
            CheckpointError: If they, or what was under way, could not be written.
        """
        self.flush()
        final = directory / f"step-{progress.steps:08d}"
        if from_rank_0(str(final.exists())) == "True":
            return
        partial = final.with_suffix(".partial")

        def note() -> None:
            begin(partial, progress)
            write_record(partial / HANDED, notes)

        together(lambda: note() if dist.get_rank() == 0 else None)
        state = by_plain_names(read_weights(nn.ModuleList(parts), average), parts)
        self._write(state, final, background=background, keep=None)

    def _write(
        self, state: dict[str, Named], final: Path, *, background: bool, keep: int | None
    ) -> None:
        """Write a state beside its progress, and complete it: now, or in the background."""
        partial = final.with_suffix(".partial")
        self.open_group()
        if background:
            copied = state_dict_saver.async_save(
                state, checkpoint_id=partial / "torch", process_group=self._group
            )
            assert isinstance(copied, Future), "the stager in use copies before it returns"
            written = self._thread.submit(self._complete_background, copied, final, keep)
            self._under_way = partial, written
            return
        try:
            state_dict_saver.save(state, checkpoint_id=partial / "torch", process_group=self._group)
            self._complete(final, keep)
        except (CheckpointException, CheckpointError, OSError) as error:
            raise _not_written(partial, error) from error

    def flush(self) -> None:
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
        except (Exception, CheckpointException) as error:  # torch's is no Exception
            raise _not_written(partial, error) from error

    def open_group(self) -> None:
        """Make the group that writes, before the first ``save`` does."""
        if self._group is None:
            # Its own: what the background sends must not come between the training's collectives.
            self._group = file_group()

    def leave(self) -> None:
        """Wait until nothing is under way, where ranks are gone and what waits for them fails."""
        self._thread.shutdown()

    def close(self) -> None:
        """Wait as ``flush`` does, then end the thread."""
        try:
            self.flush()
        finally:
            self._thread.shutdown()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is None:
            self.close()
        else:
            # Other ranks may be gone.
            self._thread.shutdown(wait=False)

    def _complete_background(self, copied: "Future[Any]", final: Path, keep: int | None) -> None:
        copied.result()
        self._complete(final, keep)

    def _complete(self, final: Path, keep: int | None) -> None:
        """Write the checksums, then give the directory its name; older ones go. Collective."""
        partial = final.with_suffix(".partial")
        dist.barrier(self._group)
        write_sums(partial, self._group)

        def rename() -> None:
            sync_directory(partial)
            partial.rename(final)
            sync_directory(final.parent)
            try:
                if keep is not None:
                    remove_old(final.parent, keep)
            except OSError as error:
                # A shared filesystem may refuse for a while; the new one is whole all the same.
                logger.warning(
                    "[rank 0] %s: an old checkpoint could not be removed: %s; the next one to be "
                    "written tries again: see that there is room",
                    final.parent, error,
                )  # fmt: skip

        together(lambda: rename() if dist.get_rank() == 0 else None, self._group)


def _not_written(partial: Path, error: BaseException) -> CheckpointError:
    return CheckpointError(
        f"{partial}: was not written: {first_reason(error)}; the one before it is whole: make room "
        "or repair the filesystem, and the same command goes on from there"
    )
