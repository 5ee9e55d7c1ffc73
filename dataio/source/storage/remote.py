"""Files behind a URL that fsspec reads: ``http://``, ``memory://``, ``gs://``, ``hf://``.

Client libraries name what went wrong in many ways, with URLs and keys in the text. Here each
becomes one of ours, which says whether it may be the URL, the credentials or the server; theirs is
not kept as its cause, where a traceback would show it.
"""

import logging
import re
from collections.abc import Callable, Iterator, Mapping
from datetime import datetime
from typing import TypeVar

import fsspec
import fsspec.asyn

from dataio.base.errors import DataioError, SourceError
from dataio.base.location import bare, explained, shown, split_user
from dataio.source.storage.handle import DeniedError, FileHandle, MissingError, Status
from dataio.source.storage.http import encoded, read_range
from dataio.source.storage.retry import TransientError, is_transient

T = TypeVar("T")

TRANSIENT_STATUS = frozenset({408, 425, 429, *range(500, 600)})
CHANGE_KEYS = ("mtime", "LastModified", "last_modified", "updated", "created")
"""Under which of them a filesystem says when a file changed."""
PASSING = re.compile(
    r"Connect|Timeout|Incomplete|Protocol|Payload|Disconnect|Reset|Chunked|Stream|Read|Network"
    r"|Socket|EOF|ServiceRequest"
)
"""In the names of client libraries' errors of a connection that was lost, or never made."""
LASTING = re.compile(r"Certificate|Invalid|Unsupported|Credential|Auth")
"""In the names of those that come again however often one asks."""


class FsspecFiles:
    """Every kind of URL that fsspec knows."""

    def canonical(self, url: str) -> str:
        return url

    def open(self, url: str) -> FileHandle:
        return HttpFile(url) if _is_http(url) else FsspecFile(url)

    def is_file(self, url: str) -> bool:
        try:
            if _is_http(url):
                HttpFile(url)
                return True
            system, name = _find(url)
            return bool(_ask(url, lambda: system.info(name)).get("type") != "directory")
        except MissingError:
            return False

    def children(self, url: str) -> list[str]:
        system, name = _find(url)
        return _urls(system, url, _ask(url, lambda: system.ls(name, detail=False)))

    def glob(self, url: str) -> list[str]:
        system, name = _find(url)
        return _urls(system, url, _ask(url, lambda: system.glob(name)))


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
                f"{bare(url)}: found a {info.get('type', 'file')} of unknown length, expected a "
                "file whose server states its length; copy it to storage that does"
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


class HttpFile:
    """A file behind a URL of the web; each read is a request of its own."""

    watched = True
    changes_in_place = False

    def __init__(self, url: str) -> None:
        self._url = encoded(url)
        self._system, _ = _find(self._url, encoded=True)
        self.opened = self.status()

    def status(self) -> Status:
        return self._read(0, 1, None)

    def pread(self, offset: int, length: int) -> bytes:
        data = bytearray()
        try:
            self._read(offset, offset + length, data)
        except TransientError:
            # Of an answer that was cut, what came is kept.
            if not data:
                raise
        return bytes(data)

    def renew(self) -> None:
        return None

    def close(self) -> None:
        return None

    def _read(self, start: int, stop: int, into: bytearray | None) -> Status:
        system, url = self._system, self._url

        def request() -> Status:
            status: Status = fsspec.asyn.sync(
                system.loop, read_range, system, url, start, stop, into
            )
            return status

        return _ask(url, request)


def _is_http(url: str) -> bool:
    return url.startswith(("http://", "https://"))


def _find(url: str, **options: object) -> tuple[fsspec.AbstractFileSystem, str]:
    """Find what reads a URL, and the name of the file there."""
    try:
        system, name = fsspec.core.url_to_fs(url, **options)
    except DataioError:
        raise
    except Exception as error:
        library = isinstance(error, (ValueError, ImportError))
        failure = _failure(url, error) if not library else SourceError(
            f"{bare(url)}: cannot be opened ({explained(error, url)}), expected a path or a URL "
            "that fsspec knows; correct it, or install what reads it"
        )  # fmt: skip
    else:
        _hide_in_logs(type(system).__module__)
        return system, str(name)
    raise failure


def _urls(system: fsspec.AbstractFileSystem, url: str, names: list[str]) -> list[str]:
    """Write what a filesystem lists as URLs, with what the pattern had in front of its path."""
    head, user, rest = split_user(url)
    server = rest.partition("/")[0]
    # Such as ftp://, whose names begin at the server's root.
    path = rest.partition("/")[2].strip("/")
    drops_server = str(system._strip_protocol(url)).strip("/") == path
    found = []
    for name in names:
        listed = str(system.unstrip_protocol(name))
        front, own, path = split_user(listed)
        if drops_server:
            front, path = head, f"{server}/{path.lstrip('/')}"
        is_there = path.partition("/")[0] == server
        found.append(f"{front}{own or (user if is_there else '')}{path}")
    return found


