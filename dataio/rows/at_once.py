"""Many pictures -> pixels in one call that holds the interpreter for none of them.

What `decode_image` and `store_pixels` do for a picture, compiled code (pictures.c) does for all of
a share, bit for bit; those of a rare kind, and those with a fault, it leaves to them. It is built
into wheels where there is a compiler. Without it, or without libjpeg-turbo 3, it leaves all.
"""

import ctypes
import functools
import hashlib
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from dataio.rows.image import Image
from dataio.rows.jpeg import PIXEL_FORMAT, turbojpeg
from dataio.rows.views import RandomCrop, RandomResizedCrop

DONE, LEFT, SKIPPED = range(3)
"""States of a picture: delivered, left to others, or, beforehand, not to be delivered."""

TURBO = (
    "tj3Init", "tj3Destroy", "tj3Set", "tj3Get", "tj3DecompressHeader", "tj3SetScalingFactor",
    "tj3SetCroppingRegion", "tj3Decompress8",
)  # fmt: skip
RESIZES = ("NoneType", "Resize", "ResizeShort", "ResizeLong")
CROPS = ("NoneType", "CenterCrop", "RandomCrop", "RandomResizedCrop", "Pad")


class _How(ctypes.Structure):
    """As `How` in pictures.c."""

    _fields_ = tuple(
        (name, ctypes.c_int)
        for name in (
            "channels", "format", "fill", "upright", "resize", "crop", "resize_height",
            "resize_width", "height", "width", "padding", "kept_height", "kept_width",
        )
    ) + tuple(
        (name, ctypes.c_double) for name in ("flip", "smallest", "largest", "narrowest", "widest")
    )  # fmt: skip


@functools.cache
def library() -> ctypes.CDLL | None:
    """Find the compiled code; None where it was not built, or of another version of its source."""
    directory = Path(__file__).parent
    for path in directory.glob("_pictures.*"):
        try:
            found = ctypes.CDLL(str(path))
            source = (directory / "pictures.c").read_bytes()
            built_of = hashlib.sha256(source).hexdigest().encode()
            # One that takes other arguments would write anywhere.
            if (ctypes.c_char * len(built_of)).in_dll(found, "tonari_source").raw != built_of:
                continue
            found.tonari_pictures.argtypes = (
                [ctypes.c_void_p] * 2 + [ctypes.c_int64] + [ctypes.c_void_p] * 6
            )
            found.tonari_pictures.restype = None
        except (OSError, AttributeError, ValueError):
            continue
        return found
    return None


@functools.cache
def _turbo() -> ctypes.Array[ctypes.c_void_p] | None:
    decoder = turbojpeg()
    if decoder is None:
        return None
    addresses = (ctypes.cast(getattr(decoder, name), ctypes.c_void_p) for name in TURBO)
    return (ctypes.c_void_p * len(TURBO))(*addresses)


class PicturesAtOnce:
    """Delivers the pictures of a field.

    Args:
        kind: The field.
        out: Height and width delivered.
        kept: Height and width of pixels; None: the pictures are compressed.
    """

    def __init__(
        self, kind: Image, out: tuple[int, int], kept: tuple[int, int] | None = None
    ) -> None:
        resize, crop = kind.resize, kind.crop
        sides = (0, 0) if resize is None else resize.fixed or (resize.size, resize.size)
        drawn = crop if isinstance(crop, RandomResizedCrop) else RandomResizedCrop(1)
        self._how = _How(
            kind.channels, PIXEL_FORMAT[kind.channels], kind.fill, kind.upright,
            RESIZES.index(type(resize).__name__), CROPS.index(type(crop).__name__), *sides, *out,
            crop.padding if isinstance(crop, RandomCrop) else 0, *(kept or (0, 0)),
            kind.flip, *drawn.scale, *drawn.ratio,
        )  # fmt: skip
        self._library, self._turbo = library(), _turbo()
        self.is_there = self._library is not None and (kept is not None or self._turbo is not None)

    def deliver(
        self,
        addresses: NDArray[np.uint64],
        lengths: NDArray[np.int64],
        draws: NDArray[np.float64] | None,
        out: NDArray[np.uint8],
        states: NDArray[np.uint8],
    ) -> NDArray[np.int32]:
        """Deliver pictures. Thread-safe.

        Args:
            addresses: uint64[n]: Where each picture lies.
            lengths: int64[n]: Its bytes.
            draws: float64[n, NUM_DRAWS], C-contiguous: Numbers of each; None: nothing is drawn.
            out: uint8[n, height, width, channels], C-contiguous.
            states: uint8[n]: `SKIPPED`, or anything else, which becomes `DONE` or `LEFT`.

        Returns:
            int32[n, 2]: Height and width of the compressed ones that were delivered.
        """
        sizes = np.empty((len(addresses), 2), np.int32)
        assert self._library is not None
        self._library.tonari_pictures(
            self._turbo, ctypes.byref(self._how), len(addresses),
            *(array.ctypes.data for array in (addresses, lengths)),
            None if draws is None else draws.ctypes.data,
            *(array.ctypes.data for array in (out, sizes, states)),
        )  # fmt: skip
        return sizes
