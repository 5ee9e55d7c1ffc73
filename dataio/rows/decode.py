"""Compressed pictures -> pixels in a given buffer, without the GIL: threads decode side by side."""

import ctypes
import functools
import io
import math
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple, Protocol

import numpy as np
import simplejpeg
from PIL import Image, UnidentifiedImageError

from dataio.base.errors import FieldError
from dataio.rows.jpeg import COLORS, Pixels, decode_region, jpeg_header
from dataio.rows.orientation import JPEG_START, UPRIGHT, as_stored, find_orientation
from dataio.rows.views import (
    MIDDLE,
    Box,
    Crop,
    Draws,
    PictureView,
    Resizing,
    Size,
    find_scale,
    find_view,
)
from dataio.rows.whole import is_whole

if TYPE_CHECKING:
    import torch

PILLOW_MODES = {1: "L", 3: "RGB", 4: "RGBA"}
PILLOW_ERRORS = (
    OSError,
    ValueError,
    SyntaxError,
    EOFError,
    UnidentifiedImageError,
    Image.DecompressionBombError,
)
UPRIGHT_BY = (
    Image.Transpose.FLIP_LEFT_RIGHT,
    Image.Transpose.ROTATE_180,
    Image.Transpose.FLIP_TOP_BOTTOM,
    Image.Transpose.TRANSPOSE,
    Image.Transpose.ROTATE_270,
    Image.Transpose.TRANSVERSE,
    Image.Transpose.ROTATE_90,
)
"""What brings the orientations from 2 on upright."""

PIXELS = re.compile(rb"P([56])\n(\d{1,5}) (\d{1,5})\n255\n")
"""The header of PPM and PGM as `pixels_header` writes it."""
NUM_ZEROS = 32
"""At the end of a JPEG, where no mark of its end is: bytes that never came."""
MOST_RESIZED = 16
"""Up to so many times the pixels delivered a picture is resized whole, and then cropped."""


class PictureDelivery(Protocol):
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


class ReadPicture(NamedTuple):
    """A picture whose header was read.

    Attributes:
        size: Height and width, upright.
        region: Decodes a box of it, at the scale given or larger.
    """

    size: Size
    region: Callable[[Box, int], Pixels]


def decode_image(
    data: memoryview | Pixels,
    out: Pixels,
    how: PictureDelivery,
    draws: Draws = MIDDLE,
    *,
    where: str,
) -> Size:
    """Decode a picture into ``out``; without a copy where it is a JPEG of that size.

    Args:
        data: The compressed picture.
        out: uint8[height, width, channels], C-contiguous, channels 1, 3 or 4.
        how: What of it is delivered.
        draws: Numbers of this sample; see `find_view`.
        where: Sample and field, for the message.

    Returns:
        The picture's own height and width, upright if that is asked for.

    Raises:
        FieldError: If the picture does not decode, does not fit the crop, or comes out in another
            size.
    """
    if (pixels := _plain_pixels(data, how.channels)) is not None:
        store_pixels(pixels, out, how, draws, where=where)
        return pixels.shape[0], pixels.shape[1]
    # A JPEG that the strict decoder refuses may be merely untidy, or CMYK: Pillow has the last
    # word.
    if bytes(data[:2]) == JPEG_START and not (how.upright and find_orientation(data) > UPRIGHT):
        try:
            size, subsampling = jpeg_header(data)
            if how.classes and subsampling != "Gray":
                raise ValueError("classes are no colours")
            view = _view(size, out.shape[:2], how, draws, where)
            if view == PictureView(size, Box(0, 0, *size), size, False):
                simplejpeg.decode_jpeg(data, COLORS[how.channels], buffer=out)
                return size

            def region(box: Box, scale: int) -> Pixels:
                return decode_region(
                    data, size, subsampling, box, scale=scale, channels=how.channels
                )

            store(ReadPicture(size, region), view, out, how)
            return size
        except ValueError:
            pass
    pixels = _by_pillow(data, how, where)
    store_pixels(pixels, out, how, draws, where=where)
    return pixels.shape[0], pixels.shape[1]