def _ask(url: str, request: Callable[[], T]) -> T:
    """Make a request, and sort what each client library raises in its own way."""
    try:
        return request()
    except DataioError:
        raise
    except Exception as error:
        failure = _failure(url, error)
    # Out here theirs is not the context of ours.
    raise failure


def _failure(url: str, error: Exception) -> Exception:
    """Say in our words what failed, and whether it may pass."""
    chain = list(_causes(error))
    # Some say "no such file" of a server that did not answer, or refused.
    found = next(((cause, code) for cause in chain if (code := _code(cause)) is not None), None)
    cause, status = found or (next(filter(_may_pass, chain), error), None)
    said, where = explained(cause, url), bare(url)
    if status in TRANSIENT_STATUS or (status is None and _may_pass(cause)):
        return TransientError(said)
    denied = isinstance(cause, PermissionError) or re.search(
        "Credential|Auth", type(cause).__name__
    )
    if status in (401, 403, 407) or (status is None and denied):
        return DeniedError(
            f"{where}: the server refuses this node ({said}), expected credentials that may read "
            "it; check them on every node, and that the URL is right: of one with a signature, "
            "whether its time has passed, and sign it anew"
        )
    if status in (404, 410) or (status is None and isinstance(cause, FileNotFoundError)):
        return MissingError(
            f"{where}: cannot be opened ({said}): there is no such file on the server, expected a "
            "shard or a directory of shards; check the URL"
        )
    return SourceError(
        f"{where}: cannot be read ({said}), expected the server to hand it out; check the URL, and "
        "that this node's credentials may read it"
    )


def _causes(error: BaseException | None) -> Iterator[BaseException]:
    while error is not None:
        yield error
        error = error.__cause__


def _code(error: BaseException) -> int | None:
    """Find the status of HTTP, or of FTP as one, by which a server answered."""
    if _module(error) == "ftplib":
        digits = str(error)[:3]
        return {"530": 403, "550": 404}.get(digits, 503 if digits[:1] == "4" else 400)
    if _is_cut(error):
        return None
    answer = getattr(error, "response", None)
    if isinstance(answer, Mapping):
        answer = answer.get("ResponseMetadata", {})
        found = answer.get("HTTPStatusCode")
    else:
        found = next(
            (
                value
                for each in (error, answer)
                for name in ("status", "status_code", "code")
                if (value := getattr(each, name, None)) is not None
            ),
            None,
        )
    try:
        code = int(str(found))
    except ValueError:
        return None
    return code if 400 <= code < 600 else None


def _is_cut(error: BaseException) -> bool:
    """Whether an answer ended early, which aiohttp reports with a status that no server sent."""
    names = {kind.__name__ for kind in type(error).__mro__}
    return not names.isdisjoint({"ClientPayloadError", "HttpProcessingError", "IncompleteRead"})


def _may_pass(error: BaseException) -> bool:
    name = type(error).__name__
    if isinstance(error, OSError) and is_transient(error):
        return True
    if LASTING.search(name) or "CERTIFICATE_VERIFY_FAILED" in str(error):
        return False
    is_clients = not isinstance(error, (FileNotFoundError, PermissionError, ValueError, TypeError))
    return is_clients and (_module(error) == "aiohttp" or PASSING.search(name) is not None)


def _module(error: BaseException) -> str:
    return type(error).__module__.partition(".")[0]


def _status(info: Mapping[str, object]) -> Status:
    changed = next((info[name] for name in CHANGE_KEYS if info.get(name)), 0)
    seconds = changed.timestamp() if isinstance(changed, datetime) else changed
    mtime_ns = int(seconds * 1e9) if isinstance(seconds, (int, float)) else 0
    return Status(int(str(info["size"])), mtime_ns, str(info.get("ETag", "")))


class _ShownAlone(logging.Filter):
    """Writes the URLs in another library's lines by their names."""

    def filter(self, record: logging.LogRecord) -> bool:
        record.msg, record.args = shown(record.getMessage()), ()
        if record.exc_info:
            record.exc_text = shown(logging.Formatter().formatException(record.exc_info))
            record.exc_info = None
        return True


_shown_alone = _ShownAlone()


def _hide_in_logs(module: str) -> None:
    """Have what reads URLs log no secret; at the level DEBUG fsspec writes each."""
    for name in {"fsspec", "fsspec.http", module, module.partition(".")[0]}:
        # Adds it once.
        logging.getLogger(name).addFilter(_shown_alone)
