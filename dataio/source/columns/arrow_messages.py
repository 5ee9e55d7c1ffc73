"""Where the record batches of an Arrow stream or file lie, by their headers alone.

Both forms are messages back to back: a header (a FlatBuffer), then a body of as many bytes as it
says. https://arrow.apache.org/docs/format/Columnar.html
"""

import struct
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from dataio.base.errors import SourceError
from dataio.source.io.files import StorageFile

FILE_MAGIC = b"ARROW1"
FEATHER_V1_MAGIC = b"FEA1"
CONTINUATION = 0xFFFFFFFF
SCHEMA, DICTIONARY, BATCH = 1, 2, 3
HEADER_BYTES = 4096
"""Enough for most headers; the next ones of a file are as long as its last."""


@dataclass(frozen=True)
class Message:
    """A message of an Arrow stream.

    Attributes:
        kind: SCHEMA, DICTIONARY or BATCH.
        offset: Where its header begins in the file.
        header_bytes: Length of the header, with its prefix.
        body_bytes: Length of the body behind it.
        num_rows: Of a batch.
        buffers: int64[num_buffers, 2]: Of a batch: start in the body and length.
    """

    kind: int
    offset: int
    header_bytes: int
    body_bytes: int
    num_rows: int
    buffers: NDArray[np.int64]

    @property
    def stop(self) -> int:
        """Where the next message begins."""
        return self.offset + self.header_bytes + self.body_bytes


def list_messages(file: StorageFile) -> list[Message]:
    """Find the messages of an Arrow stream or file, reading headers only.

    Raises:
        SourceError: If it is neither, damaged or truncated.
    """
    begin = file.read_at(0, HEADER_BYTES)
    if begin.startswith(FEATHER_V1_MAGIC):
        raise _refused(file, 0, "Feather version 1", "version 2; write it again with pyarrow")
    is_file = begin.startswith(FILE_MAGIC)
    if is_file and file.read_at(file.size - 6, 6) != FILE_MAGIC:
        raise _refused(file, file.size, "no end of an Arrow file", "one; it is truncated")
    messages: list[Message] = []
    offset, guess = 8 if is_file else 0, HEADER_BYTES
    while message := _next(file, offset, guess):
        if message.stop > file.size:
            found = f"a message that ends at {message.stop}, beyond the file ({file.size})"
            raise _refused(file, offset, found, "it whole; the file is truncated")
        messages.append(message)
        offset, guess = message.stop, message.header_bytes
    if not messages or messages[0].kind != SCHEMA:
        raise _refused(file, 0, f"{begin[:8]!r}", "a schema; it is no Arrow file or stream")
    return messages


def _next(file: StorageFile, offset: int, guess: int) -> Message | None:
    """Read the header at ``offset``; None at the end of the stream."""
    raw = file.read_at(offset, max(guess, 8))
    if not raw:
        return None
    try:
        (length,) = struct.unpack_from("<I", raw)
        # Files from before 2019 have no continuation mark.
        prefix = 8 if length == CONTINUATION else 4
        (length,) = struct.unpack_from("<i", raw, prefix - 4)
        if length == 0:
            return None
        if not 0 < length <= file.size - offset:
            raise ValueError(f"a header of {length} bytes")
        if prefix + length > len(raw):
            raw = file.read_at(offset, prefix + length)
        return _parse(raw[prefix : prefix + length], offset, prefix + length)
    except (struct.error, ValueError) as error:
        expected = "an Arrow message; it is damaged, or no Arrow file or stream"
        raise _refused(file, offset, f"{raw[:8]!r} ({error})", expected) from error


def _parse(header: bytes, offset: int, header_bytes: int) -> Message:
    message = _Table.root(header)
    kind, body_bytes = message.number(1, "<B"), message.number(3, "<q")
    if kind not in (SCHEMA, DICTIONARY, BATCH) or body_bytes < 0:
        raise ValueError(f"a message of kind {kind}")
    num_rows, buffers = 0, np.empty((0, 2), np.int64)
    if kind == BATCH:
        batch = message.table(2)
        num_rows, buffers = batch.number(0, "<q"), batch.pairs(2)
        columns = batch.pairs(1)
        if num_rows < 0 or (len(columns) and columns[0, 0] != num_rows):
            raise ValueError(f"a batch of {num_rows} rows")
        if (buffers < 0).any() or (buffers > body_bytes - buffers[:, ::-1]).any():
            raise ValueError("a column outside of its batch")
    return Message(kind, offset, header_bytes, body_bytes, num_rows, buffers)


class _Table:
    """A FlatBuffers table: fields by number, each where the table's own index says."""

    def __init__(self, data: bytes, position: int) -> None:
        self._data = data
        self._position = position
        self._index = position - self._read("<i", position)

    @classmethod
    def root(cls, data: bytes) -> "_Table":
        return cls(data, struct.unpack_from("<I", data)[0])

    def number(self, field: int, form: str) -> int:
        at = self._place(field)
        return self._read(form, at) if at else 0

    def table(self, field: int) -> "_Table":
        return _Table(self._data, self._follow(field))

    def pairs(self, field: int) -> NDArray[np.int64]:
        """Read a vector of pairs of int64."""
        if not self._place(field):
            return np.empty((0, 2), np.int64)
        at = self._follow(field)
        count = self._read("<I", at)
        return np.frombuffer(self._data, "<i8", 2 * count, at + 4).reshape(count, 2)

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
