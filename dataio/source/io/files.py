"""The only place that reads bytes of the source, so that each is counted, throttled and retried.

A request that fails for a reason that may pass is made again for ``retry_s``: a connection that is
reset, refused or cut, a server that answers 5xx, 408 or 429, a filesystem that says EIO, ESTALE,
EAGAIN and the like, fewer bytes than the file has, no answer within ``read_timeout_s``. What does
not pass is raised at once: no such file, bucket or object, refused credentials, a file that is not
what it was when it was opened or surveyed.

Deadlines hold for URLs and for files on a shared filesystem, whose server may be away: their
requests are made in threads that can be left behind. A local disk is read in the caller's thread.
"""

import threading
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, TypeVar

import numpy as np
from typing_extensions import Self

from dataio.base.buffers import BufferRing
from dataio.base.errors import SourceError
from dataio.base.filesystem import filesystem_of
from dataio.source.io.kept import Kept
from dataio.source.io.local import LocalFile
from dataio.source.io.medium import Medium, Status
from dataio.source.io.retry import GaveUpError, Retry, TransientError
from dataio.source.io.throttle import Throttle

if TYPE_CHECKING:
    from dataio.source.io.medium import Remote

T = TypeVar("T")
Data = TypeVar("Data", bytes, memoryview)

REQUEST_BYTES = 16 << 20
"""A watched request reads no more, so that its deadline is one for any storage that is alive."""

FILE_REQUEST_BYTES = 64 << 10
URL_REQUEST_BYTES = 1 << 20
"""What is read in the time of one request: some 10 ms at 100 MB/s from an object store."""

REUSED_BYTES = 1 << 20
"""From here on fresh memory costs more than the read itself."""
MAX_IDLE = 16
"""Buffers that wait: what two readers and the blocks ahead of the writer use in turn."""


class StorageFile:
    """An open file of the source. Made by `Storage.open`; any thread may read."""

    def __init__(self, path: str, medium: Medium, storage: "Storage") -> None:
        self.path = path
        self._medium = medium
        self._status = medium.opened
        self._storage = storage

    @property
    def size(self) -> int:
        """Length in bytes."""
        return self._status.size

    @property
    def in_order(self) -> bool:
        """Whether what is passed over is read all the same."""
        return False

    @property
    def request_bytes(self) -> int:
        """How many bytes take as long to read as a request takes."""
        return URL_REQUEST_BYTES if "://" in self.path else FILE_REQUEST_BYTES

    @property
    def most_bytes(self) -> int:
        """How many bytes a single value may have."""
        return self.size

    @property
    def mtime_ns(self) -> int:
        """Time of the last change; 0 where the storage does not tell."""
        return self._status.mtime_ns

    def read_at(self, offset: int, length: int) -> bytes:
        """Read ``length`` bytes, fewer only at the end of the file.

        Blocks for the throttle, and for the storage while retries last.

        Raises:
            SourceError: If the storage fails, or the file changed since it was opened.
        """
        stop = offset + max(min(length, self.size - offset), 0)
        if stop - offset <= REQUEST_BYTES or not self._medium.watched:
            return self._request(offset, stop - offset) if stop > offset else b""
        starts = range(offset, stop, REQUEST_BYTES)
        return b"".join(self._request(at, min(REQUEST_BYTES, stop - at)) for at in starts)

    def view_at(self, offset: int, length: int) -> memoryview:
        """Read as `read_at` does; what is large goes to memory that is used again.

        That is, when the last view of it has died: a view that is kept never changes.
        """
        medium, length = self._medium, min(length, self.size - offset)
        if not isinstance(medium, LocalFile) or not REUSED_BYTES <= length <= REQUEST_BYTES:
            return memoryview(self.read_at(offset, length))

        def pread() -> memoryview:
            # Of its own for every attempt: one that was given up may still write.
            memory = self._storage.buffers.take((length,), np.uint8).data
            return memory[: medium.pread_into(offset, memory)]

        return self._attempt(offset, length, pread)

    def check(self) -> None:
        """Make sure that the file is what it was when it was opened.

        Raises:
            SourceError: If it changed, or the storage fails.
        """
        self._storage.ask(self.path, lambda: self._compare(self._medium.status()))

    def close(self) -> None:
        """Give the file back."""
        self._medium.close()
        self._storage.closed()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        try:
            if kind is None and not self._medium.changes_in_place:
                self.check()
        finally:
            self.close()

    def _request(self, offset: int, length: int) -> bytes:
        return self._attempt(offset, length, lambda: self._medium.pread(offset, length))

    def _attempt(self, offset: int, length: int, pread: Callable[[], Data]) -> Data:
        def attempt(failures: int) -> Data:
            if failures:
                self._medium.renew()
            return self._checked(pread(), offset, length)

        doing = f"reading {length} bytes at {offset}"
        return self._storage.read(self.path, attempt, length, self._medium.watched, doing)

    def _checked(self, data: Data, offset: int, length: int) -> Data:
        if self._medium.changes_in_place or len(data) < length:
            self._compare(self._medium.status())
        if len(data) < length:
            raise TransientError(f"got {len(data)} of {length} bytes")
        if len(data) > length:
            raise SourceError(
                f"{self.path}: asked for {length} bytes at {offset}, got {len(data)}; the server "
                "does not serve parts of a file: copy the shards to storage that does"
            )
        return data

    def _compare(self, now: Status) -> None:
        if now != self._status:
            raise _changed(self.path, now, self._status, "when opened")


