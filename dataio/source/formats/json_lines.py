"""Rows from JSON lines: one object a line, compressed or not."""

from collections.abc import Iterator, Mapping
from functools import partial
from typing import NoReturn

import numpy as np

from dataio.base.errors import SourceError
from dataio.rows.fields import Field, Raw
from dataio.source.base import SeekPoint, Shard
from dataio.source.formats.in_order import InOrder
from dataio.source.formats.records import RecordFormat, Take, refuse_key
from dataio.source.formats.stored_values import json_value, read_json
from dataio.source.storage.files import Storage
from dataio.source.storage.window import File
from dataio.source.values import shaped

LEAST_BYTES, MOST_BYTES = 64 << 10, 8 << 20
"""Of a read: behind a seek point only a little may be wanted."""
MOST_LINE_BYTES = 256 << 20
SHOWN_BYTES = 40


def json_lines_format() -> RecordFormat[InOrder]:
    """Read JSON lines: a sample is a line that is not blank, a field's key a key of its object.

    ``a.b`` is the key ``b`` of the object under ``a``. An object or a list that is not one of
    numbers is text.
    """
    return RecordFormat(partial(InOrder, steps=_lines), _values)


def _values(storage: Storage, walk: InOrder, shard: Shard, fields: Mapping[str, Field]) -> Take:
    def take(point: SeekPoint, line: memoryview) -> list[Raw]:
        number, begin = point
        try:
            # Each of several files that were joined may begin with a byte order mark.
            text = str(line, "utf-8").removeprefix("\ufeff")
            document = read_json(text)
            if not isinstance(document, dict):
                raise ValueError(f"it is a {type(document).__name__}")
        except (ValueError, RecursionError) as error:
            raise SourceError(
                f"{shard.path}: sample {number} at byte {begin}: found "
                f"{bytes(line[:SHOWN_BYTES])!r}, expected one object of JSON a line, in UTF-8 "
                f"({error}); repair the line, or write the file again"
            ) from error
        where = f"{shard.path}: sample {number}"
        return [_value(document, text, field, name, where) for name, field in fields.items()]

    return take


def _value(document: dict[str, object], text: str, field: Field, name: str, where: str) -> Raw:
    try:
        value = json_value(document, field.key, where, field=field, text=text)
    except KeyError:
        refuse_key(where, document, field.key, name)
    return shaped(value, field, name) if isinstance(value, np.ndarray) else value


def _lines(
    file: File, start: SeekPoint, stop: int, *, reads_all: bool
) -> Iterator[tuple[SeekPoint, memoryview]]:
    """Find the lines in [the seek point's byte, stop) that are not blank.

    Raises:
        SourceError: If there is a byte of zero, which no text of JSON holds, or no end of a line.
    """
    number, at = start
    read_bytes, rest = LEAST_BYTES, b""
    while True:
        begin = at + len(rest)
        piece = bytes(file.view_at(begin, min(read_bytes, stop - begin))) if begin < stop else b""
        read_bytes = min(2 * read_bytes, MOST_BYTES)
        if (zero := piece.find(0)) >= 0:
            _refuse(file.path, begin + zero, "a byte of zero")
        if len(rest) > MOST_LINE_BYTES:
            _refuse(file.path, at, f"a line of more than {MOST_LINE_BYTES} bytes")
        *lines, rest = (rest + piece).split(b"\n")
        if not piece:
            lines, rest = [rest], b""
        for line in lines:
            if line and not line.isspace():
                yield (number, at), memoryview(line)
                number += 1
            at += len(line) + 1
        if not piece:
            return


def _refuse(path: str, begin: int, found: str) -> NoReturn:
    raise SourceError(
        f"{path}: at byte {begin}: found {found}, expected one object of JSON a line, in UTF-8; "
        "the file is damaged, its copy was not finished, or it is none: copy or write it again"
    )
