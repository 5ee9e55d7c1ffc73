"""A file behind ``http://`` or ``https://``, read by ranges in the session of fsspec.

Not by fsspec's own calls: they ask by HEAD, which a URL that is signed for GET refuses, drop what
had come of an answer that was cut, and read the whole of a file from a server that serves no parts.
"""

import re
from collections.abc import Mapping
from typing import Any
from urllib.parse import quote

import fsspec

from dataio.base.errors import SourceError
from dataio.base.location import bare, split_query
from dataio.source.storage.handle import ServerError, Status

NOT_IN_PATHS = re.compile(r"[^\w.~/!$&'()*+,;=:@%-]|%(?![0-9A-Fa-f]{2})", re.ASCII)
NOT_IN_QUERIES = re.compile(r"[^\w.~/!$&'()*+,;=:@%?\[\]|{}-]|%(?![0-9A-Fa-f]{2})", re.ASCII)
RANGE = re.compile(r"bytes (?:(\d+)-\d+|\*)/(\d+|\*)")


def encoded(url: str) -> str:
    """Write a URL as it is sent: what cannot stand in one is encoded, all else stays as it is.

    A signature holds for these very letters. Brackets and blanks are those of a file's name.
    """
    plain, query = split_query(url)
    scheme, _, rest = plain.partition("://")
    server, slash, path = rest.partition("/")
    path, query = NOT_IN_PATHS.sub(_quoted, path), NOT_IN_QUERIES.sub(_quoted, query)
    return f"{scheme}://{server}{slash}{path}{query}"


def _quoted(match: re.Match[str]) -> str:
    return quote(match[0], safe="")


async def read_range(
    system: fsspec.AbstractFileSystem, url: str, start: int, stop: int, into: bytearray | None
) -> Status:
    """Ask for bytes [start, stop), at least one.

    Args:
        system: Of fsspec.
        url: What is asked for.
        start: Of the first byte.
        stop: Behind the last.
        into: Bytes are added to it as they come; None: of the answer only its head counts.

    Raises:
        ServerError: If the server says no.
        SourceError: If it sends other bytes, or does not say how many there are.
    """
    session = await system.set_session()
    headers = {
        **system.kwargs.get("headers", {}),
        "Range": f"bytes={start}-{stop - 1}",
        # The bytes of the file, not what they are packed in on their way.
        "Accept-Encoding": "identity",
    }
    asked = {"auto_decompress": False, **system.kwargs, "headers": headers}
    async with session.get(system.encode_url(url), **asked) as response:
        if response.status >= 400 and response.status != 416:
            raise ServerError(response.status, response.reason)
        first, size = _extent(response.headers, is_part=response.status != 200)
        if size is None:
            raise SourceError(
                f"{bare(url)}: found a file of unknown length, expected a file whose server states "
                "its length; copy it to storage that does"
            )
        status = Status(size, 0, _tag(response.headers))
        if into is None or response.status == 416 or start >= size:
            return status
        if first != start:
            raise SourceError(
                f"{bare(url)}: asked for {stop - start} bytes at {start}, got {size - first} at "
                f"{first}; the server does not serve parts of a file: copy the shards to storage "
                "that does"
            )
        async for piece in response.content.iter_any():
            into += piece[: stop - start - len(into)]
            if len(into) == stop - start:
                break
    return status


def _extent(headers: Mapping[str, Any], *, is_part: bool) -> tuple[int, int | None]:
    """Say where an answer begins, and how long the file is."""
    if not is_part:
        length = str(headers.get("Content-Length", ""))
        return 0, int(length) if length.isdigit() else None
    found = RANGE.fullmatch(str(headers.get("Content-Range", "")))
    if found is None or found[2] == "*":
        return -1, None
    return int(found[1] or 0), int(found[2])


def _tag(headers: Mapping[str, Any]) -> str:
    return str(headers.get("ETag") or headers.get("Last-Modified") or "")
