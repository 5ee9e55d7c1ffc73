"""Files that the kernel reads."""

import os

from dataio.source.storage.handle import Status


class LocalFile:
    """A file by its path.

    Args:
        path: Where it is.
        watched: Whether a read may hang, as it does when the server of a filesystem is away.
    """

    changes_in_place = True

    def __init__(self, path: str, *, watched: bool) -> None:
        self.watched = watched
        self._path = path
        self._descriptor = _open(path)
        self.opened = self.status()

    def status(self) -> Status:
        status = os.fstat(self._descriptor)
        return Status(status.st_size, status.st_mtime_ns)

    def pread(self, offset: int, length: int) -> bytes:
        data = os.pread(self._descriptor, length, offset)
        while len(data) < length:
            more = os.pread(self._descriptor, length - len(data), offset + len(data))
            if not more:
                break
            data += more
        return data

    def pread_into(self, offset: int, memory: memoryview) -> int:
        """Read into memory of the caller's; returns how many bytes there were."""
        done = 0
        while done < len(memory):
            more = os.preadv(self._descriptor, [memory[done:]], offset + done)
            if not more:
                break
            done += more
        return done

    def renew(self) -> None:
        """Open the path again: a stale handle stays stale. Threads that read go on."""
        fresh = _open(self._path)
        try:
            os.dup2(fresh, self._descriptor, inheritable=False)
        finally:
            os.close(fresh)

    def close(self) -> None:
        os.close(self._descriptor)


def _open(path: str) -> int:
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    if hasattr(os, "posix_fadvise"):
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_SEQUENTIAL)
    return descriptor