class Storage:
    """Opens files of the source and counts what is read of them. Thread-safe.

    Args:
        throttle: Slows down every request.
        retry: How long a request may last, and be repeated.
        watch: Whether reads of local paths are watched for the deadline too; by default where
            they lie on a shared filesystem.
        hashes: Whether shards are checked by the hashes that their dataset has of them.

    Attributes:
        bytes_read: Bytes so far.
        num_opens: Files opened so far.
        buffers: Memory for what is read; it goes when no file is open.
        kept: What formats keep of files that they open again.
        checks_hashes: Whether shards are checked.
        checked: Paths of those that were, and are as they should be.
    """

    def __init__(
        self,
        throttle: Throttle | None = None,
        *,
        retry: Retry | None = None,
        watch: bool | None = None,
        hashes: bool = True,
    ) -> None:
        self.checks_hashes = hashes
        self.checked: set[str] = set()
        self._throttle = throttle
        self._retry = retry if retry is not None else Retry()
        self._watch = watch
        self._lock = threading.Lock()
        self._remotes: dict[str, Remote] = {}
        self._shared: dict[Path, bool] = {}
        self._expected: dict[str, tuple[int, int | None]] = {}
        self.bytes_read = 0
        self.num_opens = 0
        self.buffers = BufferRing(max_idle=MAX_IDLE)
        self.kept = Kept()
        self._num_open = 0

    @property
    def num_retries(self) -> int:
        """Requests that were made again so far."""
        return self._retry.num_retries

    def open(self, path: str) -> StorageFile:
        """Open a local path or a URL. Blocks as `StorageFile.read_at` does.

        Raises:
            SourceError: If it cannot be opened, or is not what `expect` said.
        """
        self._count(0, opens=1)
        if "://" in path:
            remote = self.remote(path)
            medium = self.ask(path, lambda: remote.open(path), doing="opening it")
        else:
            watched = self._is_watched(path)
            medium = self.ask(
                path, lambda: LocalFile(path, watched=watched), doing="opening it", watched=watched
            )
        now = medium.opened
        size, mtime_ns = self._expected.get(path, (now.size, None))
        if size != now.size or mtime_ns not in (None, now.mtime_ns):
            medium.close()
            raise _changed(path, now, Status(size, mtime_ns or 0), "when surveyed")
        with self._lock:
            self._num_open += 1
        return StorageFile(path, medium, self)

    def closed(self) -> None:
        """Know that a file was given back."""
        with self._lock:
            self._num_open -= 1
            if not self._num_open and self.buffers.num_allocated:
                self.buffers = BufferRing(max_idle=MAX_IDLE)

    def expect(self, path: str, size: int, mtime_ns: int | None) -> None:
        """Refuse to open a file that is not, or no longer, what was surveyed.

        Args:
            path: The file.
            size: Its length in bytes.
            mtime_ns: Time of its last change; None if another node saw it, whose copy may have
                another.
        """
        self._expected[path] = (size, mtime_ns)

    def stat(self, path: str) -> tuple[int, int]:
        """Find a file's length in bytes and its time of change; a local one is not opened.

        Raises:
            SourceError: If it cannot be found.
        """
        if "://" in path:
            with self.open(path) as file:
                return file.size, file.mtime_ns
        self.take_turn()
        status = self.ask(path, Path(path).stat, watched=self._is_watched(path))
        return status.st_size, status.st_mtime_ns

    def exists(self, path: str) -> bool:
        """Say whether there is such a file."""
        if "://" in path:
            remote = self.remote(path)
            return self.ask(path, lambda: remote.is_file(path))
        return self.ask(path, Path(path).is_file, watched=self._is_watched(path))

    def remote(self, url: str) -> "Remote":
        """Find what reads a URL."""
        scheme = "s3" if url.startswith("s3://") else "fsspec"
        if scheme not in self._remotes:
            # Imported here: either takes a while, and most sources need neither.
            if scheme == "s3":
                from dataio.source.io.s3 import S3Files

                self._remotes.setdefault(scheme, S3Files())
            else:
                from dataio.source.io.remote import FsspecFiles

                self._remotes.setdefault(scheme, FsspecFiles())
        return self._remotes[scheme]

    def ask(
        self,
        path: str,
        work: Callable[[], T],
        *,
        doing: str = "asking for it",
        watched: bool = True,
    ) -> T:
        """Make a request that reads no bytes, with retries.

        Raises:
            SourceError: If the storage fails.
        """
        try:
            return self._retry.call(lambda _: work(), doing=f"{path}: {doing}", watched=watched)
        except GaveUpError as error:
            raise self._gave_up(path, doing, error) from error
        except OSError as error:
            raise SourceError(
                f"{path}: cannot be opened ({error}), expected a readable file; check the path "
                "and its permissions on this node"
            ) from error

    def read(
        self, path: str, attempt: Callable[[int], Data], length: int, watched: bool, doing: str
    ) -> Data:
        """Make a request for bytes, counted and throttled, with retries.

        Raises:
            SourceError: If the storage fails.
        """
        if self._throttle is not None:
            self._throttle.take(length)
        try:
            data = self._retry.call(attempt, doing=f"{path}: {doing}", watched=watched)
        except GaveUpError as error:
            raise self._gave_up(path, doing, error) from error
        except OSError as error:
            raise SourceError(
                f"{path}: {doing} failed ({error}); check the filesystem, then start again: what "
                "was staged is kept"
            ) from error
        self._count(length)
        return data

    def _count(self, num_bytes: int, *, opens: int = 0) -> None:
        with self._lock:
            self.bytes_read += num_bytes
            self.num_opens += opens
        if opens:
            self.take_turn()

    def take_turn(self) -> None:
        """Wait as long as the throttle says for a request that reads no bytes."""
        if self._throttle is not None:
            self._throttle.take(0)

    def _is_watched(self, path: str) -> bool:
        if self._watch is not None:
            return self._watch
        # By directory, since a source may have millions of files.
        parent = Path(path).parent
        if parent not in self._shared:
            self._shared[parent] = self.ask(path, lambda: filesystem_of(parent).is_shared)
        return self._shared[parent]

    def _gave_up(self, path: str, doing: str, error: GaveUpError) -> SourceError:
        return SourceError(
            f"{path}: {doing} failed {error}; expected an answer within "
            f"{self._retry.read_timeout_s:g} s, or after retries within {self._retry.retry_s:g} s; "
            "check that the storage is up and that this node reaches it, then start again: what "
            "was staged is kept"
        )


def _changed(path: str, now: Status, then: Status, when: str) -> SourceError:
    what = f"is {now.size} bytes long, was {then.size} bytes long {when}"
    if now.size == then.size:
        # The same second, where times are whole seconds: then the tags differ.
        what = (
            f"was written to at {now.mtime_ns / 1e9:.3f}, last at {then.mtime_ns / 1e9:.3f} {when}"
        )
    return SourceError(
        f"{path}: {what}; expected shards that stay as they are: something is writing to it, "
        "start again when it is whole"
    )
