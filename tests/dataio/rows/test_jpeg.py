"""A region of a JPEG has the pixels of the whole picture, with and without the library."""

import ctypes
import io
import threading

import numpy as np
import pytest
import simplejpeg
from PIL import Image

from dataio.rows import jpeg
from dataio.rows.jpeg import decode_region, jpeg_header, turbojpeg
from dataio.rows.views import Box

SUBSAMPLINGS = {"444": 0, "422": 1, "420": 2}


def noisy(height: int, width: int, *, mode: str = "RGB", **options: object) -> bytes:
    """A JPEG with detail in every block, so that a wrong neighbour shows."""
    rng = np.random.default_rng(height * 10_000 + width)
    small = Image.fromarray(rng.integers(0, 256, (height // 3 + 2, width // 3 + 2, 3), np.uint8))
    file = io.BytesIO()
    small.resize((width, height), Image.Resampling.BILINEAR).convert(mode).save(
        file, "JPEG", quality=90, **options
    )
    return file.getvalue()


def without_library(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(jpeg, "turbojpeg", lambda: None)
    monkeypatch.setattr(jpeg, "_THREAD", threading.local())


@pytest.fixture(params=["libjpeg-turbo", "simplejpeg"])
def decoder(request, monkeypatch) -> str:
    if request.param == "simplejpeg":
        without_library(monkeypatch)
    elif turbojpeg() is None:
        pytest.skip("libjpeg-turbo 3 is not there: pip install turbojpeg")
    return str(request.param)


@pytest.mark.parametrize("progressive", [False, True])
@pytest.mark.parametrize("subsampling", [*SUBSAMPLINGS, "Gray"])
@pytest.mark.parametrize("scale", [1, 2, 4, 8])
def test_a_region_is_what_it_is_in_the_whole(decoder, scale, subsampling, progressive) -> None:
    rng = np.random.default_rng(scale)
    gray = subsampling == "Gray"
    options = {} if gray else {"subsampling": SUBSAMPLINGS[subsampling]}
    mode = "L" if gray else "RGB"
    for size in ((131, 203), (96, 64), (9, 17), (1, 1)):
        data = noisy(*size, mode=mode, progressive=progressive, **options)
        found, name = jpeg_header(memoryview(data))
        assert (found, name) == (size, subsampling)
        whole = simplejpeg.decode_jpeg(
            data, "RGB", min_height=-(-size[0] // scale), min_width=-(-size[1] // scale)
        )
        assert whole.shape[:2] == (-(-size[0] // scale), -(-size[1] // scale))
        for _ in range(25):
            top, left = (int(rng.integers(0, side)) // scale * scale for side in size)
            box = Box(
                top,
                left,
                int(rng.integers(1, size[0] - top + 1)),
                int(rng.integers(1, size[1] - left + 1)),
            )
            part = decode_region(memoryview(data), size, name, box, scale=scale, channels=3)
            top, left = top // scale, left // scale
            expected = whole[
                top : top + -(-box.height // scale), left : left + -(-box.width // scale)
            ]
            assert part.shape == expected.shape, box
            assert (part == expected).all(), box


@pytest.mark.parametrize("channels", [1, 3, 4])
def test_channels_are_those_asked_for(decoder, channels: int) -> None:
    data = noisy(40, 60)
    part = decode_region(data=np.frombuffer(data, np.uint8), size=(40, 60), subsampling="420",
                         box=Box(8, 3, 20, 30), scale=1, channels=channels)  # fmt: skip
    expected = simplejpeg.decode_jpeg(data, jpeg.COLORS[channels]).reshape(40, 60, channels)
    assert (part == expected[8:28, 3:33]).all()


def test_a_torn_picture_is_refused(decoder) -> None:
    data = noisy(200, 300)
    size, name = jpeg_header(memoryview(data))
    with pytest.raises(ValueError):
        decode_region(memoryview(data[: len(data) // 2]), size, name, Box(0, 0, 200, 300),
                      scale=1, channels=3)  # fmt: skip
    # The next picture is not concerned.
    part = decode_region(memoryview(data), size, name, Box(0, 0, 200, 300), scale=1, channels=3)
    assert (part == simplejpeg.decode_jpeg(data)).all()


def without(data: bytes, kind: int) -> bytes:
    """A JPEG without its segments of one kind."""
    kept, at = data[:2], 2
    while data[at + 1] != 0xDA:
        end = at + 2 + int.from_bytes(data[at + 2 : at + 4])
        kept += data[at:end] if data[at + 1] != kind else b""
        at = end
    return kept + data[at:]


@pytest.mark.parametrize(("tables", "kind"), [("quantization", 0xDB), ("Huffman", 0xC4)])
@pytest.mark.parametrize("optimize", [False, True])
def test_no_picture_is_decoded_by_the_tables_of_another(decoder, tables, kind, optimize) -> None:
    def decoded(data: bytes) -> bytes | None:
        try:
            size, name = jpeg_header(memoryview(data))
            box = Box(0, 0, *size)
            return decode_region(memoryview(data), size, name, box, scale=1, channels=3).tobytes()
        except ValueError:
            return None

    lacks = without(noisy(64, 96), kind)
    alone = decoded(lacks)
    if tables == "quantization":
        assert alone is None
    for quality in (20, 95):
        other = io.BytesIO()
        Image.open(io.BytesIO(noisy(64, 96))).save(
            other, "JPEG", quality=quality, optimize=optimize
        )
        assert decoded(other.getvalue()) is not None
        assert decoded(lacks) == alone


def test_a_library_without_regions_is_not_taken(monkeypatch) -> None:
    jpeg.turbojpeg.cache_clear()
    libc = ctypes.CDLL(None)._name
    monkeypatch.setattr(jpeg, "_candidates", lambda: ["/nowhere/libturbojpeg.so.0", libc])
    assert jpeg.turbojpeg() is None
    jpeg.turbojpeg.cache_clear()
