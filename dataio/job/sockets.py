"""The connections that a library has made, so that they can be shut from outside."""

import contextlib
import os
import socket
import stat
import threading
from collections.abc import Iterator
from pathlib import Path

SILENT_LINK_S = 15
"""For which a node's system may not answer: one without power or network closes no connection."""
KEEP_ALIVE = (
    (socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1),
    (socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 5),
    (socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 2),
    (socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, 1000 * SILENT_LINK_S),
)


class Sockets:
    """Notes connections as they are made, and shuts them; from any thread."""

    def __init__(self) -> None:
        self._noted: list[socket.socket] = []
        self._lock = threading.Lock()

    @contextlib.contextmanager
    def noting(self) -> Iterator[None]:
        """Note the connections that are made within."""
        before = _open_sockets()
        try:
            yield
        finally:
            for descriptor, name in _open_sockets().items():
                if before.get(descriptor) != name:
                    with contextlib.suppress(OSError):  # another thread has closed it
                        self._note(socket.socket(fileno=os.dup(descriptor)))

    def _note(self, made: socket.socket) -> None:
        # Of this process: those by which the loops of asyncio wake up go on.
        if made.family == socket.AF_UNIX:
            made.close()
            return
        try:
            made.getpeername()
        except OSError:  # it listens: gloo ends the process where that is shut
            made.close()
            return
        for option in KEEP_ALIVE:
            made.setsockopt(*option)
        with self._lock:
            self._noted.append(made)

    def shut(self) -> None:
        """Shut them: what waits for them fails, whoever holds it."""
        with self._lock:
            for each in self._noted:
                with contextlib.suppress(OSError):
                    each.shutdown(socket.SHUT_RDWR)
                each.close()
            self._noted.clear()


def _open_sockets() -> dict[int, str]:
    """List descriptors of sockets, each with what the system names it by."""
    found = {}
    for path in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(OSError):
            if stat.S_ISSOCK(os.fstat(int(path.name)).st_mode):
                found[int(path.name)] = str(path.readlink())
    return found