def pixels_header(size: Size, channels: int) -> bytes:
    """Spell what stands before the pixels of a PPM (3 channels) or PGM (1)."""
    return b"P%d\n%d %d\n255\n" % ({1: 5, 3: 6}[channels], size[1], size[0])


def are_pixels(data: memoryview | Pixels) -> bool:
    """Whether a picture as it is kept holds its pixels as they are."""
    return data.ndim > 1 or PIXELS.match(bytes(data[:20])) is not None


def _plain_pixels(data: memoryview | Pixels, channels: int) -> Pixels | None:
    """View the pixels of a picture that is nothing else: uint8[height, width, channels]."""
    found = PIXELS.match(bytes(data[:20]))
    if found is None:
        return None
    kind, width, height = map(int, found.groups())
    size = height, width, channels
    if kind != {1: 5, 3: 6}.get(channels) or len(data) - found.end() != math.prod(size):
        return None
    return np.frombuffer(data, np.uint8)[found.end() :].reshape(size)


def find_jpeg_view(
    data: memoryview | Pixels, out: Size, how: PictureDelivery, draws: Draws, *, where: str
) -> tuple[Size, PictureView] | None:
    """Find height and width of a JPEG that lies upright, and what of it is delivered.

    Args:
        data: The compressed picture.
        out: Height and width delivered.
        how: What of it is delivered.
        draws: Numbers of this sample; see `find_view`.
        where: Sample and field, for the message.

    Returns:
        None: It is another picture, or its header is not sound.

    Raises:
        FieldError: If it does not fit the crop, or comes out in another size.
    """
    if bytes(data[:2]) != JPEG_START or (how.upright and find_orientation(data) > UPRIGHT):
        return None
    try:
        size, _ = jpeg_header(data)
    except ValueError:
        return None
    return size, _view(size, out, how, draws, where)


def store_pixels(
    pixels: Pixels, out: Pixels, how: PictureDelivery, draws: Draws = MIDDLE, *, where: str
) -> None:
    """Bring decoded pixels, uint8[height, width, channels], to ``out``; see `decode_image`."""
    size = pixels.shape[0], pixels.shape[1]

    def region(box: Box, scale: int) -> Pixels:
        return pixels[box.top : box.top + box.height, box.left : box.left + box.width]

    view = _view(size, out.shape[:2], how, draws, where)
    store(ReadPicture(size, region), view, out, how)


def store(picture: ReadPicture, view: PictureView, out: Pixels, how: PictureDelivery) -> None:
    """Decode what a view shows, and resize it into ``out``."""
    whole = Box(0, 0, *picture.size)
    if view.resized != picture.size:
        if math.prod(view.resized) > MOST_RESIZED * math.prod(view.out):
            picture = _resized_by_parts(picture, view, how)
        else:
            pixels = picture.region(whole, _scale(whole, view.resized, how))
            if view.box == Box(0, 0, *view.resized):
                _put(pixels, out, view.flipped, how)
                return
            middle = np.empty((*view.resized, how.channels), np.uint8)
            _put(pixels, middle, False, how)
            picture = ReadPicture(view.resized, lambda box, _: middle[slices(box)])
        whole = Box(0, 0, *view.resized)
    inside = intersection(view.box, whole)
    if inside == view.box:
        _put(picture.region(inside, _scale(inside, view.out, how)), out, view.flipped, how)
        return
    # Beyond the edges nothing is resized.
    padded = np.full_like(out, how.fill)
    place = Box(inside.top - view.box.top, inside.left - view.box.left, *inside[2:])
    if inside.height and inside.width:
        padded[slices(place)] = picture.region(inside, 1)
    _put(padded, out, view.flipped, how)


