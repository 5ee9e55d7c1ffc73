"""One bandwidth for all processes of a machine together: a limit, or a slow filesystem imitated.

Processes share a small file: each reads and writes it under an flock, which the kernel gives back
when its owner dies. A request reserves its time under the lock and sleeps after it: they are served
in their order, whatever their threads and sizes, and none waits for the lock while another sleeps.
"""

import fcntl
import os
import struct
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import KW_ONLY, dataclass
from pathlib import Path

from dataio.base.checked import NotNegative, checked
from dataio.base.own import open_own

STATE = struct.Struct("<dQ")
"""When the bucket is drained (seconds of the machine's monotonic clock), and bytes so far."""

BURST_S = 0.02


@checked
@dataclass(frozen=True)
class Throttle:
    """Slows down and counts reads; can be handed to other processes.

    Attributes:
        path: The file shared by the processes, on a local disk; made if missing. One for each run.
        bytes_per_s: Bandwidth of all processes together; 0: not limited.
        latency_s: Duration of every request on top of it.
        spaces_only: Whether to wait for the requests before, and not for as long as this one
            would last: the storage itself takes that time. A limit then costs nothing as long as
            the storage is slower; off, a fast disk is slowed down like a slow one.
    """

    path: str | os.PathLike[str]
    _: KW_ONLY
    bytes_per_s: NotNegative = 0.0
    latency_s: NotNegative = 0.0
    spaces_only: bool = False

    def take(self, num_bytes: int) -> None:
        """Count a request for ``num_bytes``. Blocks for as long as it would last."""
        with self._locked() as descriptor:
            now = until = time.monotonic()
            drained, total = self._state(descriptor)
            if self.bytes_per_s:
                start = max(drained, now - BURST_S)
                drained = start + num_bytes / self.bytes_per_s
                until = start if self.spaces_only else drained
            os.pwrite(descriptor, STATE.pack(drained, total + num_bytes), 0)
        wait_s = until - now + self.latency_s
        if wait_s > 0:
            time.sleep(wait_s)

    @property
    def total_bytes(self) -> int:
        """Bytes that all processes took so far."""
        with self._locked() as descriptor:
            return self._state(descriptor)[1]

    def _state(self, descriptor: int) -> tuple[float, int]:
        drained, total = STATE.unpack(os.pread(descriptor, STATE.size, 0).ljust(STATE.size, b"\0"))
        return drained, total

    @contextmanager
    def _locked(self) -> Iterator[int]:
        # Opened anew each time: an flock belongs to the open file, so threads exclude one another
        # too.
        path = Path(self.path)
        descriptor = open_own(path.name, os.O_RDWR | os.O_CREAT, directory=path.parent)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX)
            yield descriptor
        finally:
            os.close(descriptor)
