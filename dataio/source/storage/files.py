"""The only place that reads bytes of the source, so that each is counted, throttled and retried.

A request that fails for a reason that may pass is made again for ``retry_s``: a connection that is
reset or refused, a server that answers 5xx, 408 or 429, a filesystem that says EIO, ESTALE, EAGAIN
and the like, no byte where the file has some, no answer within ``read_timeout_s``. Of an answer
that was cut the rest is asked for, from where it stopped. What does not pass is raised at once: no
such file, bucket or object, refused credentials, a file that is not what it was when it was opened
or counted.

Paths that are given and returned are names: a URL that is given is named first, see `names`.

Deadlines hold for URLs and for files on a shared filesystem, whose server may be away: their
requests are made in threads that can be left behind. A local disk is read in the caller's thread.
"""

import logging
import os
import threading
from collections.abc import Callable, Collection
from pathlib import Path
from typing import TypeVar

import numpy as np
from typing_extensions import Self

from dataio.base.buffers import BufferRing
from dataio.base.errors import SourceError
from dataio.base.filesystem import filesystem_of
from dataio.base.location import split_query
from dataio.source.storage.handle import DeniedError, FileHandle, Remote, Status
from dataio.source.storage.local import LocalFile
from dataio.source.storage.metadata_cache import MetadataCache
from dataio.source.storage.names import UrlNames
from dataio.source.storage.retry import GaveUpError, Retry, TransientError
from dataio.source.storage.throttle import Throttle

_log = logging.getLogger(__name__)

T = TypeVar("T")
Data = TypeVar("Data", bytes, memoryview)

REQUEST_BYTES = 16 << 20
"""A watched request reads no more, so that its deadline is one for any storage that is alive."""

FILE_REQUEST_BYTES = 64 << 10
URL_REQUEST_BYTES = 1 << 20
"""What is read in the time of one request: some 10 ms at 100 MB/s from an object store."""

REUSED_BYTES = 1 << 20
"""From here on fresh memory costs more than the read itself."""
OPTIONAL_S = 5.0
"""How long a file is asked for that need not be there."""
MAX_IDLE = 16
"""Buffers that wait: what two readers and the blocks ahead of the writer use in turn."""


