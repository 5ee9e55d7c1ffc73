"""Objects in S3 and what speaks its protocol, by ``pyarrow.fs``.

``s3://bucket/key``, with options as in ``s3://bucket/key?region=eu-west-3`` or
``?endpoint_override=localhost:9000&scheme=http``. Credentials are found as the AWS tools find them:
``AWS_ACCESS_KEY_ID`` and ``AWS_SECRET_ACCESS_KEY``, ``AWS_PROFILE`` and its files, the node's role;
``AWS_ENDPOINT_URL`` names another server. Names of shards end in their suffix and are cut at
slashes everywhere, so `S3Files.canonical` moves the options to the front:
``s3://region=eu-west-3@bucket/key``.
"""

import fnmatch
import os
import re
import threading
from collections.abc import Callable, Mapping
from datetime import datetime
from typing import NamedTuple, NoReturn, TypeVar
from urllib.parse import parse_qsl, quote, urlencode

from pyarrow import NativeFile, fs

from dataio.base.errors import SourceError
from dataio.base.location import OPTIONS, bare
from dataio.source.storage.handle import DeniedError, MissingError, Status
from dataio.source.storage.retry import TransientError, is_transient

T = TypeVar("T")

URL = re.compile(r"s3://(?:([^@/]*)@)?([^/?@]+)(?:/(.*))?", re.DOTALL)
QUERY = re.compile(r"\?([\w.~%-]+=.*)$", re.DOTALL)
SECRET = re.compile(r"key|secret|token|passw|pwd|signature|credential|sig$", re.IGNORECASE)
MAGIC = frozenset("*?[")
CONNECT_TIMEOUT_S = 10.0
MARK_BYTES = 16
MOST_BYTES, LEAST_BYTES = 16 << 20, 64 << 10
"""Of a request: where answers are cut, half as much is asked for, down to the least."""

DENIED = re.compile(
    r"ACCESS_DENIED|ACCESS_KEY|SIGNATURE|TOKEN|UNRECOGNIZED_CLIENT|NOT_SIGNED_UP|HTTP status 40[13]"
)
MISSING_BUCKET = re.compile(r"NO_SUCH_BUCKET|Bucket '[^']*' not found")
MISSING = re.compile(r"NO_SUCH_KEY|RESOURCE_NOT_FOUND|HTTP status 404")
REDIRECTED = re.compile(r"PERMANENT_?REDIRECT|HTTP status 30[17]|AUTHORIZATION_HEADER_MALFORMED")
BAD_CERTIFICATE = re.compile(r"curlCode: (35|51|58|60|77|83|90|91)\b")
PASSING = re.compile(
    r"NETWORK_CONNECTION|SLOW_DOWN|SERVICE_UNAVAILABLE|INTERNAL_FAILURE|INTERNAL_ERROR|THROTTL"
    r"|REQUEST_TIMEOUT|curlCode|HTTP status (5\d\d|408|429)"
)


class Location(NamedTuple):
    """What a URL names."""

    options: tuple[tuple[str, str], ...]
    bucket: str
    key: str

    @property
    def path(self) -> str:
        """As pyarrow names it."""
        return f"{self.bucket}/{self.key}" if self.key else self.bucket

    @property
    def url(self) -> str:
        """With its options in front."""
        # A slash in there would be taken for the end of the bucket, a bracket for a pattern.
        front = urlencode(self.options, safe=":", quote_via=quote)
        return f"s3://{front + '@' if front else ''}{self.path}"


def locate(url: str) -> Location:
    """Take a URL apart.

    Raises:
        SourceError: If it names no bucket, holds credentials, or an option that is not known.
    """
    query = QUERY.search(url)
    match = URL.fullmatch(url[: query.start()] if query else url)
    if match is None:
        raise SourceError(f"{bare(url)}: names no bucket, expected s3://bucket/key; correct it")
    front, bucket, key = match[1] or "", match[2], match[3] or ""
    options = [*parse_qsl(front), *parse_qsl(query[1] if query else "")]
    # What is no name=value in front is a user's; a slash may stand in a password.
    is_user = (front and "=" not in front) or (":" in bucket and "@" in key)
    if is_user or any(SECRET.search(name) or "@" in value for name, value in options):
        raise SourceError(
            f"{bare(url)}: found credentials in the URL, where logs would show them; expected "
            "them in AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY: move them there; a URL that is "
            "signed begins with https://"
        )
    unknown = [name for name, _ in options if name not in OPTIONS]
    if unknown:
        raise SourceError(
            f"{bare(url)}: found the option {unknown[0]!r}, expected some of "
            f"{', '.join(sorted(OPTIONS))}; correct it"
        )
    return Location(tuple(sorted(options)), bucket, key)


