"""Files behind a URL that fsspec reads: ``http://``, ``memory://``, ``gs://``, ``hf://``."""

from collections.abc import Callable, Mapping
from datetime import datetime
from typing import TypeVar

import fsspec

from dataio.base.errors import SourceError
from dataio.source.io.medium import Status
from dataio.source.io.retry import TransientError, is_transient

T = TypeVar("T")

TRANSIENT_STATUS = frozenset({408, 425, 429, *range(500, 600)})
CHANGE_KEYS = ("mtime", "LastModified", "last_modified", "updated", "created")
"""Under which of them a filesystem tells when a file changed."""


class FsspecFiles:
    """Every kind of URL that fsspec knows."""

    def canonical(self, url: str) -> str:
        return url

    def open(self, url: str) -> "FsspecFile":
        return FsspecFile(url)

    def is_file(self, url: str) -> bool:
        system, name = _find(url)
        return bool(_ask(url, lambda: system.isfile(name)))

    def children(self, url: str) -> list[str]:
        system, name = _find(url)
        names = _ask(url, lambda: system.ls(name, detail=False))
        return [str(system.unstrip_protocol(child)) for child in names]

    def glob(self, url: str) -> list[str]:
        system, name = _find(url)
        return [
            str(system.unstrip_protocol(match)) for match in _ask(url, lambda: system.glob(name))
        ]


class FsspecFile:
    """A file behind a URL; each read is a request of its own."""

    watched = True
    changes_in_place = False

    def __init__(self, url: str) -> None:
        self._url = url
        self._system, self._name = _find(url)
        info = _ask(url, lambda: self._system.info(self._name))
        if info.get("type") == "directory" or info.get("size") is None:
            raise SourceError(
                f"{url}: found a {info.get('type', 'file')} of unknown length, expected a file "
                "whose server tells its length; copy it to storage that does"
            )
        self.opened = _status(info)

    def status(self) -> Status:
        self._system.invalidate_cache()
        return _status(_ask(self._url, lambda: self._system.info(self._name)))

    def pread(self, offset: int, length: int) -> bytes:
        stop = offset + length
        return bytes(
            _ask(self._url, lambda: self._system.cat_file(self._name, start=offset, end=stop))
        )

    def renew(self) -> None:
        return None

    def close(self) -> None:
        return None


def _find(url: str) -> tuple[fsspec.AbstractFileSystem, str]:
    """Find what reads a URL, and the name of the file there."""
    try:
        system, name = fsspec.core.url_to_fs(url)
    except (ValueError, ImportError) as error:
        raise SourceError(
            f"{url}: cannot be opened ({error}), expected a path or a URL that fsspec knows; "
            "correct it, or install what reads it"
        ) from error
    return system, str(name)


def _ask(url: str, request: Callable[[], T]) -> T:
    """Make a request, and sort what each client library raises in its own way."""
    try:
        return request()
    except Exception as error:
        # Some say "no such file" of a server that did not answer.
        cause = error.__cause__ or error
        status = getattr(cause, "status", getattr(cause, "code", None))
        lost = status is None and type(cause).__module__.startswith("aiohttp")
        if lost or status in TRANSIENT_STATUS:
            raise TransientError(f"{type(cause).__name__}: {cause}") from error
        if isinstance(error, FileNotFoundError) or (
            isinstance(error, OSError) and (is_transient(error) or not isinstance(status, int))
        ):
            raise
        raise SourceError(
            f"{url}: cannot be read ({type(error).__name__}: {error}), expected the server to "
            "hand it out; check the URL, and that this node's credentials may read it"
        ) from error


def _status(info: Mapping[str, object]) -> Status:
    changed = next((info[name] for name in CHANGE_KEYS if info.get(name)), 0)
    seconds = changed.timestamp() if isinstance(changed, datetime) else changed
    mtime_ns = int(seconds * 1e9) if isinstance(seconds, (int, float)) else 0
    return Status(int(str(info["size"])), mtime_ns, str(info.get("ETag", "")))
