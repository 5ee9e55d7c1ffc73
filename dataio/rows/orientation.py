"""How a compressed picture lies: one answer for whoever decodes it, measures it or shows it. Pure.

Its metadata say so: an entry of EXIF, else an attribute of XMP. Where they lie is a matter of the
format; what they mean is not.

Source: Exif 2.32, section 4.6.4; TIFF 6.0, page 14 and 36, and BigTIFF; ITU-T T.81, B.1.1; PNG 3,
section 11; the WebP container; XMP part 1, 7.
"""

import re
import struct
import zlib
from collections.abc import Iterator, Mapping
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

Data = bytes | memoryview | NDArray[np.uint8]

UPRIGHT = 1
"""Of the orientations 1 to 8; from 5 on heights and widths change places."""

ORIENTATION, XMP = 274, 700
"""Tags of TIFF, and of EXIF, which is one."""

JPEG_START, PNG_START = b"\xff\xd8", b"\x89PNG\r\n\x1a\n"
TIFF_STARTS = (b"II*\0", b"MM\0*", b"II+\0", b"MM\0+")

NUMBERS = {1: "B", 3: "H", 4: "I", 5: "II", 6: "b", 8: "h", 9: "i", 10: "ii", 11: "f", 12: "d"}
NUMBERS |= {13: "I", 16: "Q", 17: "q", 18: "Q"}
"""Types of TIFF that hold numbers; 5 and 10 are fractions."""

WHOLE = ("H", "I", "Q")
"""Numbers from 0 on."""

XMP_START = b"http://ns.adobe.com/xap/1.0/\0"
SCAN, METADATA = 0xFFDA, 0xFFE1
"""Markers of a JPEG: of a scan of pixels, and of EXIF and XMP."""
_marker_and_length = struct.Struct(">HH").unpack_from

XMP_VALUE = re.compile(rb"""tiff:Orientation\s*(?:=\s*["']|>)\s*([0-9]+)""")
XMP_KEYWORD, EXIF_KEYWORD = b"XML:com.adobe.xmp", b"Raw profile type exif"
MOST_TEXT_BYTES = 1 << 24
"""What compressed metadata may unpack to."""


TiffValues = dict[int, NDArray[np.float64]]
"""Numbers of a TIFF by their tags; floating, so that no sum of two is too large."""


class JpegSegment(NamedTuple):
    """A part of a JPEG's header: its marker's second byte, and where what it holds lies."""

    marker: int
    start: int
    stop: int


class TiffEntry(NamedTuple):
    """An entry of a TIFF's first directory.

    Attributes:
        at: Where the entry lies.
        kind: Type of its values.
        values: Where these lie.
    """

    at: int
    kind: int
    values: slice


def find_orientation(data: Data, info: Mapping[str | tuple[int, int], object] | None = None) -> int:
    """Find how a picture lies: 1 (upright) to 8, as EXIF counts; 1 where nothing sound says.

    Args:
        data: The compressed picture.
        info: What Pillow knows of one that is no JPEG, PNG, WebP or TIFF.
    """
    view = data.data if isinstance(data, np.ndarray) else memoryview(data)
    if view[:2] == JPEG_START and find_scan(view, before=METADATA) is not None:
        return UPRIGHT
    by_xmp = UPRIGHT
    for kind, held in _metadata(view, info or {}):
        found = _of_exif(held) if kind == "exif" else _of_xmp(held)
        if found is None:
            continue
        value = found if 1 <= found <= 8 else UPRIGHT
        if kind == "exif":
            return value
        by_xmp = value if by_xmp == UPRIGHT else by_xmp
    return by_xmp


def find_scan(jpeg: memoryview, *, before: int = SCAN) -> int | None:
    """Find where the first scan of a tidy JPEG begins, in a microsecond: the usual case.

    None of one that is cut or untidy, or holds a segment of the marker ``before``.
    """
    place = 2
    try:
        while True:
            marker, length = _marker_and_length(jpeg, place)
            if marker == SCAN:
                return place
            if marker == before or not 0xFFC0 <= marker < 0xFFFF or 0xFFD0 <= marker < SCAN:
                return None
            place += 2 + length
    except struct.error:
        return None


def as_stored(data: Data) -> bytes:
    """Copy a picture; a TIFF without its orientation, as Pillow would follow it by itself."""
    raw = bytes(data)
    if raw[:4] not in TIFF_STARTS:
        return raw
    changed, order, entries = bytearray(raw), *_directory(memoryview(raw))
    if ORIENTATION in entries:
        form = "HHQHHHH" if raw[2] == 43 or raw[3] == 43 else "HHIHH"
        values = (ORIENTATION, 3, 1, UPRIGHT, 0, 0, 0)[: len(form)]
        struct.pack_into(f"{order}{form}", changed, entries[ORIENTATION].at, *values)
    elif XMP in entries:
        start = entries[XMP].values.start
        for found in XMP_VALUE.finditer(raw[entries[XMP].values]):
            first, last = (start + end for end in found.span(1))
            changed[first:last] = b"1".rjust(last - first, b"0")
    return bytes(changed)


def read_tiff(data: memoryview, tags: set[int]) -> TiffValues:
    """Read whole numbers of a TIFF's first directory, by their tags; none of one that is cut."""
    order, entries = _directory(data)
    found: TiffValues = {}
    if any(entry.values.stop > len(data) for entry in entries.values()):
        return found
    for tag in tags & entries.keys():
        entry = entries[tag]
        held = data[entry.values]
        form = NUMBERS.get(entry.kind, "")
        if form in WHOLE:
            numbers = np.frombuffer(held, f"{order}u{struct.calcsize(form)}")
            found[tag] = numbers.astype(np.float64)
    return found


