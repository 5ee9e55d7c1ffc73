"""Pictures of every kind are delivered right and close to Pillow's crops, or refused clearly."""

import io
import math
import os
import struct
import subprocess
import sys
import zlib

import numpy as np
import pytest
from PIL import Image as Pillow

from dataio.base.errors import FieldError
from dataio.base.seeding import key, uniform
from dataio.rows.decode import decode_image, image_shape
from dataio.rows.image import Image, ImageSize, Mask
from dataio.rows.orientation import find_orientation
from dataio.rows.views import (
    MIDDLE,
    NUM_DRAWS,
    CenterCrop,
    Pad,
    RandomCrop,
    RandomResizedCrop,
    Resize,
    ResizeLong,
    ResizeShort,
)
from tests.multirank import ROOT

BILINEAR = Pillow.Resampling.BILINEAR


def photo(height: int, width: int, seed: int = 0) -> Pillow.Image:
    """A picture with detail at all scales, as photographs have."""
    rng = np.random.default_rng(seed)
    total = np.zeros((height, width, 3))
    for octave in range(1, 9):
        side = 2**octave
        small = rng.standard_normal((side * height // 512 + 2, side * width // 512 + 2))
        grown = Pillow.fromarray(small.astype(np.float32)).resize((width, height), BILINEAR)
        tint = 0.8 + 0.2 * rng.random(3)
        total += np.asarray(grown)[:, :, None] * tint * 1.6**-octave
    scaled = (total - total.mean()) / total.std() * 50 + 128
    return Pillow.fromarray(scaled.clip(0, 255).astype(np.uint8))


def encoded(image: Pillow.Image, form: str = "JPEG", **options: object) -> bytes:
    file = io.BytesIO()
    image.save(file, form, **options)
    return file.getvalue()


def delivered(data: bytes, how: Image | Mask, draws: list[float] = MIDDLE) -> np.ndarray:
    size = how.out if how.out is not None else image_shape(memoryview(data), upright=how.upright)
    out = np.full((*size, how.channels), 77, np.uint8)
    decode_image(memoryview(data), out, how, draws, where="sample 7, field 'image'")
    return out


def psnr(found: np.ndarray, expected: np.ndarray) -> float:
    error = ((found.astype(float) - expected) ** 2).mean()
    return 10 * math.log10(255**2 / error) if error else math.inf


@pytest.mark.parametrize("size", [(400, 500), (500, 333), (300, 240)])
def test_a_random_crop_is_the_one_that_pillow_makes(size: tuple[int, int]) -> None:
    data = encoded(photo(*size), quality=90)
    whole = Pillow.open(io.BytesIO(data)).convert("RGB")
    crop = RandomResizedCrop(224)
    for draws in uniform(key(0, "test"), np.arange(20), NUM_DRAWS).tolist():
        top, left, height, width = crop.box(size, draws)
        expected = np.asarray(
            whole.crop((left, top, left + width, top + height)).resize((224, 224), BILINEAR)
        )
        plain = delivered(data, Image("jpg", crop=crop), draws)
        # Both round weights of 8 bits; nothing else differs.
        assert np.abs(plain.astype(int) - expected).max() <= 1
        flipped = delivered(data, Image("jpg", crop=crop, flip=1.0), draws)
        assert (flipped == plain[:, ::-1]).all()


def test_a_scaled_crop_of_a_large_picture_is_close_to_pillows() -> None:
    data = encoded(photo(1200, 1600), quality=90)
    whole = Pillow.open(io.BytesIO(data)).convert("RGB")
    crop = RandomResizedCrop(224)
    found = []
    for draws in uniform(key(0, "test"), np.arange(20), NUM_DRAWS).tolist():
        top, left, height, width = crop.box((1200, 1600), draws)
        box = (left, top, left + width, top + height)
        expected = np.asarray(whole.crop(box).resize((224, 224), BILINEAR))
        found.append(psnr(delivered(data, Image("jpg", crop=crop), draws), expected))
    assert min(found) > 30
    assert np.median(found) > 36


@pytest.mark.parametrize("size", [(400, 500), (500, 400), (256, 256), (1200, 1600)])
def test_the_evaluation_crop_is_close_to_pillows(size: tuple[int, int]) -> None:
    data = encoded(photo(*size), quality=90)
    resized = ResizeShort(256).resized(size)
    picture = Pillow.open(io.BytesIO(data)).convert("RGB").resize(resized[::-1], BILINEAR)
    top, left = round((resized[0] - 224) / 2), round((resized[1] - 224) / 2)
    expected = np.asarray(picture)[top : top + 224, left : left + 224]
    found = delivered(data, Image("jpg", resize=ResizeShort(256), crop=CenterCrop(224)))
    assert psnr(found, expected) > (36 if min(size) >= 512 else 50)


@pytest.mark.parametrize("form", ["JPEG", "PNG", "WEBP"])
def test_every_format_is_cropped_alike(form: str) -> None:
    picture = photo(300, 400)
    data = encoded(picture, form, **({} if form == "PNG" else {"quality": 95}))
    pixels = np.asarray(Pillow.open(io.BytesIO(data)).convert("RGB"))
    draws = uniform(key(0, "test"), np.array([4]), NUM_DRAWS)[0].tolist()
    for how in (
        Image("x", crop=CenterCrop((100, 120))),
        Image("x", crop=RandomResizedCrop(160), flip=1.0),
        Image("x", crop=RandomCrop(290, padding=8)),
        Image("x", resize=ResizeLong(256), crop=Pad(256), fill=9),
        Image("x", resize=Resize((200, 250)), crop=RandomCrop(32)),
    ):
        found = delivered(data, how, draws)
        assert (found == delivered(encoded(Pillow.fromarray(pixels), "PNG"), how, draws)).all()


def test_what_lies_beyond_the_picture_is_filled() -> None:
    picture = photo(20, 30)
    pixels = np.asarray(picture)
    padded = delivered(encoded(picture, "PNG"), Image("png", crop=Pad((24, 40)), fill=9))
    assert (padded[2:22, 5:35] == pixels).all()
    padded[2:22, 5:35] = 9
    assert (padded == 9).all()
    corner = RandomCrop(20, padding=4).box((20, 30), [0.0] * NUM_DRAWS)
    assert corner[:2] == (-4, -4)
    cut = delivered(encoded(picture, "PNG"), Image("png", crop=RandomCrop(20, padding=4)),
                    [0.0] * NUM_DRAWS)  # fmt: skip
    assert (cut[4:, 4:] == pixels[:16, :16]).all()
    assert (cut[:4] == 0).all()
    assert (cut[:, :4] == 0).all()


@pytest.mark.parametrize("orientation", range(1, 9))
@pytest.mark.parametrize("form", ["JPEG", "PNG", "WEBP"])
def test_a_turned_picture_is_delivered_upright(orientation: int, form: str) -> None:
    picture = photo(40, 60)
    exif = Pillow.Exif()
    exif[0x0112] = orientation
    exif[0x010F] = "maker"
    data = encoded(picture, form, exif=exif)
    with Pillow.open(io.BytesIO(data)) as stored:
        from PIL import ImageOps

        expected = np.asarray(ImageOps.exif_transpose(stored).convert("RGB"))
        as_stored = np.asarray(stored.convert("RGB"))
    assert (delivered(data, Image("x")) == expected).all()
    assert (delivered(data, Image("x", upright=False)) == as_stored).all()
    assert image_shape(memoryview(data)) == expected.shape[:2]
    assert image_shape(memoryview(data), upright=False) == (40, 60)
    sizes = np.frombuffer(ImageSize("x").encode(data, "here"), "<i8")
    assert tuple(sizes) == expected.shape[:2]
    if form == "JPEG":
        assert find_orientation(memoryview(data)) == orientation


def filled(data: bytes, num_bytes: int) -> bytes:
    """Put bytes 0xFF before every segment of a JPEG, as its standard allows."""
    place, parts = 2, [data[:2]]
    while data[place + 1] != 0xDA:
        stop = place + 2 + int.from_bytes(data[place + 2 : place + 4], "big")
        parts += [b"\xff" * num_bytes, data[place:stop]]
        place = stop
    return b"".join([*parts, b"\xff" * num_bytes, data[place:]])


@pytest.mark.parametrize("num_bytes", [1, 2, 3, 1000])
def test_a_jpeg_whose_segments_have_filled_space_before_them_is_turned_too(num_bytes: int) -> None:
    exif = Pillow.Exif()
    exif[0x0112] = 6
    data = encoded(photo(40, 60), exif=exif)
    with_space = filled(data, num_bytes)
    assert len(with_space) > len(data) + 5 * num_bytes
    assert find_orientation(memoryview(with_space)) == 6
    assert image_shape(memoryview(with_space)) == (60, 40)
    assert (delivered(with_space, Image("x")) == delivered(data, Image("x"))).all()
    assert find_orientation(memoryview(data[:2] + b"\xff" * 10)) == 1


def test_a_jpeg_with_damaged_exif_is_taken_as_upright() -> None:
    exif = Pillow.Exif()
    exif[0x0112] = 6
    data = bytearray(encoded(photo(40, 60), exif=exif))
    for place in range(20, 60):
        torn = bytearray(data)
        torn[place] ^= 0xFF
        assert 1 <= find_orientation(memoryview(bytes(torn))) <= 8
    assert find_orientation(memoryview(b"\xff\xd8\xff\xe1")) == 1
    assert find_orientation(memoryview(b"\xff\xd8\xff\xe1\x00\x08Exif\0\0")) == 1


def test_deep_and_unusual_pictures() -> None:
    deep = (np.arange(20 * 30, dtype=np.uint32).reshape(20, 30) * 109).astype(np.uint16)
    data = encoded(Pillow.fromarray(deep), "PNG")
    assert (delivered(data, Image("png", channels=1))[..., 0] == deep >> 8).all()
    assert (delivered(data, Image("png"))[..., 2] == deep >> 8).all()
    cmyk = photo(30, 40).convert("CMYK")
    expected = np.asarray(Pillow.open(io.BytesIO(encoded(cmyk))).convert("RGB"))
    assert (delivered(encoded(cmyk), Image("jpg")) == expected).all()
    assert (
        delivered(encoded(cmyk), Image("jpg", crop=CenterCrop(20))) == expected[5:25, 10:30]
    ).all()
    for mode in ("L", "LA", "P", "1", "RGBA"):
        other = photo(20, 30).convert(mode)
        rgb = np.asarray(Pillow.open(io.BytesIO(encoded(other, "PNG"))).convert("RGB"))
        assert (delivered(encoded(other, "PNG"), Image("png")) == rgb).all()
    floats = encoded(Pillow.fromarray(np.zeros((4, 4), np.float32)), "TIFF")
    with pytest.raises(FieldError, match=r"^sample 7, .* floating numbers, .*declare Array"):
        delivered(floats, Image("tiff"))


def test_a_mask_keeps_its_class_numbers() -> None:
    classes = np.random.default_rng(0).integers(0, 21, (60, 80), np.uint8)
    indexed = Pillow.fromarray(classes)
    indexed.putpalette(np.random.default_rng(1).integers(0, 256, 768, np.uint8).tobytes())
    for data in (encoded(Pillow.fromarray(classes), "PNG"), encoded(indexed, "PNG")):
        assert (delivered(data, Mask("png"))[..., 0] == classes).all()
        how = Mask("png", crop=RandomResizedCrop(32), flip=1.0)
        draws = uniform(key(0, "test"), np.array([1]), NUM_DRAWS)[0].tolist()
        top, left, height, width = RandomResizedCrop(32).box((60, 80), draws)
        expected = Pillow.fromarray(classes[top : top + height, left : left + width]).resize(
            (32, 32), Pillow.Resampling.NEAREST
        )
        assert (delivered(data, how, draws)[..., 0] == np.asarray(expected)[:, ::-1]).all()
        padded = delivered(data, Mask("png", crop=Pad(100)))[..., 0]
        assert (padded[20:80, 10:90] == classes).all()
        assert (padded == 255).sum() == 100 * 100 - 60 * 80
    with pytest.raises(FieldError, match=r"holds colours \(RGB\), expected one class number"):
        delivered(encoded(photo(8, 8), "PNG"), Mask("png"))
    wide = encoded(Pillow.fromarray(np.full((4, 4), 300, np.uint16)), "PNG")
    with pytest.raises(FieldError, match="numbers from 300 to 300, expected at most 255"):
        delivered(wide, Mask("png"))


NUMBERS = np.array([[0, 1, 2, 3], [3, 2, 1, 0]], np.uint8)


def packed(bits: int) -> bytes:
    ones = (NUMBERS[..., None] >> np.arange(bits - 1, -1, -1)) & 1
    return b"".join(np.packbits(row).tobytes() for row in ones.reshape(len(NUMBERS), -1))


def gray_png(bits: int) -> bytes:
    def chunk(kind: bytes, data: bytes) -> bytes:
        return (
            struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))
        )

    lines = packed(bits)
    width = len(lines) // 2
    stored = zlib.compress(b"\0" + lines[:width] + b"\0" + lines[width:])
    header = struct.pack(">IIBBBBB", 4, 2, bits, 0, 0, 0, 0)
    parts = chunk(b"IHDR", header) + chunk(b"IDAT", stored) + chunk(b"IEND", b"")
    return b"\x89PNG\r\n\x1a\n" + parts


