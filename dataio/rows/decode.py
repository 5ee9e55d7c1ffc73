"""Compressed pictures -> pixels in a given buffer, without the GIL: threads decode side by side."""

import ctypes
import functools
import io
import struct
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple, Protocol

import numpy as np
import simplejpeg
from PIL import Image, ImageOps, UnidentifiedImageError

from dataio.base.errors import FieldError
from dataio.rows.jpeg import COLORS, Pixels, decode_region, jpeg_header
from dataio.rows.views import MIDDLE, Box, Crop, Draws, Resizing, Size, View, find_scale, find_view

if TYPE_CHECKING:
    import torch

JPEG_START = b"\xff\xd8"
PILLOW_MODES = {1: "L", 3: "RGB", 4: "RGBA"}
PILLOW_ERRORS = (
    OSError,
    ValueError,
    SyntaxError,
    EOFError,
    UnidentifiedImageError,
    Image.DecompressionBombError,
)
ORIENTATION = 0x0112
"""The EXIF tag; 1 is upright."""


class Delivery(Protocol):
    """How a picture is delivered, as `Image` and `Mask` declare it."""

    @property
    def resize(self) -> Resizing | None: ...
    @property
    def crop(self) -> Crop | None: ...
    @property
    def flip(self) -> float: ...
    @property
    def channels(self) -> int: ...
    @property
    def fill(self) -> int: ...
    @property
    def upright(self) -> bool: ...

    @property
    def classes(self) -> bool:
        """Whether a pixel names a class: never mixed with others, nor turned into a colour."""
        ...


class Picture(NamedTuple):
    """A picture whose header was read.

    Attributes:
        size: Height and width, upright.
        region: Decodes a box of it, at the scale given or larger.
    """

    size: Size
    region: Callable[[Box, int], Pixels]


def decode_image(
    data: memoryview | Pixels, out: Pixels, how: Delivery, draws: Draws = MIDDLE, *, where: str
) -> None:
    """Decode a picture into ``out``; without a copy where it is a JPEG of that size.

    Args:
        data: The compressed picture.
        out: uint8[height, width, channels], C-contiguous, channels 1, 3 or 4.
        how: What of it is delivered.
        draws: Numbers of this sample; see `find_view`.
        where: Sample and field, for the message.

    Raises:
        FieldError: If the picture does not decode, does not fit the crop, or comes out in another
            size.
    """
    # A JPEG that the strict decoder refuses may be merely untidy, or CMYK: Pillow has the last
    # word.
    if bytes(data[:2]) == JPEG_START and (not how.upright or jpeg_orientation(data) == 1):
        try:
            size, subsampling = jpeg_header(data)
            view = _view(size, out, how, draws, where)
            if view == View(size, Box(0, 0, *size), size, False):
                simplejpeg.decode_jpeg(data, COLORS[how.channels], buffer=out)
                return

            def region(box: Box, scale: int) -> Pixels:
                return decode_region(
                    data, size, subsampling, box, scale=scale, channels=how.channels
                )

            store(Picture(size, region), view, out, how)
            return
        except ValueError:
            pass
    pixels = _by_pillow(data, how, where)
    store_pixels(pixels, out, how, draws, where=where)


def store_pixels(
    pixels: Pixels, out: Pixels, how: Delivery, draws: Draws = MIDDLE, *, where: str
) -> None:
    """Bring decoded pixels, uint8[height, width, channels], to ``out``; see `decode_image`."""
    size = pixels.shape[0], pixels.shape[1]

    def region(box: Box, scale: int) -> Pixels:
        return pixels[box.top : box.top + box.height, box.left : box.left + box.width]

    store(Picture(size, region), _view(size, out, how, draws, where), out, how)


def store(picture: Picture, view: View, out: Pixels, how: Delivery) -> None:
    """Decode what a view shows, and resize it into ``out``."""
    whole = Box(0, 0, *picture.size)
    if view.resized != picture.size:
        pixels = picture.region(whole, find_scale(whole, view.resized))
        whole = Box(0, 0, *view.resized)
        if view.box == whole:
            _put(pixels, out, view.flipped, how)
            return
        middle = np.empty((*view.resized, how.channels), np.uint8)
        _put(pixels, middle, False, how)
        picture = Picture(view.resized, lambda box, _: middle[_slices(box)])
    inside = _intersection(view.box, whole)
    if inside == view.box:
        _put(picture.region(inside, find_scale(inside, view.out)), out, view.flipped, how)
        return
    # Beyond the edges nothing is resized.
    padded = np.full_like(out, how.fill)
    place = Box(inside.top - view.box.top, inside.left - view.box.left, *inside[2:])
    if inside.height and inside.width:
        padded[_slices(place)] = picture.region(inside, 1)
    _put(padded, out, view.flipped, how)


