"""A serialized ``tf.train.Example`` -> its features. Pure; protobuf is not needed.

Source: the wire format of Protocol Buffers (protobuf.dev/programming-guides/encoding), and
``tensorflow/core/example/example.proto`` and ``feature.proto``: Example{1: Features}, Features{1:
map<1: string, 2: Feature>}, Feature{1: BytesList | 2: FloatList | 3: Int64List}, each list{1:
repeated values}.
"""

from collections.abc import Collection, Iterator, Mapping

import numpy as np
from numpy.typing import NDArray

VARINT, FIXED64, BYTES, FIXED32 = 0, 1, 2, 5
WIDTHS = {FIXED64: 8, FIXED32: 4}
FEW_BYTES = 64
"""Numbers that are decoded one by one sooner than together."""
BYTES_LIST, FLOAT_LIST, INT64_LIST = 1, 2, 3

Values = list[memoryview] | NDArray[np.generic]
"""Byte strings, or float32[n] or int64[n]."""

Features = Mapping[str, Values]


_Part = tuple[int, int, memoryview]
"""A field of a message: its number, the kind of its bytes, and these."""


def read_example(data: memoryview, keys: Collection[str]) -> Features:
    """Read the features of an Example; the last one wins where a name comes twice.

    Args:
        data: The bytes of the message.
        keys: Features that are wanted; of others the values are left empty.

    Raises:
        ValueError: If the bytes are none.
    """
    features: dict[str, Values] = {}
    for message in _inner(data, 1):
        for entry in _inner(message, 1):
            name, values = "", memoryview(b"")
            for number, wire, part in _parts(entry):
                if number == 1 and wire == BYTES:
                    name = str(part, "utf-8")
                elif number == 2 and wire == BYTES:
                    values = part
            features[name] = _values(values) if name in keys else []
    return features


def _values(feature: memoryview) -> Values:
    found: Values = []
    for kind, _, data in _parts(feature):
        values = [part for number, _, part in _parts(data) if number == 1]
        if kind == BYTES_LIST:
            found = values
        elif kind == FLOAT_LIST:
            # Packed, or each by itself: the bytes are the same.
            found = np.frombuffer(b"".join(values), "<f4")
        elif kind == INT64_LIST:
            found = _varints(b"".join(values))
    return found


def _varints(data: bytes) -> NDArray[np.int64]:
    """Decode numbers of 7 bits a byte, the lowest first; the last byte of each is below 128."""
    if len(data) <= FEW_BYTES:
        numbers, at = [], 0
        while at < len(data):
            value, at = _varint(memoryview(data), at)
            numbers.append(value & (1 << 64) - 1)
        return np.array(numbers, np.uint64).view(np.int64)
    each = np.frombuffer(data, np.uint8)
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
        if part[0] == number and part[1] == BYTES:
            yield part[2]


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
        yield number, wire, data[start:at]


def _varint(data: memoryview, at: int) -> tuple[int, int]:
    if at < len(data) and data[at] < 128:
        return data[at], at + 1
    value = shift = 0
    while at < len(data) and shift < 70:
        byte = data[at]
        value |= (byte & 127) << shift
        at, shift = at + 1, shift + 7
        if byte < 128:
            return value, at
    raise ValueError("a number that does not end")
