"""Where the record batches of an Arrow stream or file lie, by their headers alone.

Both forms are messages back to back: a header (a FlatBuffer), then a body of as many bytes as it
says. https://arrow.apache.org/docs/format/Columnar.html
"""

import struct
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from dataio.base.errors import SourceError
from dataio.source.storage.files import StorageFile

FILE_MAGIC = b"ARROW1"
FEATHER_V1_MAGIC = b"FEA1"
CONTINUATION = 0xFFFFFFFF
SCHEMA, DICTIONARY, BATCH = 1, 2, 3
NO_BUFFERS = np.empty((0, 2), np.int64)
PADDED_BYTES = 64
"""The most that a buffer is padded to."""
TAIL_BYTES = 10
"""Of a file: the length of the footer, and a magic again."""
HEADER_BYTES = 4096
"""Enough for most headers; the next ones of a file are as long as its last."""


@dataclass(frozen=True)
class ArrowMessage:
    """A message of an Arrow stream.

    Attributes:
        kind: SCHEMA, DICTIONARY or BATCH.
        offset: Where its header begins in the file.
        header_bytes: Length of the header, with its prefix.
        body_bytes: Length of the body behind it.
        num_rows: Of a batch.
        buffers: int64[num_buffers, 2]: Of a batch: start in the body and length.
        num_nodes: Of a batch or dictionary: its columns, nested ones included.
    """

    kind: int
    offset: int
    header_bytes: int
    body_bytes: int
    num_rows: int
    buffers: NDArray[np.int64]
    num_nodes: int

    @property
    def stop(self) -> int:
        """Where the next message begins."""
        return self.offset + self.header_bytes + self.body_bytes


def list_messages(file: StorageFile) -> list[ArrowMessage]:
    """Find the messages of an Arrow stream or file, reading headers only.

    Raises:
        SourceError: If it is neither, damaged or truncated.
    """
    begin = file.read_at(0, HEADER_BYTES)
    if begin.startswith(FEATHER_V1_MAGIC):
        raise _refused(file, 0, "Feather version 1", "version 2; write it again with pyarrow")
    is_file = begin.startswith(FILE_MAGIC)
    tail = file.read_at(max(file.size - TAIL_BYTES, 0), TAIL_BYTES) if is_file else b""
    if is_file and not tail.endswith(FILE_MAGIC):
        raise _refused(file, file.size, "no end of an Arrow file", "one; it is truncated")
    messages: list[ArrowMessage] = []
    offset, guess = 8 if is_file else 0, HEADER_BYTES
    while isinstance(message := _next(file, offset, guess), ArrowMessage):
        if message.stop > file.size:
            found = f"a message that ends at {message.stop}, beyond the file ({file.size})"
            raise _refused(file, offset, found, "it whole; the file is truncated")
        messages.append(message)
        offset, guess = message.stop, message.header_bytes
    if not messages or messages[0].kind != SCHEMA:
        raise _refused(file, 0, f"{begin[:8]!r}", "a schema; it is no Arrow file or stream")
    if len({message.num_nodes for message in messages if message.kind == BATCH}) > 1:
        raise _refused(file, 0, "record batches of several schemas", "one; it is damaged")
    end = offset + message
    footer_bytes = int.from_bytes(tail[:4], "little") if is_file else 0
    if end + footer_bytes + len(tail) != file.size:
        found = f"{file.size - end} bytes behind the end of its record batches"
        expected = (
            f"{'a footer' if is_file else 'nothing'} there; others were joined to it, or zeros "
            "took the place of its data: give files that were joined as several shards"
        )
        raise _refused(file, end, found, expected)
    if is_file:
        _check_footer(file, end, file.read_at(end, footer_bytes), messages)
    return messages


def _check_footer(
    file: StorageFile, end: int, footer: bytes, messages: Sequence[ArrowMessage]
) -> None:
    """Refuse an Arrow file whose footer lists other messages than those before it."""
    try:
        root = _FlatTable.root(footer)
        listed = np.concatenate([root.blocks(2), root.blocks(3)])
    except (struct.error, ValueError) as error:
        raise _refused(file, end, f"a footer that does not read ({error})", "one") from error
    found = [message.offset for message in messages[1:]]
    if sorted(listed.tolist()) != found:
        counts = f"a footer of {len(listed)} batches at other places than the {len(found)} before"
        raise _refused(file, end, counts, "one of these; the file is damaged")


