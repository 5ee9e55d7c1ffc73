"""However a picture says how it lies, and whoever reads it, all see it alike: a table."""

import io
import struct
import zlib
from collections.abc import Callable
from functools import cache

import numpy as np
import pytest
from PIL import Image as Pillow

from dataio.rows import jpeg
from dataio.rows.decode import decode_image
from dataio.rows.image import Image, ImageSize, Mask
from dataio.rows.orientation import find_orientation
from dataio.rows.views import CenterCrop, Resize
from dataio.source.wrap.transformed import _decoded
from tonari.hardest.duplicates import shrink
from tonari.hardest.picture import _thumbnail

Pixels = np.ndarray

HEIGHT, WIDTH = 32, 48
QUADRANTS = ((30, 90), (150, 210))
"""Grey values as the picture is seen: top left, top right, bottom left, bottom right."""

SIDES = {
    1: ("top", "left"), 2: ("top", "right"), 3: ("bottom", "right"), 4: ("bottom", "left"),
    5: ("left", "top"), 6: ("right", "top"), 7: ("right", "bottom"), 8: ("left", "bottom"),
}  # fmt: skip
"""Sides of the picture as it is seen that the first stored row and column are: Exif 2.32, 4.6.4."""


def seen() -> Pixels:
    return np.kron(np.array(QUADRANTS, np.uint8), np.ones((HEIGHT // 2, WIDTH // 2), np.uint8))


def stored(orientation: int) -> Pixels:
    """The pixels in the file, by the words of the standard, pixel by pixel."""
    row_side, column_side = SIDES[orientation]
    on_side = row_side in ("left", "right")
    pixels = np.empty((WIDTH, HEIGHT) if on_side else (HEIGHT, WIDTH), np.uint8)
    picture = seen()
    for row in range(pixels.shape[0]):
        for column in range(pixels.shape[1]):
            at = {row_side: row, column_side: column}
            y = at["top"] if "top" in at else HEIGHT - 1 - at["bottom"]
            x = at["left"] if "left" in at else WIDTH - 1 - at["right"]
            pixels[row, column] = picture[y, x]
    return pixels


# ---------------------------------------------------------------------------- ways to say it

NUMBERS = {
    "BYTE": (1, "B"), "SHORT": (3, "H"), "LONG": (4, "I"), "RATIONAL": (5, "II"), "SBYTE": (6, "b"),
    "SSHORT": (8, "h"), "SLONG": (9, "i"), "FLOAT": (11, "f"), "DOUBLE": (12, "d"),
}  # fmt: skip


def exif(orientation: int, kind: str = "SHORT", order: str = "<") -> bytes:
    """A TIFF header and a directory of three entries, the orientation in the middle."""
    code, form = NUMBERS[kind]
    value = struct.pack(order + form, *[orientation, 1][: len(form)])
    head = struct.pack(f"{order}2sHI", b"II" if order == "<" else b"MM", 42, 8)
    at_end = 8 + 2 + 3 * 12 + 4
    inline = value.ljust(4, b"\0") if len(value) <= 4 else struct.pack(f"{order}I", at_end)
    entries = (
        struct.pack(f"{order}HHI4s", 271, 2, 3, b"me\0\0")
        + struct.pack(f"{order}HHI", 274, code, 1) + inline
        + struct.pack(f"{order}HHI", 296, 3, 1) + struct.pack(f"{order}HH", 2, 0)
    )  # fmt: skip
    return head + struct.pack(f"{order}H", 3) + entries + bytes(4) + value * (len(value) > 4)


def xmp(orientation: int, *, element: bool = False) -> bytes:
    said = f'tiff:Orientation="{orientation}"'
    if element:
        said, inner = "", f"<tiff:Orientation>{orientation}</tiff:Orientation>"
    else:
        inner = ""
    return (
        '<x:xmpmeta xmlns:x="adobe:ns:meta/"><rdf:RDF><rdf:Description '
        f'xmlns:tiff="http://ns.adobe.com/tiff/1.0/" {said}>{inner}</rdf:Description>'
        "</rdf:RDF></x:xmpmeta>"
    ).encode()


def saved(pixels: Pixels, form: str, **options: object) -> bytes:
    file = io.BytesIO()
    Pillow.fromarray(pixels).save(file, form, **options)
    return file.getvalue()


def app1(held: bytes) -> bytes:
    return b"\xff\xe1" + struct.pack(">H", len(held) + 2) + held


EXIF_START, XMP_START = b"Exif\0\0", b"http://ns.adobe.com/xap/1.0/\0"


def in_jpeg(
    *held: Callable[..., bytes], rgb: bool = False, where: str = "first", **options: object
):
    """Segments put first, behind JFIF, or just before the first scan."""

    def make(orientation: int) -> bytes:
        pixels = stored(orientation)
        pixels = np.stack([pixels] * 3, 2) if rgb else pixels
        data = saved(pixels, "JPEG", quality=95, **options)
        at = {"first": 2, "behind JFIF": 20, "before the scan": data.index(b"\xff\xda")}[where]
        return data[:at] + b"".join(app1(one(orientation)) for one in held) + data[at:]

    return make


def chunk(kind: bytes, held: bytes) -> bytes:
    return struct.pack(">I4s", len(held), kind) + held + struct.pack(">I", zlib.crc32(kind + held))


def in_png(make_chunk: Callable[[int], bytes], *, late: bool = False):
    def make(orientation: int) -> bytes:
        data = saved(stored(orientation), "PNG")
        at = len(data) - 12 if late else 33
        return data[:at] + make_chunk(orientation) + data[at:]

    return make


def raw_profile(orientation: int) -> bytes:
    held = EXIF_START + exif(orientation)
    text = f"\nexif\n{len(held):8}\n{held.hex()}\n".encode()
    return chunk(b"zTXt", b"Raw profile type exif\0\0" + zlib.compress(text))


def in_webp(kind: bytes, held: Callable[[int], bytes]):
    """By hand: a WebP of the extended form with one chunk behind the picture."""

    def make(orientation: int) -> bytes:
        pixels = stored(orientation)
        plain = saved(np.stack([pixels] * 3, 2), "WEBP", lossless=True)[12:]
        flags = {b"EXIF": 8, b"XMP ": 4}[kind]
        size = (
            struct.pack("<I", pixels.shape[1] - 1)[:3] + struct.pack("<I", pixels.shape[0] - 1)[:3]
        )
        body = held(orientation)
        parts = b"VP8X" + struct.pack("<IB3x", 10, flags) + size + plain
        parts += kind + struct.pack("<I", len(body)) + body + b"\0" * (len(body) % 2)
        return b"RIFF" + struct.pack("<I", len(parts) + 4) + b"WEBP" + parts

    return make


def in_tiff(kind: str = "SHORT", order: str = "<", *, by_xmp: bool = False, big: bool = False):
    """A gray TIFF by hand: one strip, behind the directory."""

    def make(orientation: int) -> bytes:
        pixels = stored(orientation)
        held = xmp(orientation)
        code, form = NUMBERS[kind]
        said = (
            (700, 1, "B" * len(held), tuple(held)) if by_xmp else (274, code, form, (orientation,))
        )
        count_form, width = ("Q", 20) if big else ("I", 12)
        strip = 8 * (1 + big) + 2 + 6 * big + 10 * width + 4 + 4 * big
        entries = [
            (256, 3, "H", (pixels.shape[1],)), (257, 3, "H", (pixels.shape[0],)),
            (258, 3, "H", (8,)), (259, 3, "H", (1,)), (262, 3, "H", (1,)), (273, 4, "I", (strip,)),
            (277, 3, "H", (1,)), (278, 3, "H", (pixels.shape[0],)),
            (279, 4, "I", (pixels.size,)), said,
        ]  # fmt: skip
        mark = b"II" if order == "<" else b"MM"
        head = (
            struct.pack(f"{order}2sHHHQ", mark, 43, 8, 0, 16) + struct.pack(f"{order}Q", 10)
            if big
            else struct.pack(f"{order}2sHI", mark, 42, 8) + struct.pack(f"{order}H", 10)
        )
        behind = b""
        for tag, type_code, numbers, values in sorted(entries):
            value = struct.pack(order + numbers, *values)
            if len(value) > width - 8 - 4 * big:
                at = strip + pixels.size + len(behind)
                behind += value
                value = struct.pack(order + count_form, at)
            count = len(numbers)
            head += struct.pack(f"{order}HH{count_form}", tag, type_code, count)
            head += value.ljust(width - 8 - 4 * big, b"\0")
        return head + bytes(4 + 4 * big) + pixels.tobytes() + behind

    return make


def by_pillow(form: str, **options: object):
    def make(orientation: int) -> bytes:
        info = {"tiffinfo": {274: orientation}} if form == "TIFF" else {"exif": exif(orientation)}
        return saved(stored(orientation), form, **info, **options)

    return make


def in_mpo(orientation: int) -> bytes:
    other = Pillow.fromarray(255 - stored(orientation))
    return saved(
        stored(orientation), "MPO", quality=95, exif=EXIF_START + exif(orientation),
        save_all=True, append_images=[other],
    )  # fmt: skip


WAYS: dict[str, Callable[[int], bytes]] = {
    **{
        f"JPEG, EXIF {kind} {order}": in_jpeg(lambda o, k=kind, b=order: EXIF_START + exif(o, k, b))
        for kind in NUMBERS
        for order in "<>"
    },
    "JPEG of colours, EXIF": in_jpeg(lambda o: EXIF_START + exif(o), rgb=True),
    "progressive JPEG, EXIF": in_jpeg(lambda o: EXIF_START + exif(o), rgb=True, progressive=True),
    "JPEG, EXIF behind JFIF": in_jpeg(lambda o: EXIF_START + exif(o), where="behind JFIF"),
    "JPEG, EXIF before its scan": in_jpeg(lambda o: EXIF_START + exif(o), where="before the scan"),
    "JPEG, XMP": in_jpeg(lambda o: XMP_START + xmp(o)),
    "JPEG, XMP before its scan": in_jpeg(lambda o: XMP_START + xmp(o), where="before the scan"),
    "JPEG, XMP element": in_jpeg(lambda o: XMP_START + xmp(o, element=True), rgb=True),
    "JPEG, another in XMP than in EXIF": in_jpeg(
        lambda o: XMP_START + xmp(9 - o), lambda o: EXIF_START + exif(o)
    ),
    "JPEG, XMP beside EXIF without": in_jpeg(
        lambda o: EXIF_START + exif(o).replace(struct.pack("<H", 274), struct.pack("<H", 275)),
        lambda o: XMP_START + xmp(o),
    ),
    "MPO, EXIF": in_mpo,
    "PNG, eXIf": in_png(lambda o: chunk(b"eXIf", exif(o))),
    "PNG, eXIf >": in_png(lambda o: chunk(b"eXIf", exif(o, order=">"))),
    "PNG, eXIf with a prefix": in_png(lambda o: chunk(b"eXIf", EXIF_START + exif(o))),
    "PNG, eXIf behind its pixels": in_png(lambda o: chunk(b"eXIf", exif(o)), late=True),
    "PNG, XMP": in_png(lambda o: chunk(b"iTXt", b"XML:com.adobe.xmp\0\0\0\0\0" + xmp(o))),
    "PNG, compressed XMP": in_png(
        lambda o: chunk(b"iTXt", b"XML:com.adobe.xmp\0\1\0\0\0" + zlib.compress(xmp(o)))
    ),
    "PNG, XMP behind its pixels": in_png(
        lambda o: chunk(b"iTXt", b"XML:com.adobe.xmp\0\0\0\0\0" + xmp(o, element=True)), late=True
    ),
    "PNG, raw profile": in_png(raw_profile),
    "WebP, EXIF": in_webp(b"EXIF", exif),
    "WebP, EXIF with a prefix": in_webp(b"EXIF", lambda o: EXIF_START + exif(o, order=">")),
    "WebP, XMP": in_webp(b"XMP ", xmp),
    **{
        f"TIFF, {kind} {order}": in_tiff(kind, order)
        for kind in ("BYTE", "SHORT", "LONG")
        for order in "<>"
    },
    "TIFF, XMP": in_tiff(by_xmp=True),
    "TIFF, XMP >": in_tiff(by_xmp=True, order=">"),
    "BigTIFF": in_tiff(big=True),
    "TIFF, LZW": by_pillow("TIFF", compression="tiff_lzw"),
    "TIFF, deflate": by_pillow("TIFF", compression="tiff_adobe_deflate"),
}

# ---------------------------------------------------------------------------- who reads it


def decoded(data: bytes, how: Image | Mask, size: tuple[int, int]) -> Pixels:
    out = np.zeros((*size, how.channels), np.uint8)
    decode_image(memoryview(data), out, how, where="here")
    return out


def quadrants(pixels: Pixels) -> list[int]:
    """The grey values that lie around the middle, and so in the corners of every crop of it."""
    plane = pixels[..., 0] if pixels.ndim == 3 else pixels
    up, left = plane.shape[0] // 4, plane.shape[1] // 4
    points = [plane[y, x] for y in (up, -1 - up) for x in (left, -1 - left)]
    values = np.array(QUADRANTS).ravel()
    return [int(values[np.abs(values - int(point)).argmin()]) for point in points]


def size_of(data: bytes, upright: bool) -> list[int]:
    sizes = np.frombuffer(ImageSize("x", upright=upright).encode(data, "here"), "<i8")
    return [int(side) for side in sizes]


def staged(data: bytes, how: Image) -> Pixels:
    kept = Image("x", resize=Resize((8, 12)), decoded=True, channels=1, upright=how.upright)
    return np.frombuffer(kept.encode(data, "here"), np.uint8).reshape(8, 12, 1)


SEEN = [value for line in QUADRANTS for value in line]


def expected(orientation: int, upright: bool) -> tuple[list[int], tuple[int, int]]:
    pixels = seen() if upright else stored(orientation)
    return quadrants(pixels), (pixels.shape[0], pixels.shape[1])


def as_image(data: bytes, orientation: int, upright: bool) -> bool:
    values, size = expected(orientation, upright)
    return quadrants(decoded(data, Image("x", upright=upright), size)) == values


def in_gray(data: bytes, orientation: int, upright: bool) -> bool:
    values, size = expected(orientation, upright)
    return quadrants(decoded(data, Image("x", channels=1, upright=upright), size)) == values


def as_crop(data: bytes, orientation: int, upright: bool) -> bool:
    values, _ = expected(orientation, upright)
    how = Image("x", crop=CenterCrop((8, 12)), upright=upright)
    return quadrants(decoded(data, how, (8, 12))) == values


def as_resized(data: bytes, orientation: int, upright: bool) -> bool:
    values, _ = expected(orientation, upright)
    how = Image("x", resize=Resize((8, 12)), upright=upright)
    return quadrants(decoded(data, how, (8, 12))) == values


def as_size(data: bytes, orientation: int, upright: bool) -> bool:
    return size_of(data, upright) == list(expected(orientation, upright)[1])


def while_staging(data: bytes, orientation: int, upright: bool) -> bool:
    values, _ = expected(orientation, upright)
    return quadrants(staged(data, Image("x", upright=upright))) == values


def for_a_stage_transform(data: bytes, orientation: int, upright: bool) -> bool:
    values, size = expected(orientation, upright)
    pixels = _decoded(Image("x", upright=upright), np.frombuffer(data, np.uint8), "here")
    return (
        isinstance(pixels, np.ndarray) and pixels.shape[:2] == size and quadrants(pixels) == values
    )


def on_a_page(data: bytes, orientation: int, upright: bool) -> bool:
    shown = _thumbnail(data)
    return shown is not None and (shown.width > shown.height, quadrants(np.asarray(shown))) == (
        True, SEEN,
    )  # fmt: skip


def among_duplicates(data: bytes, orientation: int, upright: bool) -> bool:
    return quadrants(shrink([data])[0]) == SEEN


READERS: dict[str, Callable[[bytes, int, bool], bool]] = {
    "Image": as_image, "gray": in_gray, "crop": as_crop, "resize": as_resized, "size": as_size,
    "decoded": while_staging, "stage transform": for_a_stage_transform,
}  # fmt: skip
SHOWN = {"hardest": on_a_page, "duplicates": among_duplicates}

CELLS = [
    *((name, reader, upright) for name, reader in READERS.items() for upright in (True, False)),
    *((name, reader, True) for name, reader in SHOWN.items()),
]


@cache
def made(way: str, orientation: int) -> bytes:
    return WAYS[way](orientation)


@pytest.mark.parametrize("way", WAYS)
def test_every_reader_sees_a_picture_as_it_lies(way: str) -> None:
    wrong = [
        (name, upright, orientation)
        for orientation in range(1, 9)
        for name, reader, upright in CELLS
        if not reader(made(way, orientation), orientation, upright)
    ]
    assert not wrong


def test_the_table_is_whole() -> None:
    assert len(WAYS) * 8 * len(CELLS) == 50 * 8 * 16 == 6400


@pytest.mark.parametrize("way", [way for way in WAYS if "JPEG" in way or "MPO" in way])
def test_without_the_library_a_jpeg_lies_the_same(way: str, monkeypatch) -> None:
    monkeypatch.setattr(jpeg, "turbojpeg", lambda: None)
    monkeypatch.setattr(jpeg, "_THREAD", type(jpeg._THREAD)())
    for orientation in range(1, 9):
        assert as_crop(made(way, orientation), orientation, True)
        assert as_crop(made(way, orientation), orientation, False)


@pytest.mark.parametrize("way", ["PNG, eXIf", "PNG, XMP", "TIFF, SHORT <", "TIFF, XMP", "BigTIFF"])
def test_a_mask_lies_as_its_image(way: str) -> None:
    for orientation in range(1, 9):
        data = made(way, orientation)
        assert (decoded(data, Mask("x"), (HEIGHT, WIDTH))[..., 0] == seen()).all()
        plain = stored(orientation)
        assert (decoded(data, Mask("x", upright=False), plain.shape)[..., 0] == plain).all()


@pytest.mark.parametrize("value", [0, 9, 255])
def test_an_orientation_that_there_is_not_is_upright(value: int) -> None:
    for data in (
        b"\xff\xd8" + app1(EXIF_START + exif(value)) + saved(seen(), "JPEG")[2:],
        in_png(lambda _: chunk(b"eXIf", exif(value)))(1),
        in_png(lambda _: chunk(b"iTXt", b"XML:com.adobe.xmp\0\0\0\0\0" + xmp(value)))(1),
    ):
        assert find_orientation(data) == 1
        assert as_image(data, 1, True)


def test_damaged_metadata_are_no_error() -> None:
    for way in WAYS:
        data = made(way, 6)
        for place in range(0, len(data), 7):
            torn = data[:place] + bytes([data[place] ^ 0xFF]) + data[place + 1 :]
            assert 1 <= find_orientation(torn) <= 8
            assert 1 <= find_orientation(data[:place]) <= 8