class S3Files:
    """All objects, with one client for each server. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._systems: dict[tuple[object, ...], fs.S3FileSystem] = {}

    def canonical(self, url: str) -> str:
        """Move the options in front of the bucket."""
        return locate(url).url

    def open(self, url: str) -> "S3File":
        return S3File(self, locate(url))

    def is_file(self, url: str) -> bool:
        where = locate(url)
        found = self.ask(where, lambda system: system.get_file_info(where.path))
        return bool(found.type == fs.FileType.File)

    def children(self, url: str) -> list[str]:
        """List a directory, as URLs in order."""
        where = locate(url)
        selector = fs.FileSelector(where.path.rstrip("/"))
        found = self.ask(where, lambda system: system.get_file_info(selector))
        paths = sorted(info.path.rstrip("/") for info in found)
        return [where._replace(key=path.partition("/")[2]).url for path in paths]

    def glob(self, url: str) -> list[str]:
        """Find the objects that a pattern names, directory by directory."""
        where = locate(url)
        found = [where._replace(key="")]
        for part in where.key.split("/"):
            if MAGIC.isdisjoint(part):
                found = [at._replace(key=f"{at.key}/{part}".lstrip("/")) for at in found]
                continue
            inside = [locate(child) for at in found for child in self.children(at.url)]
            found = [at for at in inside if fnmatch.fnmatchcase(at.key.rpartition("/")[2], part)]
        return [at.url for at in found]

    def ask(self, where: Location, request: Callable[[fs.S3FileSystem], T]) -> T:
        """Make a request, and say in our words what went wrong."""
        try:
            return request(self._system(where))
        except OSError as error:
            _explain(where, error)

    def _system(self, where: Location) -> fs.S3FileSystem:
        settings = _settings(where, os.environ)
        # The region is the bucket's own, unless something else names it.
        name = (where.options, None if "region" in settings else where.bucket)
        system = self._systems.get(name)
        if system is None:
            # Outside the lock: it may ask a server, and hang.
            region = settings.pop("region", None) or fs.resolve_s3_region(where.bucket)
            made = fs.S3FileSystem(
                region=region,
                connect_timeout=CONNECT_TIMEOUT_S,
                # Ours are logged, counted, and end in time.
                retry_strategy=fs.AwsStandardS3RetryStrategy(max_attempts=1),
                anonymous=settings.pop("anonymous", "") in ("1", "true"),
                **settings,
            )
            with self._lock:
                system = self._systems.setdefault(name, made)
        return system


class S3File:
    """One object; each read is a request of its own.

    A handle has a position, so each thread that reads takes one from those that are idle.
    """

    watched = True
    changes_in_place = False

    def __init__(self, files: S3Files, where: Location) -> None:
        self._files, self._where = files, where
        first = self._open()
        # An answer that was cut in its headers looks like an empty object: ask twice.
        self._idle = [first if first.size() else self._open()]
        self.opened = _status(self._idle[0])
        self._most_bytes = MOST_BYTES

    def status(self) -> Status:
        with self._open() as file:
            return _status(file)

    def pread(self, offset: int, length: int) -> bytes:
        length = min(length, self._most_bytes)
        try:
            file = self._idle.pop()
        except IndexError:
            file = self._open()
        # pyarrow takes an answer that was cut in its headers for a whole one, and would hand out
        # memory that nobody wrote: what was there before must be gone from the end.
        mark = os.urandom(min(length, MARK_BYTES))
        data = bytearray(length)
        data[length - len(mark) :] = mark
        num_read = self._files.ask(self._where, lambda _: _read(file, offset, data))
        self._idle.append(file)
        if data.endswith(mark):
            raise TransientError(f"the answer ended before its {length} bytes")
        return bytes(memoryview(data)[:num_read])

    def renew(self) -> None:
        # pyarrow does not say how much came of an answer that was cut: fewer bytes come whole.
        self._most_bytes = max(self._most_bytes // 2, LEAST_BYTES)

    def close(self) -> None:
        while self._idle:
            self._idle.pop().close()

    def _open(self) -> NativeFile:
        return self._files.ask(self._where, lambda system: _open(system, self._where))


def _read(file: NativeFile, offset: int, into: bytearray) -> int:
    file.seek(offset)
    return int(file.readinto(into))


def _open(system: fs.S3FileSystem, where: Location) -> NativeFile:
    try:
        return system.open_input_file(where.path)
    except FileNotFoundError as error:
        found = system.get_file_info(where.bucket).type
        _missing(where, has_bucket=found != fs.FileType.NotFound, cause=error)


def _status(file: NativeFile) -> Status:
    """Say what its headers said when it was opened; asks nothing."""
    headers = {name.lower(): value.decode() for name, value in file.metadata().items()}
    changed = headers.get("last-modified")
    mtime_ns = int(datetime.fromisoformat(changed).timestamp() * 1e9) if changed else 0
    return Status(file.size(), mtime_ns, headers.get("etag", ""))


def _settings(where: Location, environment: Mapping[str, str]) -> dict[str, str]:
    """Choose the server and the region, by the URL first."""
    settings = dict(where.options)
    endpoint = environment.get("AWS_ENDPOINT_URL_S3") or environment.get("AWS_ENDPOINT_URL")
    if endpoint:
        settings.setdefault("endpoint_override", endpoint)
    scheme, mark, server = settings.get("endpoint_override", "").partition("://")
    if mark:
        settings |= {"scheme": scheme, "endpoint_override": server.rstrip("/")}
    if "endpoint_override" in settings:
        region = environment.get("AWS_REGION") or environment.get("AWS_DEFAULT_REGION")
        settings.setdefault("region", region or "us-east-1")
    return settings


def _explain(where: Location, error: OSError) -> NoReturn:
    said = re.sub(r" *\(Request ID: [^)]*\)", "", str(error)).strip()
    url = where.url
    if isinstance(error, FileNotFoundError) or MISSING.search(said):
        _missing(where, has_bucket=True, cause=error)
    if MISSING_BUCKET.search(said):
        _missing(where, has_bucket=False, cause=error)
    if DENIED.search(said):
        raise DeniedError(
            f"{url}: the server refused the credentials of this process ({_short(said)}), expected "
            "some that may read and list the bucket; check AWS_ACCESS_KEY_ID and "
            "AWS_SECRET_ACCESS_KEY, or AWS_PROFILE, on every node, and the rights of their owner"
        ) from error
    if REDIRECTED.search(said):
        raise SourceError(
            f"{url}: the bucket lies in another region ({_short(said)}); name it: "
            f"s3://{where.path}?region=..."
        ) from error
    if BAD_CERTIFICATE.search(said):
        raise SourceError(
            f"{url}: no secure connection to the server ({_short(said)}), expected a certificate "
            "that this node trusts; check the endpoint, or name it with scheme=http"
        ) from error
    if PASSING.search(said) or is_transient(error):
        raise TransientError(_short(said)) from error
    raise SourceError(
        f"{url}: the server refused the request ({_short(said)}), expected the object's bytes; "
        "check the URL, the endpoint (AWS_ENDPOINT_URL) and the region"
    ) from error


def _missing(where: Location, *, has_bucket: bool, cause: OSError) -> NoReturn:
    if not has_bucket:
        raise MissingError(
            f"{where.url}: there is no bucket {where.bucket!r} for these credentials; check its "
            "name, and the server (AWS_ENDPOINT_URL, endpoint_override=...)"
        ) from cause
    raise MissingError(
        f"{where.url}: no such object in bucket {where.bucket!r}, expected a shard or a directory "
        "of shards; check its name, and whether it was removed"
    ) from cause


def _short(said: str) -> str:
    """Leave out what the SDK repeats."""
    found = re.search(r"AWS Error (.*)", said, re.DOTALL)
    return " ".join((found[1] if found else said).split())[:300]
