"""Bugs to plant in the shipped code: each breaks a promise that a rehearsal is to find broken."""

import contextlib
import os
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

import dataio.base.atomic
import dataio.exchange.carrier
import dataio.run_state
import dataio.state.saves
import dataio.store.epoch_end
import dataio.store.lock
import dataio.store.open
from dataio import Loader, Mixture
from dataio.evaluation import Evaluation
from dataio.exchange.carrier import Carrier
from dataio.exchange.transfer import Transfer
from dataio.plan.dealer import Dealer
from dataio.plan.segment import Position
from dataio.rowlog.log import RowLog
from dataio.source.wrap.growing import GrowingSource
from dataio.state.report import Feedback
from dataio.state.resume import trained_before
from dataio.store.background import Background
from dataio.store.commit_log import CommitLog
from dataio.store.copies import CopyStore
from dataio.store.files.extents import Space
from dataio.store.files.row_files import RowFiles
from dataio.store.manifest_files import ManifestFiles
from dataio.store.quota_agreement import agree_on_budget
from dataio.world import World
from dataio.world.collectives import Collectives
from tests.rehearsal.planted_live import LIVE_PLANTED
from tests.rehearsal.threads import replaced


def _nothing(*args: Any, **options: Any) -> None:
    return None


class _NoFlushOfFiles:
    """`os`, but for the flushes of files that are no directories."""

    def __getattr__(self, name: str) -> Any:
        return getattr(os, name)

    def fsync(self, descriptor: int) -> None:
        if Path(f"/proc/self/fd/{descriptor}").readlink().is_dir():
            os.fsync(descriptor)


def _await_nothing(requests: list[Any]) -> Iterator[bool]:
    yield from ()


def _restore_and_skip(self: Loader, path: Any, then: Any = Loader.restore) -> None:
    then(self, path)
    if self.step < len(self):
        self.skip(1)


def _lose_last(self: Feedback) -> None:
    self._write(list(self._under_way)[:-1])
    self.forget()


def _wait_for_ever(
    self: Any, requests: Any, *, then: Any = Collectives.wait, **options: Any
) -> None:
    then(self, requests, **options | {"timeout_s": float("inf")})


def _go_one_back(self: Position, *args: Any, then: Any = Position.resumed, **options: Any) -> Any:
    found = then(self, *args, **options)
    return found.at(steps=max(found.running.steps - 1, 0), refresh_step=found.refresh_step)


def _of_no_segment(position: Any, node: Any) -> Any:
    return np.zeros_like(node.before)


def _of_one_more(position: Any, node: Any, then: Any = trained_before) -> Any:
    seen = then(position, node).copy()
    seen[np.argmin(seen)] += 1
    return seen


def _send_others(
    self: Carrier, *args: Any, sends: Any, then: Any = Carrier.__init__, **options: Any
) -> None:
    mixed_up = [replace(parcel, slots=np.roll(parcel.slots, 1)) for parcel in sends]
    then(self, *args, sends=mixed_up, **options)


def _commit_alone(
    pool: Any, epoch: int, *, agree: Any = None, then: Any = dataio.store.epoch_end.commit_arrivals
) -> Any:
    return then(pool, epoch, agree=_nothing)


def _more_than_asked(quota_bytes: int, *args: Any, then: Any = agree_on_budget) -> Any:
    return then(quota_bytes * 3 // 2, *args)


def _plan_of_a_rank(self: Mixture, epoch: int, then: Any = Mixture._planned) -> Any:
    return np.roll(then(self, epoch), self._world.rank)


def _replace_by_parts(partial: Path, path: Path) -> None:
    path.mkdir(exist_ok=True)
    for each in sorted(partial.iterdir()):
        os.replace(each, path / each.name)
    partial.rmdir()


def _free_at_once(self: CommitLog, epoch: int, then: Any = CommitLog.adopt_sealed) -> Any:
    changed = then(self, epoch)
    self.space.release(self._left_behind())
    return changed


PLANTED: dict[str, tuple[tuple[Any, str, Any], ...]] = {
    "the name of a save is not flushed": ((dataio.state.saves, "sync_directory", _nothing),),
    "the bytes of a manifest are not flushed": ((dataio.base.atomic, "os", _NoFlushOfFiles()),),
    "the names in a cache are not flushed": ((dataio.base.atomic, "sync_directory", _nothing),),
    "the bytes of rows are not flushed": ((RowFiles, "sync", _nothing),),
    "an epoch is committed before its rows are sealed": ((Background, "await_seals", _nothing),),
    "rows are written over before a commit is durable": (
        (CommitLog, "adopt_sealed", _free_at_once),
    ),
    "a node commits what others have not sealed": (
        (dataio.store.epoch_end, "commit_arrivals", _commit_alone),
    ),
    "rows arrive where others lie": ((Space, "take_positions", _nothing),),
    "a save is replaced file by file": ((dataio.state.saves, "_replace", _replace_by_parts),),
    "scores stay behind when rows move": ((Transfer, "_move_scores", lambda self, scores: 0),),
    "copies stay behind when rows move": (
        (CopyStore, "write_arrivals", _nothing),
        (CopyStore, "keep_rows", _nothing),
    ),
    "the last report of an epoch is lost": ((Feedback, "flush", _lose_last),),
    "buffers are used again while they are sent": (
        (dataio.exchange.carrier, "_until", _await_nothing),
    ),
    "other rows are sent": ((Carrier, "__init__", _send_others),),
    "two exchanges use the same tags": ((World, "open_channel", lambda self: 0),),
    "what killed jobs left is not removed": ((ManifestFiles, "unlink", _nothing),),
    "a lock is not taken": ((dataio.store.lock, "_flock", lambda descriptor, kind: True),),
    "a quota is exceeded": ((dataio.store.open, "agree_on_budget", _more_than_asked),),
    "a step is left out after a restore": ((Loader, "restore", _restore_and_skip),),
    "a step is trained twice after a restore": ((Position, "resumed", _go_one_back),),
    "rows come again on other ranks": ((dataio.run_state, "trained_before", _of_no_segment),),
    "a row is lost on other ranks": ((dataio.run_state, "trained_before", _of_one_more),),
    "each rank hides rows by what it knows": ((Dealer, "_total", lambda self, values: values),),
    "each rank has a mixture of its own": ((Mixture, "_planned", _plan_of_a_rank),),
    "an evaluation leaves a batch out": (
        (Evaluation, "__len__", lambda self: max(self._order.steps - 1, 0)),
    ),
    "the log of rows is a step late": (
        (RowLog, "progress", lambda self, step, then=RowLog.progress: then(self, step - 1)),
    ),
    "an epoch that goes on takes in new shards": (
        (GrowingSource, "cut", lambda self, num_samples: self),
    ),
    "a wait has no limit": ((Collectives, "wait", _wait_for_ever),),
}


@contextlib.contextmanager
def planted(name: str) -> Iterator[None]:
    """Plant a bug, within."""
    with replaced((PLANTED | LIVE_PLANTED)[name]):
        yield