def _resized_by_parts(picture: ReadPicture, view: PictureView, how: PictureDelivery) -> ReadPicture:
    """Resize a picture that would be huge then, as a line of pixels would: only what is shown.

    The region of a box comes in the size delivered, resized at once from the picture's own pixels.
    """
    scale = _scale(Box(0, 0, *picture.size), view.resized, how)

    def region(box: Box, _: int) -> Pixels:
        size = view.out if box == view.box else (box.height, box.width)
        down, across = (
            _span(
                box[axis], box[axis + 2], picture.size[axis], view.resized[axis], size[axis], scale
            )
            for axis in (0, 1)
        )
        own = Box(down.first, across.first, down.stop - down.first, across.stop - across.first)
        pixels = picture.region(own, scale)
        # Decoders that do not divide give all pixels.
        by_row, by_column = pixels.shape[0] / own.height, pixels.shape[1] / own.width
        shown = (
            across.start * by_column, down.start * by_row,
            min(across.end * by_column, pixels.shape[1]), min(down.end * by_row, pixels.shape[0]),
        )  # fmt: skip
        kind = Image.Resampling.NEAREST if how.classes else Image.Resampling.BILINEAR
        planes = [
            Image.fromarray(np.ascontiguousarray(pixels[..., channel])).resize(
                (size[1], size[0]), kind, shown
            )
            for channel in range(pixels.shape[2])
        ]
        return np.stack([np.asarray(plane) for plane in planes], 2)

    return ReadPicture(view.resized, region)


class _Span(NamedTuple):
    """Pixels [first, stop) of one side; between start and end, from the first on, lies a box."""

    first: int
    stop: int
    start: float
    end: float


