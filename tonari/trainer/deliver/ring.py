"""Batches that several processes of a node see: slots in shared memory, written by one.

The reader alone writes slots; every peer writes its own number of the last batch that it let go.
Messages order the two: a slot is looked at after its batch was announced, and written anew when all
peers have let it go.
"""

import contextlib
import fcntl
import mmap
import os
import tempfile
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from tonari.trainer.errors import DeliveryError

Bytes = NDArray[np.uint8]

PREFIX = "tonari-batches-"
NUM_SLOTS = 4
"""Batches of one replica that may be on their way at once."""

CONTROL_BYTES = max(4096, mmap.ALLOCATIONGRANULARITY)
"""A whole page, which some kernels make 64 KiB long: the slots are mapped behind it."""

MAX_PEERS = 64
"""Peers whose numbers fit, a cache line each at least."""

UNOPENED = -1


class Ring:
    """NUM_SLOTS batches in a file that is gone as soon as all have opened it.

    Args:
        path: The file.
        slot_bytes: Of one batch.
        writes: Whether this process writes the slots.
    """

    def __init__(self, path: Path, slot_bytes: int, *, writes: bool) -> None:
        self.path = path
        self._held: int | None = None
        self.slot_bytes = slot_bytes
        self._stride = -(-slot_bytes // mmap.PAGESIZE) * mmap.PAGESIZE
        length, access = NUM_SLOTS * self._stride, mmap.ACCESS_WRITE if writes else mmap.ACCESS_READ
        with path.open("r+b") as file:
            control = mmap.mmap(file.fileno(), CONTROL_BYTES)
            slots = mmap.mmap(file.fileno(), length, access=access, offset=CONTROL_BYTES)
        # int64[MAX_PEERS, 8]: the first of each row counts.
        self._let_go = np.frombuffer(control, np.int64).reshape(MAX_PEERS, -1)[:, 0]
        self._slots = np.frombuffer(slots, np.uint8)

    @classmethod
    def create(cls, slot_bytes: int) -> "Ring":
        """Make a ring to write to; its memory is all taken at once.

        Raises:
            DeliveryError: If there is not enough.
        """
        stride = -(-slot_bytes // mmap.PAGESIZE) * mmap.PAGESIZE
        num_bytes = CONTROL_BYTES + NUM_SLOTS * stride
        shared = Path("/dev/shm")
        directory = shared if shared.is_dir() else Path(tempfile.gettempdir())
        _remove_abandoned(directory)
        descriptor, path = _make_held(directory)
        try:
            # Or a process that writes beyond what is left would be killed by a signal.
            os.posix_fallocate(descriptor, 0, num_bytes)
            ring = cls(path, slot_bytes, writes=True)
        except OSError as error:
            path.unlink()
            os.close(descriptor)
            raise DeliveryError(
                f"{directory}: cannot take {num_bytes} bytes for {NUM_SLOTS} batches that the "
                f"ranks of a node share ({error}); enlarge it (a container's --shm-size), or train "
                "with smaller batches"
            ) from error
        ring._held = descriptor
        ring._let_go[:] = UNOPENED
        return ring

    def slot(self, number: int) -> Bytes:
        """uint8[slot_bytes]: See the slot of the batch of a number."""
        first = number % NUM_SLOTS * self._stride
        return self._slots[first : first + self.slot_bytes]

    def let_go(self, peer: int, number: int) -> None:
        """Say that a peer needs this batch and those before it no more; 0: it has opened the ring.

        Args:
            peer: In [0, MAX_PEERS).
            number: From 1 on.
        """
        self._let_go[peer] = number

    def has_let_go(self, peer: int, number: int) -> bool:
        """Say whether a peer needs the batch of this number no more."""
        return bool(self._let_go[peer] >= number)

    def unlink(self) -> None:
        """Take the file's name away: the memory goes with the last process that has it open."""
        self.path.unlink(missing_ok=True)
        if self._held is not None:
            os.close(self._held)
            self._held = None


def _make_held(directory: Path) -> tuple[int, Path]:
    """Make a file whose lock is held as long as the descriptor is open."""
    # Under another name until then: it would seem abandoned.
    descriptor, name = tempfile.mkstemp(prefix=f".{PREFIX}", dir=directory)
    fcntl.flock(descriptor, fcntl.LOCK_EX)
    return descriptor, Path(name).rename(directory / Path(name).name[1:])


def _remove_abandoned(directory: Path) -> None:
    """Remove what a reader left that was killed before all had opened it: nobody holds its lock."""
    for path in directory.glob(f"{PREFIX}*"):
        # Another user's, or gone by now, or one that is held: no concern of ours.
        with contextlib.suppress(OSError), path.open("rb") as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            path.unlink()
