"""Images decode to the pixels that Pillow sees, into the buffer that was given."""

import base64
import io

import numpy as np
import pytest
from PIL import Image

from dataio.base.errors import FieldError
from dataio.rows.decode import decode_image, image_shape
from dataio.rows.image import Image as Declared
from dataio.rows.views import Resize

MODES = {1: "L", 3: "RGB", 4: "RGBA"}


def picture(height: int, width: int, channels: int = 3) -> Image.Image:
    """A smooth picture, so that compression changes little."""
    y, x = np.mgrid[:height, :width]
    planes = [100 + 50 * np.sin((i + 1) * y / height) + 50 * x / width for i in range(channels)]
    return Image.fromarray(np.stack(planes, 2).astype(np.uint8).squeeze(), MODES[channels])


def encoded(image: Image.Image, form: str) -> bytes:
    file = io.BytesIO()
    image.save(file, form)
    return file.getvalue()


def decoded(data: bytes, *shape: int, resize: bool = False) -> np.ndarray:
    out = np.zeros(shape, np.uint8)
    how = Declared(
        "jpg",
        resize=Resize((shape[0], shape[1])) if resize else None,
        channels=out.shape[2],
        upright=True,
    )
    decode_image(memoryview(data), out, how, where="sample 7, field 'image'")
    return out


@pytest.mark.parametrize("channels", [1, 3])
@pytest.mark.parametrize("form", ["JPEG", "PNG", "BMP"])
def test_an_image_decodes_as_pillow_does(form: str, channels: int) -> None:
    data = encoded(picture(40, 56, channels), form)
    expected = np.asarray(Image.open(io.BytesIO(data))).reshape(40, 56, channels)
    assert np.abs(decoded(data, 40, 56, channels).astype(int) - expected).max() <= 2
    assert image_shape(memoryview(data)) == (40, 56)
    assert image_shape(np.frombuffer(data, np.uint8)) == (40, 56)


@pytest.mark.parametrize(
    ("form", "held", "asked"),
    [("JPEG", 1, 3), ("JPEG", 3, 1), ("JPEG", 3, 4), ("PNG", 1, 3), ("PNG", 3, 1), ("PNG", 4, 3)],
)
def test_channels_are_converted(form: str, held: int, asked: int) -> None:
    data = encoded(picture(16, 24, held), form)
    expected = np.asarray(Image.open(io.BytesIO(data)).convert(MODES[asked]))
    found = decoded(data, 16, 24, asked).astype(int)
    assert np.abs(found - expected.reshape(found.shape)).max() <= 3


@pytest.mark.parametrize("channels", [1, 3])
@pytest.mark.parametrize("form", ["JPEG", "PNG"])
@pytest.mark.parametrize("size", [(32, 48), (25, 31), (128, 200), (64, 20)])
def test_an_image_is_resized(form: str, size: tuple[int, int], channels: int) -> None:
    data = encoded(picture(64, 96, channels), form)
    image = Image.open(io.BytesIO(data)).resize(size[::-1], Image.Resampling.BILINEAR)
    found = decoded(data, *size, channels, resize=True).astype(int)
    assert np.abs(found - np.asarray(image).reshape(found.shape)).mean() < 2


def test_resizing_does_not_alias() -> None:
    stripes = np.zeros((256, 256), np.uint8)
    stripes[:, ::2] = 255
    found = decoded(encoded(Image.fromarray(stripes), "PNG"), 24, 24, 1, resize=True)
    assert 110 < found.min() <= found.max() < 145


def test_another_size_is_refused_when_none_was_declared() -> None:
    for form in ("JPEG", "PNG"):
        with pytest.raises(FieldError, match=r"^sample 7, .* is 10 x 20 .*expected 10 x 21.*size="):
            decoded(encoded(picture(10, 20), form), 10, 21, 3)


@pytest.mark.parametrize("form", ["JPEG", "PNG"])
@pytest.mark.parametrize("resize", [False, True])
def test_a_corrupt_image_is_refused(form: str, resize: bool) -> None:
    whole = encoded(picture(64, 64), form)
    for data in (whole[: len(whole) // 2], whole[:20], whole[:2] + b"junk", b"", b"\0" * 50):
        with pytest.raises(FieldError, match=r"sample 7, field 'image': \d+ bytes .*do not decode"):
            decoded(data, 32 if resize else 64, 64, 3, resize=resize)
    with pytest.raises(FieldError, match="do not decode"):
        image_shape(memoryview(whole[:20]))


def test_an_untidy_or_cmyk_jpeg_still_decodes() -> None:
    data = encoded(picture(32, 32), "JPEG")
    untidy = data[:-2] + b"\0" * 19 + data[-2:]
    assert np.abs(decoded(untidy, 32, 32, 3).astype(int) - decoded(data, 32, 32, 3)).max() <= 2
    inks = encoded(picture(32, 32).convert("CMYK"), "JPEG")
    expected = np.asarray(Image.open(io.BytesIO(inks)).convert("RGB")).astype(int)
    assert np.abs(decoded(inks, 32, 32, 3) - expected).max() <= 2


TALL_COLOURS = (
    "/9j/4AAQSkZJRgABAQAAAQABAAD/2wCDEAAoABwAHgAjAB4AGQAoACMAIQAjAC0AKwAoADAAPABkAEEAPAA3ADcA"
    "PAB7AFgAXQBJAGQAkQCAAJkAlgCPAIAAjACKAKAAtADmAMMAoACqANoArQCKAIwAyAERAMsA2gDuAPUBAgEEAQIA"
    "mwDBARsBLwEYAPoBLADmAP0BAgD4/9sAQwErLS08NTx2QUF2+KWMpfj4+Pj4+Pj4+Pj4+Pj4+Pj4+Pj4+Pj4+Pj4"
    "+Pj4+Pj4+Pj4+Pj4+Pj4+Pj4+Pj4+Pj4/8EAEQgACAAIAwEUAAIRAQMRAf/EABUAAQEAAAAAAAAAAAAAAAAAAAAD"
    "/8QAFxABAQEBAAAAAAAAAAAAAAAAABECBP/EABQBAQAAAAAAAAAAAAAAAAAAAAP/xAAXEQADAQAAAAAAAAAAAAAA"
    "AAAAAQID/9oADAMBAAIRAxEAPwC/Jq0ATphZn//Z"
)
"""A JPEG of 8 x 8 pixels with one colour for each four of a column, a rare subsampling (4:4:1)."""


def test_a_jpeg_of_a_rare_subsampling_is_decoded() -> None:
    data = base64.b64decode(TALL_COLOURS)
    out = np.empty((8, 8, 3), np.uint8)
    assert decode_image(memoryview(data), out, Declared("jpg"), where="here") == (8, 8)
    with Image.open(io.BytesIO(data)) as image:
        assert np.array_equal(out, np.asarray(image))
