"""A picture that would be huge when it is resized is only resized where a crop shows it."""

import io
import tracemalloc
from typing import Any

import numpy as np
import pytest
from PIL import Image as Pillow

from dataio.base.errors import FieldError
from dataio.base.seeding import key, uniform
from dataio.rows import decode
from dataio.rows.decode import decode_image
from dataio.rows.image import Image, Mask
from dataio.rows.views import (
    NUM_DRAWS,
    CenterCrop,
    Pad,
    RandomCrop,
    RandomResizedCrop,
    ResizeLong,
    ResizeShort,
)

# Imported where something is first resized: its memory is no picture's.
pytest.importorskip("torch")

VIEWS: dict[str, Any] = {
    "the middle": {"resize": ResizeShort(64), "crop": CenterCrop(56)},
    "a part": {"resize": ResizeShort(64), "crop": RandomCrop(56)},
    "a part and its border": {"resize": ResizeShort(64), "crop": RandomCrop(56, padding=20)},
    "a random part": {"resize": ResizeShort(64), "crop": RandomResizedCrop(56)},
    "a long part": {
        "resize": ResizeShort(64), "crop": RandomResizedCrop(56, scale=(0.1, 1), ratio=(1e-5, 1e5))
    },
    "all": {"resize": ResizeLong(64), "crop": Pad(64)},
    "at once": {"crop": RandomResizedCrop(56)},
}  # fmt: skip


def photo(height: int, width: int) -> Pillow.Image:
    rng = np.random.default_rng(height)
    small = rng.integers(0, 256, (-(-height // 5), -(-width // 5), 3), np.uint8)
    return Pillow.fromarray(small).resize((width, height), Pillow.Resampling.BILINEAR)


def encoded(picture: Pillow.Image, form: str) -> bytes:
    file = io.BytesIO()
    picture.save(file, form, **({"quality": 95} if form == "JPEG" else {}))
    return file.getvalue()


def delivered(data: bytes, how: Image | Mask, sample: int = 0) -> np.ndarray:
    (draws,) = uniform(key(1, "pictures", epoch=0), np.array([sample]), NUM_DRAWS).tolist()
    assert how.out is not None
    out = np.zeros((*how.out, how.channels), np.uint8)
    decode_image(memoryview(data), out, how, draws, where="here")
    return out


@pytest.mark.parametrize("form", ["JPEG", "PNG"])
@pytest.mark.parametrize("view", VIEWS)
def test_no_view_of_a_narrow_picture_takes_more_than_it_shows(view: str, form: str) -> None:
    for size in ((1, 6000), (6000, 1), (2, 5000), (9000, 3)):
        data = encoded(photo(*size), form)
        mask = encoded(photo(*size).convert("L").point(lambda v: 7 * (v > 128)), "PNG")
        for sample in range(3):
            tracemalloc.start()
            delivered(data, Image("x", flip=0.5, **VIEWS[view]), sample)
            classes = delivered(mask, Mask("x", flip=0.5, **VIEWS[view]), sample)
            peak_bytes = tracemalloc.get_traced_memory()[1]
            tracemalloc.stop()
            assert set(np.unique(classes)) <= {0, 7, 255}
            assert peak_bytes < 2 << 20


@pytest.mark.parametrize("view", ["the middle", "a part", "a part and its border"])
@pytest.mark.parametrize("size", [(40, 50), (64, 200), (130, 90), (200, 3000), (1000, 704)])
def test_a_part_is_what_it_is_in_the_whole(view: str, size: tuple[int, int], monkeypatch) -> None:
    for form in ("JPEG", "PNG"):
        data = encoded(photo(*size), form)
        how = Image("x", flip=0.5, **VIEWS[view])
        for sample in range(4):
            monkeypatch.setattr(decode, "MOST_RESIZED", 10**9)
            whole = delivered(data, how, sample).astype(int)
            monkeypatch.setattr(decode, "MOST_RESIZED", 0)
            part = delivered(data, how, sample).astype(int)
            assert np.abs(part - whole).max() <= 1


@pytest.mark.parametrize("view", ["the middle", "a part", "a part and its border"])
def test_a_part_of_a_mask_is_what_it_is_in_the_whole(view: str, monkeypatch) -> None:
    for size in ((40, 50), (64, 200), (130, 90), (200, 3000)):
        classes = np.random.default_rng(0).integers(0, 21, size, np.uint8)
        data = encoded(Pillow.fromarray(classes), "PNG")
        how = Mask("x", flip=0.5, **VIEWS[view])
        for sample in range(4):
            monkeypatch.setattr(decode, "MOST_RESIZED", 10**9)
            whole = delivered(data, how, sample)
            monkeypatch.setattr(decode, "MOST_RESIZED", 0)
            assert (delivered(data, how, sample) == whole).mean() > 0.999


def test_a_narrow_picture_has_the_pixels_of_the_whole() -> None:
    picture = photo(3, 3000)
    how = Image("x", resize=ResizeShort(64), crop=CenterCrop(56))
    grown = picture.resize((64_000, 64), Pillow.Resampling.BILINEAR)
    expected = np.asarray(grown.crop((31_972, 4, 32_028, 60))).astype(int)
    assert np.abs(delivered(encoded(picture, "PNG"), how).astype(int) - expected).max() <= 1


@pytest.mark.parametrize("form", ["PNG", "JPEG"])
def test_a_mask_holds_no_class_that_its_file_does_not(form: str) -> None:
    classes = np.zeros((64, 64), np.uint8)
    classes[:, 25:] = 200
    data = encoded(Pillow.fromarray(classes), form)
    held = set(np.unique(np.asarray(Pillow.open(io.BytesIO(data)))).tolist())
    for side in (8, 16, 21, 32, 61, 64, 200):
        for crop in (None, CenterCrop(side), RandomResizedCrop(side, scale=(0.1, 1))):
            resize = None if isinstance(crop, RandomResizedCrop) else ResizeShort(side)
            how = Mask("x", resize=resize, crop=crop or CenterCrop(side))
            assert set(np.unique(delivered(data, how, side)).tolist()) <= held


@pytest.mark.parametrize("form", ["PNG", "JPEG", "WEBP"])
def test_a_mask_of_colours_is_refused_in_every_format(form: str) -> None:
    how = Mask("x", crop=CenterCrop(8))
    with pytest.raises(FieldError, match=r"here: holds colours \(RGB\), expected one class"):
        delivered(encoded(photo(20, 30), form), how)