def gray_tiff(bits: int, *, zero_is_black: bool = True) -> bytes:
    raw = packed(bits)
    entries = (
        (256, 4), (257, 2), (258, bits), (259, 1), (262, int(zero_is_black)), (273, 8), (277, 1),
        (278, 2), (279, len(raw)),
    )  # fmt: skip
    directory = b"".join(struct.pack("<HHIHH", tag, 3, 1, value, 0) for tag, value in entries)
    head = b"II*\0" + struct.pack("<I", 8 + len(raw)) + raw
    return head + struct.pack("<H", len(entries)) + directory + bytes(4)


def pgm(most: int) -> bytes:
    kind = np.dtype(">u2" if most > 255 else "u1")
    return b"P5 4 2 %d\n" % most + NUMBERS.astype(kind).tobytes()


@pytest.mark.parametrize(
    "data",
    [
        *map(gray_png, (2, 4, 8)), *map(gray_tiff, (2, 4, 8)),
        *map(pgm, (3, 15, 100, 254, 255, 300, 65535)), b"P2 4 2 3\n0 1 2 3 3 2 1 0\n",
    ],
)  # fmt: skip
def test_class_numbers_of_few_bits_are_not_stretched(data: bytes) -> None:
    assert (delivered(data, Mask("x"))[..., 0] == NUMBERS).all()
    assert set(np.unique(delivered(data, Mask("x", resize=Resize(5))))) <= {0, 1, 2, 3}