class StorageFile:
    """An open file of the source. Made by `Storage.open`; any thread may read."""

    def __init__(self, path: str, handle: FileHandle, storage: "Storage") -> None:
        self.path = path
        self._handle = handle
        self._status = handle.opened
        self._storage = storage
        self._was_cut = False

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
        """Time of the last change; 0 where the storage does not know."""
        return self._status.mtime_ns

    def read_at(self, offset: int, length: int) -> bytes:
        """Read ``length`` bytes, fewer only at the end of the file.

        Blocks for the throttle, and for the storage while retries last.

        Raises:
            SourceError: If the storage fails, or the file changed since it was opened.
        """
        stop = offset + max(min(length, self.size - offset), 0)
        if stop - offset <= REQUEST_BYTES or not self._handle.watched:
            return self._request(offset, stop - offset) if stop > offset else b""
        starts = range(offset, stop, REQUEST_BYTES)
        return b"".join(self._request(at, min(REQUEST_BYTES, stop - at)) for at in starts)

    def view_at(self, offset: int, length: int) -> memoryview:
        """Read as `read_at` does; what is large goes to memory that is used again.

        That is, when the last view of it has died: a view that is kept never changes.
        """
        handle, length = self._handle, min(length, self.size - offset)
        if not isinstance(handle, LocalFile) or not REUSED_BYTES <= length <= REQUEST_BYTES:
            return memoryview(self.read_at(offset, length))

        def pread() -> memoryview:
            # Of its own for every attempt: one that was given up may still write.
            memory = self._storage.buffers.take((length,), np.uint8).data
            return memory[: handle.pread_into(offset, memory)]

        view = self._attempt(offset, length, pread)
        if len(view) < length:
            return memoryview(self._rest(offset, length, view))
        return view

    def check(self) -> None:
        """Make sure that the file is what it was when it was opened.

        Raises:
            SourceError: If it changed, or the storage fails.
        """
        self._storage.ask(self.path, lambda: self._compare(self._handle.status()))

    def close(self) -> None:
        """Give the file back."""
        self._handle.close()
        self._storage.closed()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        try:
            if kind is None and not self._handle.changes_in_place:
                self.check()
        finally:
            self.close()

    def _request(self, offset: int, length: int) -> bytes:
        data = self._attempt(offset, length, lambda: self._handle.pread(offset, length))
        return data if len(data) == length else self._rest(offset, length, data)

    def _rest(self, offset: int, length: int, data: bytes | memoryview) -> bytes:
        """Read on where an answer was cut, and join."""
        start = len(data)
        # Of a server that does so with each answer, once.
        doing = "" if self._was_cut else f"{self.path}: reading {length} bytes at {offset}"
        self._was_cut = True
        self._storage.count_cut(doing, start)
        return b"".join([data, self._request(offset + start, length - start)])

    def _attempt(self, offset: int, length: int, pread: Callable[[], Data]) -> Data:
        def attempt(failures: int) -> Data:
            if failures:
                self._handle.renew()
            return self._checked(pread(), offset, length)

        doing = f"reading {length} bytes at {offset}"
        return self._storage.read(self.path, attempt, length, self._handle.watched, doing)

    def _checked(self, data: Data, offset: int, length: int) -> Data:
        if self._handle.changes_in_place or not data:
            self._compare(self._handle.status())
        if not data:
            raise TransientError(f"got 0 of {length} bytes")
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
        may_lack: Paths of shards that may be missing, where an index has their samples.

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
        may_lack: Collection[str] = (),
    ) -> None:
        self.may_lack = may_lack
        self.checks_hashes = hashes
        self.checked: set[str] = set()
        self._throttle = throttle
        self._retry = retry if retry is not None else Retry()
        self._watch = watch
        self._lock = threading.Lock()
        self._remotes: dict[str, Remote] = {}
        self._names = UrlNames()
        self._fails_beside: set[str] = set()
        self._shared: dict[str, bool] = {}
        self._expected: dict[str, tuple[int, int | None]] = {}
        self.bytes_read = 0
        self.num_opens = 0
        self.buffers = BufferRing(max_idle=MAX_IDLE)
        self.metadata = MetadataCache()
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
        path = self.name(path)
        if "://" in path:
            handle = self._ask_remote(path, lambda at, url: at.open(url), doing="opening it")
        else:
            watched = self.is_watched(path)
            handle = self.ask(
                path, lambda: LocalFile(path, watched=watched), doing="opening it", watched=watched
            )
        now = handle.opened
        size, mtime_ns = self._expected.get(path, (now.size, None))
        if size != now.size or mtime_ns not in (None, now.mtime_ns):
            handle.close()
            raise _changed(path, now, Status(size, mtime_ns or 0), "when surveyed")
        with self._lock:
            self._num_open += 1
        return StorageFile(path, handle, self)

    def closed(self) -> None:
        """Know that a file was given back."""
        with self._lock:
            self._num_open -= 1
            if not self._num_open and self.buffers.num_allocated:
                self.buffers = BufferRing(max_idle=MAX_IDLE)

    def expect(self, path: str, size: int, mtime_ns: int | None) -> None:
        """Refuse to open a file that is not, or no longer, what was counted.

        Args:
            path: The file.
            size: Its length in bytes.
            mtime_ns: Time of its last change; None if another node saw it, whose copy may have
                another.
        """
        self._expected[self.name(path)] = (size, mtime_ns)

    def stat(self, path: str) -> tuple[int, int]:
        """Find a file's length in bytes and its time of change; a local one is not opened.

        Raises:
            SourceError: If it cannot be found.
        """
        if "://" in path:
            with self.open(path) as file:
                return file.size, file.mtime_ns
        self.take_turn()
        status = self.ask(path, Path(path).stat, watched=self.is_watched(path))
        return status.st_size, status.st_mtime_ns

    def exists(self, path: str, *, is_optional: bool = False) -> bool:
        """Say whether there is such a file, that this node may read.

        Args:
            path: The file.
            is_optional: Whether all goes on without it: where a server that goes on failing is
                asked for it, it is taken as not there, as are those beside it.

        Raises:
            SourceError: If the storage fails.
        """
        path = self.name(path)
        if "://" not in path:
            return self.ask(path, Path(path).is_file, watched=self.is_watched(path))
        if self._names.is_out_of_reach(path):
            return False
        directory = path.rpartition("/")[0]
        if is_optional and directory in self._fails_beside:
            return False
        try:
            return self._ask_remote(
                path, lambda at, url: at.is_file(url), most_s=OPTIONAL_S if is_optional else None
            )
        except DeniedError:
            # What many stores answer of a missing file, to whom they do not list files.
            return False
        except SourceError as error:
            if not (is_optional and isinstance(error.__cause__, GaveUpError)):
                raise
            self._fails_beside.add(directory)
            _log.warning("%s; it is taken as not there", error)
            return False

    def name(self, url: str) -> str:
        """Name a URL as it is shown, and remember it: all takes its name from then on."""
        return self._names.name(url) if "://" in url else url

    @property
    def urls(self) -> dict[str, str]:
        """What is behind the names, for other ranks of this job alone: they hold secrets."""
        return self._names.urls

    def adopt_urls(self, urls: dict[str, str]) -> None:
        """Know what another rank named."""
        self._names.adopt(urls)

    def is_file_of_url(self, name: str) -> bool:
        """Say whether a URL is that of a file; unlike `exists`, a refusal is an error."""
        return self._ask_remote(name, lambda at, url: at.is_file(url))

    def children(self, name: str) -> list[str]:
        """List a directory behind a URL, as names.

        Raises:
            SourceError: If the URL has a ``?``: it opens one file.
        """
        return self._listed(name, lambda at, url: at.children(url))

    def glob(self, name: str) -> list[str]:
        """List what a pattern of a URL names, as names.

        Raises:
            SourceError: If the URL has a ``?``: it opens one file.
        """
        return self._listed(name, lambda at, url: at.glob(url))

    def _listed(self, name: str, call: Callable[[Remote, str], list[str]]) -> list[str]:
        if split_query(self._names.url(name))[1]:
            raise SourceError(
                f"{name}: found a query behind '?' in the URL, which opens one file and lists "
                "nothing, but this is no shard by its name; expected a URL that ends in a shard's "
                "suffix before the '?'; give the URL of each shard, in a list"
            )
        return [self.name(url) for url in self._ask_remote(name, call, doing="listing it")]

    def canonical(self, url: str) -> str:
        """Write a URL so that its last part is the name of the file, and name it."""
        url = self._names.url(url)
        return self.name(self._remote(url).canonical(url))

    def _ask_remote(
        self,
        name: str,
        call: Callable[[Remote, str], T],
        *,
        doing: str = "asking for it",
        most_s: float | None = None,
    ) -> T:
        url = self._names.url(name)
        remote = self._remote(url)
        return self.ask(name, lambda: call(remote, url), doing=doing, most_s=most_s)

    def _remote(self, url: str) -> Remote:
        scheme = "s3" if url.startswith("s3://") else "fsspec"
        if scheme not in self._remotes:
            # Imported here: either takes a while, and most sources need neither.
            if scheme == "s3":
                from dataio.source.storage.s3 import S3Files

                self._remotes.setdefault(scheme, S3Files())
            else:
                from dataio.source.storage.remote import FsspecFiles

                self._remotes.setdefault(scheme, FsspecFiles())
        return self._remotes[scheme]

    def ask(
        self,
        path: str,
        work: Callable[[], T],
        *,
        doing: str = "asking for it",
        watched: bool = True,
        most_s: float | None = None,
    ) -> T:
        """Make a request that reads no bytes, with retries, for ``most_s`` if that is given.

        Raises:
            SourceError: If the storage fails.
        """
        try:
            return self._retry.call(
                lambda _: work(), doing=f"{path}: {doing}", watched=watched, most_s=most_s
            )
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
        self._count(len(data))
        return data

    def count_cut(self, doing: str, num_bytes: int) -> None:
        """Count an answer that was cut, and log it if it says where: the rest is asked for."""
        self._retry.note_cut(doing, num_bytes)

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

    def is_watched(self, path: str) -> bool:
        """Say whether requests for a local file may hang, as those to a server do."""
        if self._watch is not None:
            return self._watch
        # By directory, since a source may have millions of files.
        parent = os.path.dirname(path)  # noqa: PTH120
        if parent not in self._shared:
            self._shared[parent] = self.ask(path, lambda: filesystem_of(Path(parent)).is_shared)
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
