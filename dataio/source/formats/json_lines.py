"""Rows from JSON lines: one object a line, compressed or not."""

from collections.abc import Iterator, Mapping
from typing import NoReturn

import numpy as np

from dataio.base.errors import SourceError
from dataio.rows.fields import Field, Raw
from dataio.source.base import Mark
from dataio.source.formats.in_order import MarkedFormat, Parse
from dataio.source.formats.records import refuse_key
from dataio.source.formats.stored_values import json_value, read_json
from dataio.source.storage.window import File
from dataio.source.values import shaped

LEAST_BYTES, MOST_BYTES = 64 << 10, 8 << 20
"""Of a read: behind a mark only a little may be wanted."""
MOST_LINE_BYTES = 256 << 20
SHOWN_BYTES = 40


def json_lines_format() -> MarkedFormat:
    """Read JSON lines: a sample is a line that is not blank, a field's key a key of its object.

    ``a.b`` is the key ``b`` of the object under ``a``. An object or a list that is not one of
    numbers is text.
    """
    return MarkedFormat(_walk, _parser)


def _parser(path: str, fields: Mapping[str, Field]) -> Parse:
    def parse(mark: Mark, line: memoryview) -> list[Raw]:
        number, begin = mark
        try:
            # Each of several files that were joined may begin with a byte order mark.
            text = str(line, "utf-8").removeprefix("\ufeff")
            document = read_json(text)
            if not isinstance(document, dict):
                raise ValueError(f"it is a {type(document).__name__}")
        except (ValueError, RecursionError) as error:
            raise SourceError(
                f"{path}: sample {number} at byte {begin}: found {bytes(line[:SHOWN_BYTES])!r}, "
                f"expected one object of JSON a line, in UTF-8 ({error}); repair the line, or "
                "write the file again"
            ) from error
        where = f"{path}: sample {number}"
        return [_value(document, text, field, name, where) for name, field in fields.items()]

    return parse


def _value(document: dict[str, object], text: str, field: Field, name: str, where: str) -> Raw:
    try:
        value = json_value(document, field.key, where, text=text)
    except KeyError:
        refuse_key(where, document, field.key, name)
    return shaped(value, field, name) if isinstance(value, np.ndarray) else value


def _walk(
    file: File, start: Mark, stop: int, *, reads_all: bool
) -> Iterator[tuple[Mark, memoryview]]:
    """Find the lines in [the mark's byte, stop) that are not blank.

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