def _span(place: int, length: int, side: int, resized: int, shown: int, scale: int) -> _Span:
    """Find of which pixels a part of a resized side is mixed; they begin at multiples of scale."""
    start, end = place * side / resized, (place + length) * side / resized
    reach = max((end - start) / shown, scale) + scale
    first = max(int((start - reach) // scale) * scale, 0)
    stop = min(math.ceil((end + reach) / scale) * scale, side)
    return _Span(first, stop, start - first, min(end, side) - first)


def _put(pixels: Pixels, out: Pixels, flipped: bool, how: PictureDelivery) -> None:
    """Resize pixels to ``out``, with antialiasing where they are colours."""
    if pixels.shape == out.shape and not flipped:
        out[...] = pixels
        return
    with _one_thread():
        _resize(pixels, out, flipped, how)


def _resize(pixels: Pixels, out: Pixels, flipped: bool, how: PictureDelivery) -> None:
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


def _view(size: Size, out: Size, how: PictureDelivery, draws: Draws, where: str) -> PictureView:
    view = find_view(size, how.resize, how.crop, how.flip, draws)
    if isinstance(view, str):
        raise FieldError(f"{where}: {view}")
    if view.out != out:
        raise FieldError(
            f"{where}: the image is {view.out[0]} x {view.out[1]} (height x width), expected "
            f"{out[0]} x {out[1]} like the first; declare the size to bring all to: "
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
        with Image.open(io.BytesIO(as_stored(data))) as image:
            lies_on_side = upright and find_orientation(data, image.info) > 4
            return (image.width, image.height) if lies_on_side else (image.height, image.width)
    except PILLOW_ERRORS as error:
        raise _undecodable(data, where, error) from error


def open_picture(
    data: bytes | memoryview | Pixels,
    *,
    upright: bool = True,
    draft: tuple[str, Size] | None = None,
) -> Image.Image:
    """Load a picture with Pillow.

    Args:
        data: The compressed picture.
        upright: As it is seen, not as it is stored, where the two differ.
        draft: Mode and size for `Image.draft`: a decoder may shrink a large JPEG for free.

    Raises:
        PILLOW_ERRORS: If it does not decode.
    """
    with Image.open(io.BytesIO(as_stored(data))) as image:
        if draft is not None:
            image.draft(*draft)
        image.load()
        orientation = find_orientation(data, image.info) if upright else UPRIGHT
        return image if orientation == UPRIGHT else image.transpose(UPRIGHT_BY[orientation - 2])


def check_decodes(data: memoryview | Pixels, how: PictureDelivery, *, where: str) -> None:
    """Decode a whole picture, whatever of it is delivered.

    Raises:
        FieldError: If it does not decode, or holds what the field cannot.
    """
    is_jpeg = bytes(data[:2]) == JPEG_START
    # To a decoder zeros in place of data are codes as others are.
    if is_jpeg and not any(data[-NUM_ZEROS:]) and not is_whole(memoryview(bytes(data))):
        raise _undecodable(data, where, ValueError("it ends in zeros, without the mark of its end"))
    if is_jpeg and not how.classes:
        try:
            simplejpeg.decode_jpeg(data, COLORS[how.channels])
            return
        except ValueError as error:
            # Pillow fills what is missing before the mark of the end with gray.
            if "premature end" in str(error):
                raise _undecodable(data, where, error) from error
    _by_pillow(data, how, where)


def _by_pillow(data: memoryview | Pixels, how: PictureDelivery, where: str) -> Pixels:
    try:
        image = open_picture(data, upright=how.upright)
        if how.classes and image.mode in ("L", "I"):
            image = _as_numbered(image, data, where)
        return _pixels(image, how, where)
    except PILLOW_ERRORS as error:
        raise _undecodable(data, where, error) from error


def _as_numbered(image: Image.Image, data: memoryview | Pixels, where: str) -> Image.Image:
    """Bring gray back to the numbers in the file, which Pillow stretches to 8 or 16 bits."""
    with Image.open(io.BytesIO(as_stored(data))) as unread:
        codec, _, _, args = unread.tile[0] if unread.tile else ("", None, 0, None)
    raw_mode, most = args[:2] if isinstance(args, tuple) and len(args) > 1 else (args, 0)
    if raw_mode in ("L;I", "L;2I", "L;4I"):
        raise FieldError(
            f"{where}: says that 0 is white, which turns its numbers around, expected class "
            "numbers as they are; write the mask as PNG"
        )
    most = most if codec in ("ppm", "ppm_plain") else {"L;2": 3, "L;4": 15}.get(raw_mode, 0)
    if not most:
        return image
    stretched = 255 if image.mode == "L" else 65535
    numbers = (np.asarray(image, np.int64) * most + stretched // 2) // stretched
    return Image.fromarray(numbers.astype(np.uint8 if image.mode == "L" else np.int32))


def _pixels(image: Image.Image, how: PictureDelivery, where: str) -> Pixels:
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


def _scale(box: Box, out: Size, how: PictureDelivery) -> int:
    """Choose by what a JPEG is divided while it is decoded: class numbers are never averaged."""
    return 1 if how.classes else find_scale(box, out)


def slices(box: Box) -> tuple[slice, slice]:
    """Give the rows and columns of a box."""
    return slice(box.top, box.top + box.height), slice(box.left, box.left + box.width)


def intersection(box: Box, other: Box) -> Box:
    """Find what two boxes have in common; a side of it may be 0."""
    top, left = max(box.top, other.top), max(box.left, other.left)
    bottom = min(box.top + box.height, other.top + other.height)
    right = min(box.left + box.width, other.left + other.width)
    return Box(top, left, max(bottom - top, 0), max(right - left, 0))


def _undecodable(data: memoryview | Pixels, where: str, error: Exception) -> FieldError:
    why = "in no format that is known" if isinstance(error, UnidentifiedImageError) else error
    return FieldError(
        f"{where}: {len(data)} bytes beginning {bytes(data[:8])!r} do not decode ({why}), "
        "expected a JPEG, PNG or another image that Pillow reads; repair the sample, or declare "
        "Bytes"
    )
