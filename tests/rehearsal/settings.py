"""Small limits, so that a job of some rows does all that one of millions does."""

import contextlib
import os
from collections.abc import Iterator

import dataio.source.storage.deadline
import dataio.store.commit_log
import dataio.store.files.store
import dataio.store.filling
import dataio.store.pull
import dataio.store.staging

LIMITS = (
    (dataio.store.filling, "TICK_S", 0.1),
    (dataio.source.storage.deadline, "IDLE_S", 0.1),
    (dataio.store.staging, "SEAL_BYTES", 300),
    (dataio.store.commit_log, "DELTAS_PER_BASE", 2),
    (dataio.store.commit_log, "MOVED_PER_BASE", 0.9),
    (dataio.store.pull, "ROUND_BYTES", 400),
    (dataio.store.files.store, "HEAP_STEP_BYTES", 1 << 12),
)


@contextlib.contextmanager
def small_and_quick() -> Iterator[None]:
    """Set them, and flush nothing: what is flushed is known to the rehearsal's disks."""
    places = [*LIMITS, *((os, name, lambda descriptor: None) for name in ("fsync", "fdatasync"))]
    before = [getattr(owner, name) for owner, name, _ in places]
    for owner, name, value in places:
        setattr(owner, name, value)
    try:
        yield
    finally:
        for (owner, name, _), value in zip(places, before, strict=True):
            setattr(owner, name, value)