def test_class_numbers_that_a_file_turns_around_are_refused() -> None:
    for bits in (2, 4, 8):
        with pytest.raises(FieldError, match=r"^sample 7, .*says that 0 is white.*; write the"):
            delivered(gray_tiff(bits, zero_is_black=False), Mask("x"))


def test_class_numbers_of_one_bit_are_0_and_1() -> None:
    ones = np.eye(9, dtype=bool)
    for form in ("PNG", "TIFF"):
        assert (delivered(encoded(Pillow.fromarray(ones), form), Mask("x"))[..., 0] == ones).all()


def test_a_mask_is_cut_where_its_image_is() -> None:
    column = np.tile(np.arange(200, dtype=np.uint8), (150, 1))
    image, mask = encoded(Pillow.fromarray(column), "PNG"), encoded(Pillow.fromarray(column), "PNG")
    for draws in uniform(key(0, "test"), np.arange(30), NUM_DRAWS).tolist():
        seen = delivered(image, Image("png", crop=RandomResizedCrop(64), flip=0.5), draws)
        named = delivered(mask, Mask("png", crop=RandomResizedCrop(64), flip=0.5), draws)
        assert np.abs(seen[..., :1].astype(int) - named).max() <= 3


@pytest.mark.parametrize(
    ("crop", "message"),
    [
        (CenterCrop(224), r"is 100 x 80 \(height x width\), smaller than CenterCrop.*ResizeShort"),
        (RandomCrop(90, padding=4), ".*smaller than RandomCrop"),
        (Pad(90), ".*larger than Pad.*ResizeLong"),
    ],
)
@pytest.mark.parametrize("form", ["JPEG", "PNG"])
def test_a_picture_that_does_not_fit_the_crop_is_refused(crop, message: str, form: str) -> None:
    data = encoded(photo(100, 80), form)
    with pytest.raises(FieldError, match=f"^sample 7, field 'image': the picture {message}"):
        delivered(data, Image("x", crop=crop))


