"""Parts of JPEG pictures -> pixels: only the region and the scale that are needed, without the GIL.

With libjpeg-turbo 3 (the `turbojpeg` wheel, or the system's library) rows and blocks outside of a
region are not transformed to pixels. Without it whole pictures are decoded by simplejpeg: the
pixels are the same, bit for bit.
"""

import ctypes
import ctypes.util
import functools
import importlib.util
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import simplejpeg
from numpy.typing import NDArray

from dataio.rows.views import Box, Size

Pixels = NDArray[np.uint8]

COLORS = {1: "GRAY", 3: "RGB", 4: "RGBA"}
BLOCK = {"Gray": 8, "444": 8, "440": 8, "422": 16, "420": 16, "411": 32}
"""Width in pixels of the units that a region can begin at, by the subsampling of colours."""

NEIGHBOURS = 2
"""Pixels at each side of a region that its colours are smoothed with."""

# The numbers of libjpeg-turbo's turbojpeg.h, version 3.
DECOMPRESS = 1
STOP_ON_WARNING = 0
PIXEL_FORMAT = {1: 6, 3: 0, 4: 7}


class _Region(ctypes.Structure):
    _fields_ = (("x", ctypes.c_int), ("y", ctypes.c_int), ("w", ctypes.c_int), ("h", ctypes.c_int))


class _Scale(ctypes.Structure):
    _fields_ = (("num", ctypes.c_int), ("denom", ctypes.c_int))


@functools.cache
def turbojpeg() -> ctypes.CDLL | None:
    """Find libjpeg-turbo's library, 3.0 or later; None where there is none."""
    for path in _candidates():
        try:
            library = ctypes.CDLL(path)
            library.tj3SetCroppingRegion.argtypes = [ctypes.c_void_p, _Region]
        except (OSError, AttributeError):
            continue
        library.tj3Init.restype = ctypes.c_void_p
        library.tj3Init.argtypes = [ctypes.c_int]
        library.tj3Destroy.argtypes = [ctypes.c_void_p]
        library.tj3Destroy.restype = None
        library.tj3Set.argtypes = [ctypes.c_void_p, ctypes.c_int, ctypes.c_int]
        library.tj3SetScalingFactor.argtypes = [ctypes.c_void_p, _Scale]
        address, integer = ctypes.c_void_p, ctypes.c_int
        library.tj3DecompressHeader.argtypes = [address, address, ctypes.c_size_t]
        library.tj3Decompress8.argtypes = [
            address, address, ctypes.c_size_t, address, integer, integer,
        ]  # fmt: skip
        return library
    return None


def _candidates() -> Iterator[str]:
    yield str(Path(sys.prefix) / "lib" / "libturbojpeg.so.0")
    spec = importlib.util.find_spec("turbojpeg")
    if spec is not None and spec.origin is not None:
        yield from map(str, Path(spec.origin).parent.glob("turbojpeg.libs/libturbojpeg*"))
        yield from map(str, Path(spec.origin).parent.glob(".dylibs/libturbojpeg*"))
    # Last: it runs the linker.
    yield ctypes.util.find_library("turbojpeg") or "libturbojpeg.so.0"


class _Memory:
    """A thread's own memory for pixels."""

    def __init__(self) -> None:
        self._memory = np.empty(0, np.uint8)

    def take(self, shape: tuple[int, int, int]) -> Pixels:
        """Hand out the thread's memory, which its next call reuses."""
        num_bytes = shape[0] * shape[1] * shape[2]
        if len(self._memory) < num_bytes:
            self._memory = np.empty(num_bytes, np.uint8)
        return self._memory[:num_bytes].reshape(shape)


_THREAD = threading.local()


def _memory() -> _Memory:
    found = getattr(_THREAD, "memory", None)
    if found is None:
        found = _THREAD.memory = _Memory()
    assert isinstance(found, _Memory)
    return found


def jpeg_header(data: memoryview | Pixels) -> tuple[Size, str]:
    """Read a JPEG's height and width, and how its colours are subsampled.

    Raises:
        ValueError: If it has no sound header, or inks instead of colours.
    """
    try:
        height, width, colors, subsampling = simplejpeg.decode_jpeg_header(data)
    except KeyError as error:
        raise ValueError(f"subsampling of number {error} has no name") from error
    if colors not in ("Gray", "YCbCr", "RGB"):
        raise ValueError(f"colours are {colors}")
    return (height, width), subsampling


def decode_region(
    data: memoryview | Pixels, size: Size, subsampling: str, box: Box, *, scale: int, channels: int
) -> Pixels:
    """Decode a box of a JPEG.

    Args:
        data: The picture.
        size: As its header has it.
        subsampling: As its header has it.
        box: Inside of the picture, in its pixels.
        scale: What heights and widths are divided by, one of `SCALES`; sides are rounded so that
            nothing of the box is lost.
        channels: 1, 3 or 4.

    Returns:
        uint8[height, width, channels], a view of the calling thread's memory: valid until the
        thread decodes again.

    Raises:
        ValueError: If the data is not a sound JPEG of colours that the decoder knows.
    """
    height, width = -(-size[0] // scale), -(-size[1] // scale)
    top, left = box.top // scale, box.left // scale
    bottom = min(-(-(box.top + box.height) // scale), height)
    right = min(-(-(box.left + box.width) // scale), width)
    library = turbojpeg()
    # One for each picture, within a microsecond: another's tables would stand in for those that a
    # picture lacks.
    handle = None if library is None else library.tj3Init(DECOMPRESS)
    if library is None or handle is None:
        whole = _memory().take((height, width, channels))
        simplejpeg.decode_jpeg(
            data, COLORS[channels], min_height=height, min_width=width, buffer=whole
        )
        return whole[top:bottom, left:right]
    library.tj3Set(handle, STOP_ON_WARNING, 1)
    # Colours are smoothed with their neighbours: these keep the edges as they are in the whole.
    block = max(BLOCK.get(subsampling, 32) // scale, 1)
    start = max(left - NEIGHBOURS, 0) // block * block
    stop = min(right + NEIGHBOURS, width)
    pixels = _memory().take((bottom - top, stop - start, channels))
    source = data if isinstance(data, np.ndarray) else np.frombuffer(data, np.uint8)
    where, length = source.ctypes.data, len(source)
    failed = (
        library.tj3DecompressHeader(handle, where, length)
        or library.tj3SetScalingFactor(handle, _Scale(1, scale))
        or library.tj3SetCroppingRegion(handle, _Region(start, top, stop - start, bottom - top))
        or library.tj3Decompress8(
            handle, where, length, pixels.ctypes.data, 0, PIXEL_FORMAT[channels]
        )
    )
    library.tj3Destroy(handle)
    if failed:
        raise ValueError("the decoder refuses it")
    return pixels[:, left - start : right - start]