def _put(pixels: Pixels, out: Pixels, flipped: bool, how: Delivery) -> None:
    """Resize pixels to ``out``, with antialiasing where they are colours."""
    if pixels.shape == out.shape and not flipped:
        out[...] = pixels
        return
    with _one_thread():
        _resize(pixels, out, flipped, how)


def _resize(pixels: Pixels, out: Pixels, flipped: bool, how: Delivery) -> None:
    # Those who only name fields need no torch.
    import torch

    aten = torch.ops.aten
    # Torch warns of arrays that nobody may write to.
    pixels = pixels if pixels.flags.writeable else pixels.copy()
    source, target = (
        _channels_first(torch.from_numpy(pixels)),
        _channels_first(torch.from_numpy(out)),
    )
    if pixels.shape[:2] == out.shape[:2]:
        target.copy_(torch.flip(source, [3]))
        return
    # Torch would give a single picture with its channels first, which takes longer.
    resized = _channels_first(torch.empty(out.shape, dtype=torch.uint8)) if flipped else target
    size = list(out.shape[:2])
    if how.classes:
        aten._upsample_nearest_exact2d.out(source, size, out=resized)
    else:
        aten._upsample_bilinear2d_aa.out(source, size, False, out=resized)
    if flipped:
        target.copy_(torch.flip(resized, [3]))


@contextmanager
def _one_thread() -> Iterator[None]:
    """Keep torch from starting OpenMP's threads: the pictures of a batch have threads already."""
    import torch

    set_num_threads = _openmp_setter()
    before = torch.get_num_threads()
    if set_num_threads is None or before == 1:
        yield
        return
    # Of the calling thread alone, unlike `torch.set_num_threads`.
    set_num_threads(1)
    try:
        yield
    finally:
        set_num_threads(before)


@functools.cache
def _openmp_setter() -> Callable[[int], object] | None:
    """Find ``omp_set_num_threads`` of the OpenMP that torch is linked with; None: it has none."""
    import torch

    try:
        # PyDLL: a call this short is not worth letting go of the interpreter.
        library = ctypes.PyDLL(str(Path(torch.__file__).parent / "lib" / "libtorch_cpu.so"))
        found: Callable[[int], object] = library.omp_set_num_threads
    except (OSError, AttributeError):
        return None
    return found


def _channels_first(tensor: "torch.Tensor") -> "torch.Tensor":
    return tensor.permute(2, 0, 1)[None]


def _view(size: Size, out: Pixels, how: Delivery, draws: Draws, where: str) -> View:
    view = find_view(size, how.resize, how.crop, how.flip, draws)
    if isinstance(view, str):
        raise FieldError(f"{where}: {view}")
    if view.out != out.shape[:2]:
        raise FieldError(
            f"{where}: the image is {view.out[0]} x {view.out[1]} (height x width), expected "
            f"{out.shape[0]} x {out.shape[1]} like the first; declare the size to bring all to: "
            "resize=Resize(...), or resize=ResizeShort(...) and a crop"
        )
    return view


def image_shape(data: memoryview | Pixels, *, where: str = "image", upright: bool = True) -> Size:
    """Read a picture's height and width from its header.

    Args:
        data: The compressed picture.
        where: Sample and field, for the message.
        upright: As it is seen, not as it is stored, where the two differ.

    Raises:
        FieldError: If it has none.
    """
    try:
        with Image.open(io.BytesIO(data.tobytes())) as image:
            turned = upright and image.getexif().get(ORIENTATION, 1) > 4
            return (image.width, image.height) if turned else (image.height, image.width)
    except PILLOW_ERRORS as error:
        raise _undecodable(data, where, error) from error


