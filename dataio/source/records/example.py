"""A serialized ``tf.train.Example`` -> its features. Pure; protobuf is not needed.

Source: the wire format of Protocol Buffers (protobuf.dev/programming-guides/encoding), and
``tensorflow/core/example/example.proto`` and ``feature.proto``: Example{1: Features}, Features{1:
map<1: string, 2: Feature>}, Feature{1: BytesList | 2: FloatList | 3: Int64List}, each list{1:
repeated values}.
"""

from collections.abc import Iterator, Mapping
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

VARINT, FIXED64, BYTES, FIXED32 = 0, 1, 2, 5
WIDTHS = {FIXED64: 8, FIXED32: 4}
BYTES_LIST, FLOAT_LIST, INT64_LIST = 1, 2, 3

Values = list[memoryview] | NDArray[np.generic]
"""Byte strings, or float32[n] or int64[n]."""

Features = Mapping[str, Values]


class _Part(NamedTuple):
    """A field of a message: its number, the kind of its bytes, and these."""

    number: int
    wire: int
    data: memoryview


def read_example(data: memoryview) -> Features:
    """Read the features of an Example; the last one wins where a name comes twice.

    Raises:
        ValueError: If the bytes are none.
    """
    features: dict[str, Values] = {}
    for message in _inner(data, 1):
        for entry in _inner(message, 1):
            name, values = "", memoryview(b"")
            for part in _parts(entry):
                if part.number == 1 and part.wire == BYTES:
                    name = str(part.data, "utf-8")
                elif part.number == 2 and part.wire == BYTES:
                    values = part.data
            features[name] = _values(values)
    return features


def _values(feature: memoryview) -> Values:
    found: Values = []
    for kind, _, data in _parts(feature):
        values = [(part.wire, part.data) for part in _parts(data) if part.number == 1]
        if kind == BYTES_LIST:
            found = [value for _, value in values]
        elif kind == FLOAT_LIST:
            # Packed, or each by itself: the bytes are the same.
            found = np.frombuffer(b"".join(value for _, value in values), "<f4")
        elif kind == INT64_LIST:
            found = _varints(b"".join(value for _, value in values))
    return found


def _varints(data: bytes) -> NDArray[np.int64]:
    """Decode numbers of 7 bits a byte, the lowest first; the last byte of each is below 128."""
    each = np.frombuffer(data, np.uint8)
    if not len(each):
        return np.empty(0, np.int64)
    ends = np.flatnonzero(each < 128)
    starts = np.concatenate([[0], ends[:-1] + 1])
    if not len(ends) or ends[-1] != len(each) - 1 or (ends - starts).max() > 9:
        raise ValueError("a number that does not end")
    # uint64[num_bytes]: how far each byte is behind the first of its number
    place = (np.arange(len(each)) - np.repeat(starts, ends - starts + 1)).astype(np.uint64)
    shifted = (each & 127).astype(np.uint64) << (place * np.uint64(7))
    return np.bitwise_or.reduceat(shifted, starts).view(np.int64)


def _inner(data: memoryview, number: int) -> Iterator[memoryview]:
    for part in _parts(data):
        if part.number == number and part.wire == BYTES:
            yield part.data


def _parts(data: memoryview) -> Iterator[_Part]:
    at = 0
    while at < len(data):
        tag, at = _varint(data, at)
        number, wire = tag >> 3, tag & 7
        start = at
        if wire == VARINT:
            _, at = _varint(data, at)
        elif wire == BYTES:
            length, start = _varint(data, at)
            at = start + length
        elif wire in WIDTHS:
            at += WIDTHS[wire]
        else:
            raise ValueError(f"a field of the kind {wire}")
        if at > len(data) or not number:
            raise ValueError(f"{len(data)} bytes that end within field {number}")
        yield _Part(number, wire, data[start:at])


def _varint(data: memoryview, at: int) -> tuple[int, int]:
    value = shift = 0
    while at < len(data) and shift < 70:
        byte = data[at]
        value |= (byte & 127) << shift
        at, shift = at + 1, shift + 7
        if byte < 128:
            return value, at
    raise ValueError("a number that does not end")
