"""Rows from JSON lines: one object a line, compressed or not."""

import json
from collections.abc import Iterator, Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from dataio.base.errors import SourceError
from dataio.rows.fields import Field, Raw
from dataio.rows.rows import Rows
from dataio.source.base import Contents, Mark, Shard
from dataio.source.io.files import Storage
from dataio.source.io.window import File
from dataio.source.records.compressed import decompressed
from dataio.source.records.marked import count_and_mark, read_marked
from dataio.source.records.samples import Sample, refuse_key, sample_rows, shaped
from dataio.source.records.values import json_value

LEAST_BYTES, MOST_BYTES = 64 << 10, 8 << 20
"""Of a read: behind a mark only a little may be wanted."""


class JsonLinesFormat:
    """JSON lines: a sample is a line that is not blank, a field's key a key of its object.

    ``a.b`` is the key ``b`` of the object under ``a``. An object or a list that is not one of
    numbers is text.
    """

    def known_counts(self, storage: Storage, paths: Sequence[str]) -> None:
        return None

    def survey(self, storage: Storage, path: str) -> Contents:
        """Count the lines that are not blank, and mark some of them."""
        with storage.open(path) as opened:
            file = decompressed(opened)
            begins = (mark[1] for mark, _ in _walk(file, (0, 0), file.size))
            contents = count_and_mark(begins, opened.size)
        return Contents(contents.counts) if file.in_order else contents

    def read(
        self,
        storage: Storage,
        shard: Shard,
        numbers: NDArray[np.int64],
        fields: Mapping[str, Field],
    ) -> Iterator[Rows]:
        """Read samples of a shard, from the mark before each run of them."""
        with storage.open(shard.path) as opened:
            samples = _samples(decompressed(opened), shard, numbers, fields)
            yield from sample_rows(samples, shard, fields, storage)


def _samples(
    file: File, shard: Shard, numbers: NDArray[np.int64], fields: Mapping[str, Field]
) -> Iterator[Sample]:
    for (number, begin), line in read_marked(file, shard, numbers, _walk):
        try:
            document = json.loads(bytes(line))
            if not isinstance(document, dict):
                raise ValueError(f"it is a {type(document).__name__}")
        except ValueError as error:
            raise SourceError(
                f"{shard.path}: sample {number} at byte {begin}: found {bytes(line[:40])!r}, "
                f"expected one object of JSON a line ({error}); repair the line, or write the file "
                "again"
            ) from error
        where = f"{shard.path}: sample {number}"
        yield number, [_value(document, field, name, where) for name, field in fields.items()]


def _value(document: dict[str, object], field: Field, name: str, where: str) -> Raw:
    try:
        value = json_value(document, field.key, where)
    except KeyError:
        refuse_key(where, document, field.key, name)
    return shaped(value, field, name) if isinstance(value, np.ndarray) else value


def _walk(file: File, start: Mark, stop: int) -> Iterator[tuple[Mark, memoryview]]:
    """Find the lines in [the mark's byte, stop) that are not blank."""
    number, at = start
    read_bytes, rest = LEAST_BYTES, b""
    while True:
        begin = at + len(rest)
        piece = bytes(file.view_at(begin, min(read_bytes, stop - begin))) if begin < stop else b""
        read_bytes = min(2 * read_bytes, MOST_BYTES)
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