def jpeg_orientation(data: memoryview | Pixels) -> int:
    """Read from a JPEG's EXIF how the picture lies: 1 (upright) to 8; 1 where it does not say.

    Source: Exif 2.32, section 4.6.4; the segments before the first scan, and ITU-T T.81, B.1.1.2:
    the bytes that fill the space before these.
    """
    place, end = 2, len(data)
    while place + 4 <= end and data[place] == 0xFF:
        marker, length = data[place + 1], (int(data[place + 2]) << 8) + int(data[place + 3])
        # Any number of bytes 0xFF may fill the space before a marker.
        if marker == 0xFF:
            place += 1
            continue
        if marker == 0xE1:
            found = _exif_orientation(bytes(data[place + 4 : place + 2 + length]))
            if found:
                return found
        # The picture itself: no EXIF comes behind its sizes or its first scan.
        elif marker in (0xC0, 0xC1, 0xC2, 0xDA):
            break
        place += 2 + length
    return 1


def _exif_orientation(segment: bytes) -> int:
    """Find the orientation in an APP1 segment; 0 if it has none."""
    if segment[:6] != b"Exif\0\0":
        return 0
    tiff = segment[6:]
    order = "<" if tiff[:2] == b"II" else ">"
    try:
        (first,) = struct.unpack_from(f"{order}I", tiff, 4)
        (count,) = struct.unpack_from(f"{order}H", tiff, first)
        for entry in range(count):
            tag, _, _, value = struct.unpack_from(f"{order}HHIH", tiff, first + 2 + 12 * entry)
            if tag == ORIENTATION:
                return value if 1 <= value <= 8 else 1
    except struct.error:
        pass
    return 0


def _by_pillow(data: memoryview | Pixels, how: Delivery, where: str) -> Pixels:
    try:
        with Image.open(io.BytesIO(data.tobytes())) as image:
            if how.upright and image.getexif().get(ORIENTATION, 1) != 1:
                return _pixels(ImageOps.exif_transpose(image), how, where)
            return _pixels(image, how, where)
    except PILLOW_ERRORS as error:
        raise _undecodable(data, where, error) from error


def _pixels(image: Image.Image, how: Delivery, where: str) -> Pixels:
    """Convert an image of Pillow, whatever its mode, to uint8[height, width, channels]."""
    mode = image.mode
    if mode.startswith("I"):
        # 16 bits a pixel, some of them in 32.
        deep = np.asarray(image)
        if deep.min() < 0 or deep.max() > 0xFFFF or (how.classes and deep.max() > 0xFF):
            raise FieldError(
                f"{where}: holds numbers from {deep.min()} to {deep.max()}, expected at most "
                f"{255 if how.classes else 65535}; declare Array, and store an .npy"
            )
        image = Image.fromarray((deep if how.classes else deep >> 8).astype(np.uint8))
    elif mode == "F":
        raise FieldError(
            f"{where}: holds floating numbers, expected a picture of 8 or 16 bits; declare Array, "
            "and store an .npy"
        )
    if how.classes:
        if mode not in ("1", "L", "P") and not mode.startswith("I"):
            raise FieldError(
                f"{where}: holds colours ({mode}), expected one class number a pixel, as in a gray "
                "or indexed PNG; convert the mask, or declare Image"
            )
        return np.asarray(image, np.uint8)[:, :, None]
    wanted = PILLOW_MODES[how.channels]
    pixels = np.asarray(image if image.mode == wanted else image.convert(wanted))
    return pixels.reshape(*pixels.shape[:2], how.channels)


def _slices(box: Box) -> tuple[slice, slice]:
    return slice(box.top, box.top + box.height), slice(box.left, box.left + box.width)


def _intersection(box: Box, other: Box) -> Box:
    top, left = max(box.top, other.top), max(box.left, other.left)
    bottom = min(box.top + box.height, other.top + other.height)
    right = min(box.left + box.width, other.left + other.width)
    return Box(top, left, max(bottom - top, 0), max(right - left, 0))


def _undecodable(data: memoryview | Pixels, where: str, error: Exception) -> FieldError:
    return FieldError(
        f"{where}: {len(data)} bytes beginning {bytes(data[:8])!r} do not decode ({error}), "
        "expected a JPEG, PNG or another image that Pillow reads; repair the sample, or declare "
        "Bytes"
    )
