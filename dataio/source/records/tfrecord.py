"""Rows from TFRecord shards of ``tf.train.Example``, gzipped ones too.

A record is ``uint64 length, uint32 crc, bytes[length], uint32 crc``, little-endian; the checksums
are CRC-32C, rotated and shifted.

Source: TensorFlow, ``tensorflow/core/lib/io/record_writer.h`` and ``lib/hash/crc32c.h``.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import NoReturn

import numpy as np
from numpy.typing import NDArray

from dataio.base.errors import FieldError, SourceError
from dataio.rows.fields import Field, Raw
from dataio.rows.rows import Rows
from dataio.source.base import Contents, Mark, Shard
from dataio.source.io.files import Storage
from dataio.source.io.window import File, Window
from dataio.source.records.compressed import decompressed
from dataio.source.records.example import Features, read_example
from dataio.source.records.marked import count_and_mark, read_marked
from dataio.source.records.samples import Sample, refuse_key, sample_rows, shaped

RECORD = "__record__"
"""The key of a record's own bytes, whatever they are."""
HEAD_BYTES, CRC_BYTES = 12, 4
MASK = 0xA282EAD8


class TfRecordFormat:
    """TFRecord shards: a sample is a record, a field's key a feature, or ``__record__``."""

    def known_counts(self, storage: Storage, paths: Sequence[str]) -> None:
        return None

    def survey(self, storage: Storage, path: str) -> Contents:
        """Count the records by their heads, and mark some of them."""
        with storage.open(path) as opened:
            file = decompressed(opened)
            begins = (mark[1] for mark, _ in _walk(file, (0, 0), file.size, reads_all=False))
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
    keys = frozenset(field.key for field in fields.values())
    for (number, begin), data in read_marked(file, shard, numbers, _walk):
        record, crc = data[:-CRC_BYTES], data[-CRC_BYTES:]
        if _masked_crc(record) != int.from_bytes(crc, "little"):
            _refuse(file.path, number, begin, "a record that its checksum does not match")
        features: Features = {}
        if keys != {RECORD}:
            try:
                features = read_example(record, keys)
            except ValueError as error:
                _refuse(file.path, number, begin, f"bytes that are no tf.train.Example ({error})")
        where = f"{shard.path}: sample {number}"
        yield (
            number,
            [
                record if field.key == RECORD else _value(features, field, name, where)
                for name, field in fields.items()
            ],
        )


def _value(features: Features, field: Field, name: str, where: str) -> Raw:
    if field.key not in features:
        refuse_key(where, features, field.key, name)
    values = features[field.key]
    if isinstance(values, np.ndarray):
        return shaped(values, field, name)
    if len(values) != 1:
        raise FieldError(
            f"{where}, field {name!r}: found {len(values)} byte strings in feature {field.key!r}, "
            "expected one; write the record with one, or its numbers as a list of numbers"
        )
    return values[0]


def _walk(
    file: File, start: Mark, stop: int, reads_all: bool = True
) -> Iterator[tuple[Mark, memoryview]]:
    """Find records in [the mark's byte, stop), each with its data and checksum.

    Args:
        file: The shard.
        start: Number and first byte of a record.
        stop: Where to end.
        reads_all: Whether to read the data; else what is yielded may hold none.

    Raises:
        SourceError: If the checksum of a length is wrong, or the shard ends within a record.
    """
    number, begin = start
    window = Window(file, np.array([[begin, stop]]))
    if not reads_all:
        window.pace(window.skip_piece_bytes(0))
    while begin < stop and (head := window.view(begin, HEAD_BYTES)):
        length = int.from_bytes(head[:8], "little")
        crc = int.from_bytes(head[8:], "little")
        if len(head) < HEAD_BYTES or _masked_crc(head[:8]) != crc:
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


def _masked_crc(data: memoryview) -> int:
    try:
        import google_crc32c
    except ModuleNotFoundError as error:
        raise SourceError(
            "TFRecord: google-crc32c is not installed, expected it to check records; run "
            "`pip install 'tonari[tfrecord]'`"
        ) from error
    crc = google_crc32c.value(bytes(data))
    return int(((crc >> 15 | crc << 17) + MASK) & 0xFFFFFFFF)


def _refuse(path: str, number: int, begin: int, found: str) -> NoReturn:
    raise SourceError(
        f"{path}: record {number} at byte {begin}: found {found}, expected a whole record of "
        "TFRecord; the shard is damaged, or no TFRecord: copy or write it again"
    )