def test_pixels_kept_while_staging_are_cropped_anew() -> None:
    data = encoded(photo(100, 140), "PNG")
    how = Image("png", resize=Resize((50, 70)), crop=RandomCrop(40), flip=0.5, decoded=True)
    column = how.column("image")
    assert column is not None
    assert column.shape == (50, 70, 3)
    kept = how.encode(data, "here")
    assert kept == how.encode(np.asarray(photo(100, 140)), "here")
    fixed = Image("png", resize=ResizeShort(50), crop=CenterCrop(40), decoded=True)
    assert fixed.column("x").shape == (40, 40, 3)  # type: ignore[union-attr]
    plain = Image("png", resize=ResizeShort(50), crop=CenterCrop(40))
    assert fixed.encode(data, "here") == delivered(data, plain).tobytes()


RESIZING = """
import os
import numpy as np
import torch
from dataio.rows.decode import store_pixels
from dataio.rows.image import Image
from dataio.rows.views import CenterCrop, RandomResizedCrop

torch.set_num_threads(2)
out = np.empty((224, 224, 3), np.uint8)
before = len(os.listdir("/proc/self/task"))
for crop in (RandomResizedCrop(224), CenterCrop(224)):
    for flip in (0.0, 1.0):
        how = Image("x", crop=crop, flip=flip)
        store_pixels(np.zeros((400, 500, 3), np.uint8), out, how, where="here")
assert len(os.listdir("/proc/self/task")) == before, "resizing a picture started threads"
assert torch.get_num_threads() == 2, "the threads of the model are its own"
"""


def test_resizing_a_picture_starts_no_threads_beside_the_loaders() -> None:
    environment = {**os.environ, "OMP_NUM_THREADS": "2", "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, "-c", RESIZING], env=environment, capture_output=True, text=True,
        timeout=120, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
