"""Whether compressed pictures have their end: by marks and sizes alone, nothing is decoded. Pure.

Most pictures of a block are found whole by their first and last bytes, all at once; the others one
by one. What is not found whole may still decode: a decoder has the last word.
"""

import struct
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from dataio.rows.orientation import (
    JPEG_START,
    PNG_START,
    SCAN,
    TIFF_STARTS,
    TiffValues,
    find_scan,
    jpeg_segments,
    png_chunks,
    read_tiff,
)

Check = Literal["markers", "decode", "none"]
"""How pictures are looked at as they are staged; see `Staging`."""

JPEG_END = b"\xff\xd9"
PNG_END = b"\0\0\0\0IEND\xaeB`\x82"
GIF_END = b"\0;"
"""The end of the last picture's data, and the trailer."""

LEAST_BYTES = 24
"""Fewer are looked at one by one."""

# The first bytes as numbers: one comparison each. A JPEG that begins so holds no other one, such
# as a thumbnail, whose end could be taken for its own.
_PLAIN = np.uint64(int.from_bytes(b"\xff\xd8\xff\xdb", "little"))
_JFIF = np.uint64(int.from_bytes(b"\xff\xd8\xff\xe0\0\x10JF", "little"))
_TABLES = np.uint64(int.from_bytes(b"\xff\xdb", "little"))
_PNG = np.uint64(int.from_bytes(PNG_START, "little"))
_END = np.uint64(int.from_bytes(JPEG_END, "little"))
_PNG_END = np.uint64(int.from_bytes(PNG_END[4:], "little"))

STRIPS = ((273, 279), (324, 325))
"""Tags of TIFF for where strips and tiles lie, and their bytes."""


def find_suspects(data: NDArray[np.uint8], lengths: NDArray[np.int64]) -> list[int]:
    """Find the pictures that are not whole by their marks.

    Args:
        data: uint8[sum of lengths]: The compressed pictures, back to back.
        lengths: int64[num_rows]: Their bytes.

    Returns:
        Numbers of rows, ascending.
    """
    ends = np.cumsum(lengths)
    starts = ends - lengths
    suspects = np.flatnonzero(~_are_plain(data, starts, ends)).tolist()
    if not suspects:
        return []
    view = np.ascontiguousarray(data).data
    return [row for row in suspects if not is_whole(view[starts[row] : ends[row]])]


def _are_plain(
    data: NDArray[np.uint8], starts: NDArray[np.int64], ends: NDArray[np.int64]
) -> NDArray[np.bool_]:
    """Find the usual JPEG and PNG that end as they must: bool[num_rows]."""
    if len(data) < LEAST_BYTES:
        return np.zeros(len(starts), np.bool_)
    long = ends - starts >= LEAST_BYTES
    # Each byte of a block begins a number of 8 bytes, which need not be aligned.
    words = np.lib.stride_tricks.as_strided(
        data[:8].view("<u8"), (len(data) - 7,), (data.strides[0],)
    )
    first = words[np.where(long, starts, 0)]
    last = words[np.where(long, ends - 8, 0)]
    is_jpeg = last >> np.uint64(48) == _END
    has_tables = words[np.where(long, starts + 16, 0)] >> np.uint64(32) & np.uint64(0xFFFF)
    plain = first & np.uint64(0xFFFFFFFF) == _PLAIN
    plain |= (first == _JFIF) & (has_tables == _TABLES)
    found: NDArray[np.bool_] = long & ((is_jpeg & plain) | ((first == _PNG) & (last == _PNG_END)))
    return found


def is_whole(picture: memoryview) -> bool:
    """Whether a picture has the end that its marks and sizes speak of.

    False too of formats that say nothing cheaply.
    """
    head = bytes(picture[:12])
    try:
        if head[:2] == JPEG_START:
            return _is_whole_jpeg(picture)
        if head[:8] == PNG_START:
            ends = picture[-len(PNG_END) :] == PNG_END
            return ends or any(kind == b"IEND" for kind, _, _ in png_chunks(picture))
        if head[:4] == b"RIFF" and head[8:] == b"WEBP":
            return bool(struct.unpack_from("<I", head, 4)[0] + 8 <= len(picture))
        if head[:3] == b"GIF":
            return picture[-len(GIF_END) :] == GIF_END
        if head[:2] == b"BM":
            return bool(LEAST_BYTES <= struct.unpack_from("<I", head, 2)[0] <= len(picture))
        if head[:4] in TIFF_STARTS:
            return _is_whole_tiff(
                read_tiff(picture, {tag for pair in STRIPS for tag in pair}), len(picture)
            )
        if head[4:8] == b"ftyp":
            return _are_whole_boxes(picture)
    except struct.error:
        pass
    return False


def _is_whole_jpeg(picture: memoryview) -> bool:
    start = find_scan(picture)
    if start is None:
        start = next((s.start for s in jpeg_segments(picture) if s.marker == SCAN & 0xFF), None)
    if start is None:
        return False
    # Anything may stand behind the end, and no scan holds these two bytes.
    return picture[-2:] == JPEG_END or JPEG_END in bytes(picture[start:])


def _is_whole_tiff(values: TiffValues, num_bytes: int) -> bool:
    for offsets, counts in STRIPS:
        if offsets in values and len(values[offsets]) == len(values.get(counts, ())) > 0:
            return int((values[offsets] + values[counts]).max()) <= num_bytes
    return False


def _are_whole_boxes(picture: memoryview) -> bool:
    """Whether the boxes of an AVIF or HEIF end where the file does, or before."""
    place = 0
    while place + 8 <= len(picture):
        (length,) = struct.unpack_from(">I", picture, place)
        if length < 8:
            return False
        place += length
    return place <= len(picture)
