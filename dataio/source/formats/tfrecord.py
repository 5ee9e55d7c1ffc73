"""Rows from TFRecord shards of ``tf.train.Example``, compressed or not.

A record is ``uint64 length, uint32 crc, bytes[length], uint32 crc``, little-endian; the checksums
are CRC-32C, rotated and shifted.

Source: TensorFlow, ``tensorflow/core/lib/io/record_writer.h`` and ``lib/hash/crc32c.h``.
"""

from collections.abc import Iterator, Mapping
from functools import partial
from typing import NoReturn

import numpy as np

from dataio.base.errors import FieldError, SourceError, install_command
from dataio.rows.fields import Field, Raw
from dataio.source.base import SeekPoint, Shard
from dataio.source.formats.example import Features, read_example
from dataio.source.formats.in_order import InOrder
from dataio.source.formats.records import RecordFormat, Take, refuse_key
from dataio.source.storage.files import Storage
from dataio.source.storage.window import File, FileWindow
from dataio.source.values import shaped

RECORD = "__record__"
"""The key of a record's own bytes, whatever they are."""
HEAD_BYTES, CRC_BYTES = 12, 4
MASK = 0xA282EAD8


def tfrecord_format() -> RecordFormat[InOrder]:
    """Read TFRecord shards: a sample is a record, a field's key a feature, or ``__record__``."""
    return RecordFormat(partial(InOrder, steps=_records), _values, is_plain=_is_head)


def _values(storage: Storage, walk: InOrder, shard: Shard, fields: Mapping[str, Field]) -> Take:
    path, keys = shard.path, frozenset(field.key for field in fields.values())

    def take(point: SeekPoint, data: memoryview) -> list[Raw]:
        number, begin = point
        record, crc = data[:-CRC_BYTES], data[-CRC_BYTES:]
        if _masked_crc(record) != int.from_bytes(crc, "little"):
            _refuse(path, number, begin, "a record that its checksum does not match")
        features: Features = {}
        if keys != {RECORD}:
            try:
                features = read_example(record, keys)
            except ValueError as error:
                _refuse(path, number, begin, f"bytes that are no tf.train.Example ({error})")
        where = f"{path}: sample {number}"
        return [
            record if field.key == RECORD else _value(features, field, name, where)
            for name, field in fields.items()
        ]

    return take


def _value(features: Features, field: Field, name: str, where: str) -> Raw:
    if field.key not in features:
        refuse_key(where, features, field.key, name)
    values = features[field.key]
    if isinstance(values, np.ndarray):
        column = field.column(name)
        # The format has no numbers but in lists.
        is_one = column is not None and column.shape == () and len(values) == 1
        return shaped(values.reshape(()) if is_one else values, field, name)
    if len(values) != 1:
        raise FieldError(
            f"{where}, field {name!r}: found {len(values)} byte strings in feature {field.key!r}, "
            "expected one; write the record with one, or its numbers as a list of numbers"
        )
    return values[0]


def _records(
    file: File, start: SeekPoint, stop: int, *, reads_all: bool
) -> Iterator[tuple[SeekPoint, memoryview]]:
    """Find records in [the seek point's byte, stop), each with its data and checksum.

    Args:
        file: The shard.
        start: Number and first byte of a record.
        stop: Where to end.
        reads_all: Whether to read the data; else what is yielded may hold none.

    Raises:
        SourceError: If the checksum of a length is wrong, or the shard ends within a record.
    """
    number, begin = start
    window = FileWindow(file, np.array([[begin, stop]]))
    if not reads_all:
        window.pace(window.skip_piece_bytes(0))
    while begin < stop and (head := window.view(begin, HEAD_BYTES)):
        length = int.from_bytes(head[:8], "little")
        if not _is_head(head):
            found = "the end of the file" if len(head) < HEAD_BYTES else "a length"
            _refuse(file.path, number, begin, f"{found} that its checksum does not match")
        end = begin + HEAD_BYTES + length + CRC_BYTES
        if reads_all or file.in_order:
            data = window.view(begin + HEAD_BYTES, length + CRC_BYTES)
            is_whole = len(data) == length + CRC_BYTES
        else:
            window.pace(window.skip_piece_bytes(length))
            data, is_whole = memoryview(b""), end <= file.size
        if not is_whole:
            _refuse(file.path, number, begin, f"the end of the file within {length} bytes of it")
        yield (number, begin), data
        number, begin = number + 1, end


def _is_head(head: bytes | memoryview) -> bool:
    """Whether a record begins so: by its length and the checksum of that."""
    crc = int.from_bytes(head[8:HEAD_BYTES], "little")
    return len(head) >= HEAD_BYTES and _masked_crc(head[:8]) == crc


def _masked_crc(data: bytes | memoryview) -> int:
    try:
        import google_crc32c
    except ModuleNotFoundError as error:
        raise SourceError(
            "TFRecord: google-crc32c is not installed, expected it to check records; run "
            f"`{install_command('tfrecord')}`"
        ) from error
    crc = google_crc32c.value(bytes(data))
    return int(((crc >> 15 | crc << 17) + MASK) & 0xFFFFFFFF)


def _refuse(path: str, number: int, begin: int, found: str) -> NoReturn:
    raise SourceError(
        f"{path}: record {number} at byte {begin}: found {found}, expected a whole record of "
        "TFRecord; the shard is damaged, or no TFRecord: copy or write it again"
    )