def _next(file: StorageFile, offset: int, guess: int) -> ArrowMessage | int:
    """Read the header at ``offset``; of the end of the stream its length."""
    raw = file.read_at(offset, max(guess, 8))
    if not raw:
        found, expected = "the end of the file", "the mark that a writer closes a stream with"
        raise _refused(file, offset, found, f"{expected}; it may lack record batches")
    try:
        (length,) = struct.unpack_from("<I", raw)
        # Files from before 2019 have no continuation mark.
        prefix = 8 if length == CONTINUATION else 4
        (length,) = struct.unpack_from("<i", raw, prefix - 4)
        if length == 0:
            return prefix
        if not 0 < length <= file.size - offset:
            raise ValueError(f"a header of {length} bytes")
        if prefix + length > len(raw):
            raw = file.read_at(offset, prefix + length)
        return _parse(raw[prefix : prefix + length], offset, prefix + length)
    except (struct.error, ValueError) as error:
        expected = "an Arrow message; it is damaged, or no Arrow file or stream"
        raise _refused(file, offset, f"{raw[:8]!r} ({error})", expected) from error


def _parse(header: bytes, offset: int, header_bytes: int) -> ArrowMessage:
    message = _FlatTable.root(header)
    kind, body_bytes = message.number(1, "<B"), message.number(3, "<q")
    if kind not in (SCHEMA, DICTIONARY, BATCH) or body_bytes < 0:
        raise ValueError(f"a message of kind {kind}")
    if kind == SCHEMA:
        return ArrowMessage(kind, offset, header_bytes, body_bytes, 0, NO_BUFFERS, 0)
    batch = message.table(2) if kind == BATCH else message.table(2).table(1)
    num_rows, columns, buffers = batch.number(0, "<q"), batch.pairs(1), batch.pairs(2)
    if num_rows < 0 or (len(columns) and columns[0, 0] != num_rows):
        raise ValueError(f"a batch of {num_rows} rows")
    if (buffers < 0).any() or (buffers > body_bytes - buffers[:, ::-1]).any():
        raise ValueError("a column outside of its batch")
    lengths = buffers[:, 1]
    # Behind each buffer there may be padding. Of no rows, what is nested in the first column may
    # be written whole, but not the column.
    unused, first = body_bytes - int(lengths.sum()), lengths[:2]
    if unused > PADDED_BYTES * len(buffers) or (not num_rows and (first > PADDED_BYTES).any()):
        raise ValueError(f"{body_bytes} bytes for {num_rows} rows in {len(buffers)} buffers")
    own = (num_rows, buffers) if kind == BATCH else (0, NO_BUFFERS)
    return ArrowMessage(kind, offset, header_bytes, body_bytes, *own, len(columns))


class _FlatTable:
    """A FlatBuffers table: fields by number, each where the table's own index says."""

    def __init__(self, data: bytes, position: int) -> None:
        self._data = data
        self._position = position
        self._index = position - self._read("<i", position)

    @classmethod
    def root(cls, data: bytes) -> "_FlatTable":
        return cls(data, struct.unpack_from("<I", data)[0])

    def number(self, field: int, form: str) -> int:
        at = self._place(field)
        return self._read(form, at) if at else 0

    def table(self, field: int) -> "_FlatTable":
        return _FlatTable(self._data, self._follow(field))

    def pairs(self, field: int) -> NDArray[np.int64]:
        """Read a vector of pairs of int64."""
        if not self._place(field):
            return np.empty((0, 2), np.int64)
        at = self._follow(field)
        count = self._read("<I", at)
        return np.frombuffer(self._data, "<i8", 2 * count, at + 4).reshape(count, 2)

    def blocks(self, field: int) -> NDArray[np.int64]:
        """Read where the blocks of a vector of a footer begin: int64[n]."""
        if not self._place(field):
            return np.empty(0, np.int64)
        at = self._follow(field)
        count = self._read("<I", at)
        return np.frombuffer(self._data, "<i8", 3 * count, at + 4).reshape(count, 3)[:, 0]

    def _follow(self, field: int) -> int:
        at = self._place(field)
        if not at:
            raise ValueError(f"no field {field} in a header")
        return at + self._read("<I", at)

    def _place(self, field: int) -> int:
        slot = 4 + 2 * field
        if slot >= self._read("<H", self._index):
            return 0
        offset = self._read("<H", self._index + slot)
        return self._position + offset if offset else 0

    def _read(self, form: str, at: int) -> int:
        if at < 0:
            raise ValueError("an offset before the header")
        return int(struct.unpack_from(form, self._data, at)[0])


def _refused(file: StorageFile, offset: int, found: str, expected: str) -> SourceError:
    return SourceError(
        f"{file.path}: found {found} at byte {offset}, expected {expected}; copy or write the "
        "file again"
    )
