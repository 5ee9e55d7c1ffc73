"""Compressed images -> pixels in a given buffer, without the GIL: threads decode side by side."""

import io

import numpy as np
import simplejpeg
from numpy.typing import NDArray
from PIL import Image, UnidentifiedImageError

from dataio.base.errors import FieldError

Pixels = NDArray[np.uint8]

JPEG_START = b"\xff\xd8"
JPEG_COLORS = {1: "GRAY", 3: "RGB", 4: "RGBA"}
PILLOW_MODES = {1: "L", 3: "RGB", 4: "RGBA"}
PILLOW_ERRORS = (
    OSError,
    ValueError,
    SyntaxError,
    EOFError,
    UnidentifiedImageError,
    Image.DecompressionBombError,
)


def decode_image(
    data: memoryview | Pixels, out: Pixels, *, where: str, resize: bool = False
) -> None:
    """Decode an image into ``out``; without a copy where it is a JPEG of that size.

    Args:
        data: The compressed image.
        out: uint8[height, width, channels], C-contiguous, channels 1, 3 or 4.
        where: Sample and field, for the message.
        resize: Scale (with antialiasing) an image that has another size, instead of refusing it.

    Raises:
        FieldError: If the image does not decode, or has another size.
    """
    # A JPEG that the strict decoder refuses may be merely untidy, or CMYK: Pillow has the last
    # word.
    if bytes(data[:2]) == JPEG_START and _decode_jpeg(data, out, where=where, resize=resize):
        return
    try:
        with Image.open(io.BytesIO(data.tobytes())) as image:
            _check_size((image.height, image.width), out, where=where, resize=resize)
            image.draft(PILLOW_MODES[out.shape[2]], (out.shape[1], out.shape[0]))
            _store(image.convert(PILLOW_MODES[out.shape[2]]), out)
    except PILLOW_ERRORS as error:
        raise _undecodable(data, where, error) from error


def image_shape(data: memoryview | Pixels, *, where: str = "image") -> tuple[int, int]:
    """Read an image's height and width from its header.

    Raises:
        FieldError: If it has none.
    """
    try:
        with Image.open(io.BytesIO(data.tobytes())) as image:
            return image.height, image.width
    except PILLOW_ERRORS as error:
        raise _undecodable(data, where, error) from error


def _decode_jpeg(data: memoryview | Pixels, out: Pixels, *, where: str, resize: bool) -> bool:
    height, width, channels = out.shape
    colors = JPEG_COLORS[channels]
    try:
        found = simplejpeg.decode_jpeg_header(data)[:2]
        if found == (height, width):
            simplejpeg.decode_jpeg(data, colors, buffer=out)
            return True
        _check_size(found, out, where=where, resize=resize)
        # The decoder halves, quarters ... for free; the rest of the way is Pillow's.
        pixels = simplejpeg.decode_jpeg(data, colors, min_height=height, min_width=width)
    except ValueError:
        return False
    _store(Image.fromarray(pixels[:, :, 0] if channels == 1 else pixels), out)
    return True


def _store(image: Image.Image, out: Pixels) -> None:
    height, width, _ = out.shape
    if image.size != (width, height):
        image = image.resize((width, height), Image.Resampling.BILINEAR)
    out[...] = np.asarray(image).reshape(out.shape)


def _check_size(found: tuple[int, int], out: Pixels, *, where: str, resize: bool) -> None:
    if not resize and found != out.shape[:2]:
        raise FieldError(
            f"{where}: the image is {found[0]} x {found[1]} (height x width), expected "
            f"{out.shape[0]} x {out.shape[1]} like the first; declare the size to bring all to: "
            "Image(..., size=...)"
        )


def _undecodable(data: memoryview | Pixels, where: str, error: Exception) -> FieldError:
    return FieldError(
        f"{where}: {len(data)} bytes beginning {bytes(data[:8])!r} do not decode ({error}), "
        "expected a JPEG, PNG or another image that Pillow reads; repair the sample, or declare "
        "Bytes"
    )
