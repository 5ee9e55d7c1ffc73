"""Pictures that are delivered many at once have the pixels that one by one they would have."""

import io
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from PIL import Image as Pillow

from dataio.base.seeding import Key, key, uniform
from dataio.rows import at_once
from dataio.rows.at_once import DONE, LEFT, SKIPPED, PicturesAtOnce
from dataio.rows.decode import decode_image, store_pixels
from dataio.rows.image import Image
from dataio.rows.views import (
    NUM_DRAWS,
    CenterCrop,
    Pad,
    RandomCrop,
    RandomResizedCrop,
    Resize,
    ResizeLong,
    ResizeShort,
)

Rng = np.random.Generator
pytestmark = pytest.mark.skipif(
    not PicturesAtOnce(Image("jpg"), (1, 1)).is_there,
    reason="the compiled part is not there: pip install -e '.[images]' where a compiler is",
)


def pixels_of(rng: Rng, height: int, width: int) -> np.ndarray:
    small = rng.integers(0, 256, (height // 8 + 1, width // 8 + 1, 3), np.uint8)
    smooth = Pillow.fromarray(small).resize((width, height), Pillow.Resampling.BICUBIC)
    noise = rng.integers(-30, 30, (height, width, 3))
    return np.clip(np.asarray(smooth, int) + noise, 0, 255).astype(np.uint8)


def compressed(pixels: np.ndarray, *, mode: str = "RGB", **options: object) -> bytes:
    file = io.BytesIO()
    Pillow.fromarray(pixels).convert(mode).save(file, "JPEG", **options)
    return file.getvalue()


def deliver(
    kind: Image, pictures: list[bytes], drawn: tuple[Key, np.ndarray] | None = None, *, out=(32, 32)
) -> tuple[np.ndarray, list[int], list[list[int]]]:
    """Pixels, states and sizes."""
    arrays = [np.frombuffer(data, np.uint8) for data in pictures]
    pixels = np.zeros((len(arrays), *(kind.out or out), kind.channels), np.uint8)
    states = np.zeros(len(arrays), np.uint8)
    at_once_of_kind = PicturesAtOnce(kind, pixels.shape[1:3])
    call = at_once_of_kind.call(
        np.array([array.ctypes.data for array in arrays], np.uint64),
        np.array([len(array) for array in arrays]), drawn, pixels, states,
    )  # fmt: skip
    at_once_of_kind.deliver(call)
    return pixels, states.tolist(), call.sizes.tolist()


def draws_of(rng: Rng) -> tuple[tuple[Key, np.ndarray], list[float]]:
    """By what a picture draws, and what."""
    drawn = key(int(rng.integers(2**31)), "pictures"), rng.integers(-(2**62), 2**62, 1)
    return drawn, uniform(*drawn, NUM_DRAWS)[0].tolist()


def drawn_kind(rng: Rng) -> Image | None:
    """Any way that a picture may be delivered; None: one that no field takes."""
    high = 64 if rng.random() < 0.8 else 400
    height, width = rng.integers(1, high, 2).tolist()
    side = (height, width) if rng.random() < 0.5 else height
    resizes = (None, None, None, Resize(side), ResizeShort(height), ResizeLong(height))
    low, top = sorted(rng.uniform(0.01, 1, 2).tolist())
    narrow, wide = sorted(rng.uniform(0.2, 3, 2).tolist())
    part = max(int(height * rng.uniform(0.3, 1.3)), 1), max(int(width * rng.uniform(0.3, 1.3)), 1)
    crops = (
        None, CenterCrop(part), RandomCrop(part, padding=int(rng.integers(8))), Pad(part),
        RandomResizedCrop(part), RandomResizedCrop(part, scale=(low, top), ratio=(narrow, wide)),
    )  # fmt: skip
    try:
        return Image(
            "jpg", resize=resizes[rng.integers(6)], crop=crops[rng.integers(6)],
            flip=float(rng.choice([0, 0.5, 1])), channels=int(rng.choice([1, 3, 3, 3, 4])),
            fill=int(rng.integers(256)), upright=bool(rng.random() < 0.7),
        )  # fmt: skip
    except ValueError:
        return None


@pytest.mark.parametrize("first", range(0, 1200, 300))
def test_any_way_to_deliver_a_picture_gives_the_same_bytes(first) -> None:
    delivered = {"jpg": 0, "pixels": 0}
    for seed in range(first, first + 300):
        rng = np.random.default_rng(seed)
        height, width = rng.integers(1, 90 if rng.random() < 0.6 else 600, 2).tolist()
        pixels, kind, (drawn, draws) = (
            pixels_of(rng, height, width), drawn_kind(rng), draws_of(rng),
        )  # fmt: skip
        if kind is None:
            continue
        out = kind.out or (kind.resize.resized((height, width)) if kind.resize else (height, width))
        wanted = np.zeros((*out, kind.channels), np.uint8)
        if rng.random() < 0.2:
            kept = np.ascontiguousarray(pixels.repeat(2, 2)[..., : kind.channels])
            found, states = np.zeros((1, *wanted.shape), np.uint8), np.zeros(1, np.uint8)
            at_once_of_kind = PicturesAtOnce(kind, out, (height, width))
            one = np.array([kept.ctypes.data], np.uint64), np.array([kept.size])
            at_once_of_kind.deliver(at_once_of_kind.call(*one, drawn, found, states))
            (state,), what = states.tolist(), "pixels"
            if state == DONE:
                store_pixels(kept, wanted, kind, draws, where="here")
        else:
            mode = "L" if rng.random() < 0.2 else "RGB"
            options = {} if mode == "L" else {"subsampling": int(rng.integers(3))}
            try:
                data = compressed(
                    pixels, mode=mode, quality=int(rng.integers(10, 98)),
                    progressive=bool(rng.random() < 0.2), **options,
                )  # fmt: skip
            except OSError:
                continue  # Pillow's encoder has too little room for a tiny picture
            found, (state,), (size,) = deliver(kind, [data], drawn, out=out)
            what = "jpg"
            if state == DONE:
                its = decode_image(memoryview(data), wanted, kind, draws, where="here")
                assert its == tuple(size)
        if state == DONE:
            assert np.array_equal(found[0], wanted), (seed, kind)
            delivered[what] += 1
    assert delivered["jpg"] > 100
    assert delivered["pixels"] > 20


@pytest.mark.parametrize("options", [{"subsampling": n} for n in range(3)] + [{"mode": "L"}])
@pytest.mark.parametrize(
    "kind",
    [
        Image("jpg", crop=RandomResizedCrop(64), flip=0.5),
        Image("jpg", resize=ResizeShort(80), crop=CenterCrop(64)),
        Image("jpg", crop=RandomCrop(64)),
        Image("jpg", resize=ResizeLong(64), crop=Pad(64)),
    ],
    ids=lambda kind: type(kind.crop).__name__,
)
def test_no_picture_of_a_usual_recipe_is_left(kind, options) -> None:
    rng = np.random.default_rng(0)
    pictures = [compressed(pixels_of(rng, 150 + n, 220 - n), **options) for n in range(20)]
    _, states, sizes = deliver(kind, pictures, (key(0, "pictures"), np.arange(20)))
    assert states == [DONE] * 20
    assert sizes == [[150 + n, 220 - n] for n in range(20)]


def test_what_is_rare_or_has_a_fault_is_left() -> None:
    rng = np.random.default_rng(0)
    pixels = pixels_of(rng, 32, 32)
    sound, untidy = compressed(pixels), compressed(pixels)
    turned = Pillow.Exif()
    turned[274] = 6
    png = io.BytesIO()
    Pillow.fromarray(pixels).save(png, "PNG")
    left = {
        "turned": compressed(pixels, exif=turned.tobytes()),
        "inks": compressed(pixels, mode="CMYK"),
        "a PNG": png.getvalue(),
        "cut": sound[: len(sound) // 2],
        "no end": sound[:-2],
        "no data": b"",
        "another size": compressed(pixels[1:]),
        "a stray byte": untidy[:2] + b"\0" + untidy[2:],
        "no picture": bytes(1000),
    }
    pictures = [sound, *left.values(), sound]
    _, states, _ = deliver(Image("jpg"), pictures)
    assert states == [DONE, *[LEFT] * len(left), DONE]
    # One that need not be turned is as any other.
    _, states, _ = deliver(Image("jpg", upright=False), [left["turned"]])
    assert states == [DONE]


def test_a_picture_that_is_skipped_is_not_touched() -> None:
    kind, pixels = Image("jpg"), np.full((1, 8, 8, 3), 7, np.uint8)
    states = np.full(1, SKIPPED, np.uint8)
    nowhere = np.zeros(1, np.int64)
    at_once_of_kind = PicturesAtOnce(kind, (8, 8))
    call = at_once_of_kind.call(nowhere.view(np.uint64), nowhere, None, pixels, states)
    at_once_of_kind.deliver(call)
    assert states.tolist() == [SKIPPED]
    assert (pixels == 7).all()


def test_tables_of_a_picture_do_not_serve_the_next() -> None:
    sound = compressed(pixels_of(np.random.default_rng(1), 32, 32))
    start = sound.index(b"\xff\xdb")
    length = int.from_bytes(sound[start + 2 : start + 4], "big") + 2
    _, states, _ = deliver(Image("jpg"), [sound, sound[:start] + sound[start + length :], sound])
    assert states == [DONE, LEFT, DONE]


def test_a_part_that_was_compiled_of_another_source_is_not_loaded(tmp_path, monkeypatch) -> None:
    here = Path(at_once.__file__).parent
    for name in ("pictures.c", *(path.name for path in here.glob("_pictures.*"))):
        shutil.copy(here / name, tmp_path / name)
    monkeypatch.setattr(at_once, "__file__", str(tmp_path / "at_once.py"))
    assert at_once.library.__wrapped__() is not None
    with open(tmp_path / "pictures.c", "a") as source:
        source.write("/* It takes one argument more. */\n")
    assert at_once.library.__wrapped__() is None
    (tmp_path / "pictures.c").unlink()
    assert at_once.library.__wrapped__() is None


@pytest.mark.parametrize("built", [True, False])
def test_without_the_compiled_part_there_is_nothing_at_once(built, monkeypatch) -> None:
    monkeypatch.setattr(at_once, "library", (lambda: None) if not built else at_once.library)
    kind = replace(Image("jpg", crop=RandomCrop(24)), flip=0.5)
    assert PicturesAtOnce(kind, (24, 24)).is_there == built
    assert PicturesAtOnce(kind, (24, 24), (32, 32)).is_there == built