def jpeg_segments(data: memoryview) -> Iterator[JpegSegment]:
    """Walk through a JPEG's header, and end with its first scan; or before, where it ends."""
    place, end = 2, len(data)
    while place + 4 <= end:
        marker = data[place + 1]
        if data[place] != 0xFF or marker == 0xFF:
            # Rubbish, or bytes that fill the space before a marker.
            place += 1
            continue
        if marker == 0xD9:
            return
        if marker <= 1 or 0xD0 <= marker <= 0xD8:
            place += 2
            continue
        stop = place + 2 + (data[place + 2] << 8) + data[place + 3]
        yield JpegSegment(marker, place + 4, stop)
        if marker == 0xDA:
            return
        place = stop


def png_chunks(data: memoryview) -> Iterator[tuple[bytes, int, int]]:
    """Walk through a PNG: the kind of each chunk, and where what it holds lies."""
    place = len(PNG_START)
    while place + 12 <= len(data):
        length, kind = struct.unpack_from(">I4s", data, place)
        yield kind, place + 8, place + 8 + length
        place += 12 + length


def _metadata(
    view: memoryview, info: Mapping[str | tuple[int, int], object]
) -> Iterator[tuple[str, memoryview]]:
    """Find what may say how a picture lies: "exif" or "xmp", and its bytes."""
    head = bytes(view[:12])
    if head[:2] == JPEG_START:
        for marker, start, stop in jpeg_segments(view):
            if marker == 0xE1 and bytes(view[start : start + 6]) == b"Exif\0\0":
                yield "exif", view[start:stop]
            elif marker == 0xE1 and bytes(view[start : start + len(XMP_START)]) == XMP_START:
                yield "xmp", view[start:stop]
    elif head[:8] == PNG_START:
        for kind, start, stop in png_chunks(view):
            if kind == b"eXIf":
                yield "exif", view[start:stop]
            elif kind in (b"tEXt", b"zTXt", b"iTXt"):
                yield from _png_text(kind, bytes(view[start:stop]))
    elif head[:4] == b"RIFF" and head[8:] == b"WEBP":
        place = 12
        while place + 8 <= len(view):
            kind, length = struct.unpack_from("<4sI", view, place)
            if kind in (b"EXIF", b"XMP "):
                yield kind.decode().strip().lower(), view[place + 8 : place + 8 + length]
            place += 8 + length + length % 2
    elif head[:4] in TIFF_STARTS:
        yield "exif", view
        _, entries = _directory(view)
        if XMP in entries:
            yield "xmp", view[entries[XMP].values]
    else:
        for name in ("exif", "xmp"):
            held = info.get(name)
            if isinstance(held, bytes):
                yield name, memoryview(held)


def _png_text(kind: bytes, chunk: bytes) -> Iterator[tuple[str, memoryview]]:
    keyword, _, rest = chunk.partition(b"\0")
    if keyword not in (XMP_KEYWORD, EXIF_KEYWORD):
        return
    packed = kind == b"zTXt"
    if kind == b"zTXt":
        rest = rest[1:]
    elif kind == b"iTXt":
        packed = rest[:1] == b"\1"
        # Language, and the keyword in it.
        rest = [*rest[2:].split(b"\0", 2), b"", b""][2]
    try:
        if packed:
            rest = zlib.decompressobj().decompress(rest, MOST_TEXT_BYTES)
        if keyword == EXIF_KEYWORD:
            rest = bytes.fromhex("".join(rest.decode("latin-1").split("\n")[3:]))
    except (zlib.error, ValueError):
        return
    yield "xmp" if keyword == XMP_KEYWORD else "exif", memoryview(rest)


def _of_xmp(held: memoryview) -> int | None:
    found = XMP_VALUE.search(held)
    return int(found[1]) if found is not None else None


def _of_exif(held: memoryview) -> int | None:
    """Read the orientation of a TIFF, or of EXIF; None where there is none that is sound."""
    if bytes(held[:6]) == b"Exif\0\0":
        held = held[6:]
    order, entries = _directory(held)
    entry = entries.get(ORIENTATION)
    if entry is None or entry.kind not in NUMBERS:
        return None
    try:
        number, *parts = struct.unpack_from(f"{order}{NUMBERS[entry.kind]}", held[entry.values])
        return int(number / parts[0] if parts else number)
    except (struct.error, ZeroDivisionError, ValueError, OverflowError):
        return None


def _directory(tiff: memoryview) -> tuple[str, dict[int, TiffEntry]]:
    """Read a TIFF's byte order, and the first entry of each tag in its first directory."""
    order = "<" if bytes(tiff[:2]) == b"II" else ">"
    entries: dict[int, TiffEntry] = {}
    try:
        is_big = struct.unpack_from(f"{order}H", tiff, 2) == (43,)
        counts, offset, width = ("Q", "Q", 20) if is_big else ("H", "I", 12)
        (first,) = struct.unpack_from(f"{order}{offset}", tiff, 8 if is_big else 4)
        (count,) = struct.unpack_from(f"{order}{counts}", tiff, first)
        first += struct.calcsize(f"{order}{counts}")
        for at in range(first, min(first + width * count, len(tiff)), width):
            tag, kind, length = struct.unpack_from(f"{order}HH{offset}", tiff, at)
            inline = at + 4 + struct.calcsize(offset)
            num_bytes = length * struct.calcsize(f"{order}{NUMBERS.get(kind, 'B')}")
            place = inline
            if num_bytes > at + width - inline:
                (place,) = struct.unpack_from(f"{order}{offset}", tiff, inline)
            entries.setdefault(tag, TiffEntry(at, kind, slice(place, place + num_bytes)))
    except struct.error:
        pass
    return order, entries
