"""Bugs to plant in the shipped code: each breaks a promise that a rehearsal is to find broken."""

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import dataio.exchange.carrier
import dataio.state.saves
import dataio.store.epoch_end
from dataio import Loader
from dataio.exchange.transfer import Transfer
from dataio.store.background import Background
from dataio.store.copies import CopyStore
from dataio.store.manifest_files import ManifestFiles
from dataio.world.collectives import Collectives


def _await_nothing(requests: list[Any]) -> Iterator[bool]:
    yield from ()


def _restore_and_skip(self: Loader, path: Any, then: Any = Loader.restore) -> None:
    then(self, path)
    if self.step < len(self):
        self.skip(1)


def _wait_for_ever(self: Any, requests: Any, *, peers: Any, doing: str, timeout_s: float) -> None:
    wait(self, requests, peers=peers, doing=doing, timeout_s=float("inf"))


wait = Collectives.wait

PLANTED: dict[str, tuple[tuple[Any, str, Callable[..., Any]], ...]] = {
    "the name of a save is not flushed": (
        (dataio.state.saves, "sync_directory", lambda directory: None),
    ),
    "an epoch is committed before its rows are sealed": (
        (Background, "await_seals", lambda self: None),
    ),
    "scores stay behind when rows move": ((Transfer, "_move_scores", lambda self, scores: 0),),
    "copies stay behind when rows move": (
        (CopyStore, "write_arrivals", lambda self, slots, rows: None),
        (CopyStore, "keep_rows", lambda self, slots, held_in: None),
    ),
    "buffers are used again while they are sent": (
        (dataio.exchange.carrier, "_until", _await_nothing),
    ),
    "what killed jobs left is not removed": ((ManifestFiles, "unlink", lambda self, names: None),),
    "a step is left out after a restore": ((Loader, "restore", _restore_and_skip),),
    "a wait has no limit": ((Collectives, "wait", _wait_for_ever),),
}


@contextlib.contextmanager
def planted(name: str) -> Iterator[None]:
    """Plant a bug, within."""
    before = [
        (owner, attribute, getattr(owner, attribute)) for owner, attribute, _ in PLANTED[name]
    ]
    for owner, attribute, value in PLANTED[name]:
        setattr(owner, attribute, value)
    try:
        yield
    finally:
        for owner, attribute, value in before:
            setattr(owner, attribute, value)
