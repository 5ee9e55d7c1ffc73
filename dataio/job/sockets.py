"""The connections that a library has made, so that they can be shut from outside."""

import contextlib
import os
import select
import socket
import stat
import threading
import time
from collections.abc import Iterable, Iterator
from pathlib import Path

from dataio.base.network import APART, CONNECTING, KEEP_ALIVE

SEEN_S = 0.1
"""Time for gloo to see that nothing more comes. Of a write that fails before it says nothing, and
the rank waits for it until the group's timeout."""


class Sockets:
    """Notes connections as they are made, and shuts them; from any thread."""

    def __init__(self) -> None:
        self._noted: list[socket.socket] = []
        self._watched = select.poll()
        self._lock = threading.Lock()

    @contextlib.contextmanager
    def noting(self, *, watched: bool = False) -> Iterator[None]:
        """Note the connections that are made within, all of them to other ranks if ``watched``.

        Those of `connect_apart` are left alone.
        """
        with CONNECTING:
            before = _open_sockets()
            try:
                yield
            finally:
                self._note_new(before, watched)

    def _note_new(self, before: dict[int, str], watched: bool) -> None:
        apart = {each.fileno() for each in APART}
        for descriptor, name in _open_sockets().items():
            if before.get(descriptor) != name and descriptor not in apart:
                with contextlib.suppress(OSError):  # another thread has closed it
                    self._note(socket.socket(fileno=os.dup(descriptor)), watched)

    def _note(self, made: socket.socket, watched: bool) -> None:
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
            if watched:
                self._watched.register(made, select.POLLRDHUP)

    def are_cut(self) -> bool:
        """Whether another rank has ended one that is watched, or its node has."""
        with self._lock:
            return bool(self._watched.poll(0))

    def shut(self) -> None:
        """Shut them: what waits for them fails, whoever holds it."""
        with self._lock:
            noted, self._noted, self._watched = self._noted, [], select.poll()
            _shut(noted, socket.SHUT_RD)
            if noted:
                time.sleep(SEEN_S)
            _shut(noted, socket.SHUT_RDWR)
            for each in noted:
                each.close()


def _shut(sockets: Iterable[socket.socket], how: int) -> None:
    for each in sockets:
        with contextlib.suppress(OSError):
            each.shutdown(how)


def _open_sockets() -> dict[int, str]:
    """List descriptors of sockets, each with what the system names it by."""
    found = {}
    for path in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(OSError):
            if stat.S_ISSOCK(os.fstat(int(path.name)).st_mode):
                found[int(path.name)] = str(path.readlink())
    return found
