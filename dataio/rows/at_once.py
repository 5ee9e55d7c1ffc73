"""Many pictures -> pixels in one call that holds the interpreter for none of them.

What `decode_image` and `store_pixels` do for a picture, compiled code (pictures.c) does for all of
a share, bit for bit; those of a rare kind, and those with a fault, it leaves to them. It is built
into wheels where there is a compiler. Without it, or without libjpeg-turbo 3, it leaves all.
"""

import ctypes
import functools
import hashlib
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dataio.base.seeding import Key
from dataio.rows.image import Image
from dataio.rows.jpeg import PIXEL_FORMAT, turbojpeg
from dataio.rows.views import RandomCrop, RandomResizedCrop

DONE, LEFT, SKIPPED = range(3)
"""States of a picture: delivered, left to others, or, beforehand, not to be delivered."""

TURBO = (
    "tj3Init", "tj3Destroy", "tj3Set", "tj3Get", "tj3DecompressHeader", "tj3SetScalingFactor",
    "tj3SetCroppingRegion", "tj3Decompress8",
)  # fmt: skip
POINTER = ctypes.c_void_p
FUNCTIONS = {
    "pictures": (None, POINTER), "open": (None, POINTER), "close": (None, POINTER),
    "put": (None, POINTER, POINTER),
    "serve": (POINTER, POINTER, POINTER, POINTER),
    "wait": (ctypes.c_int, POINTER, POINTER, ctypes.c_double),
}  # fmt: skip
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


class PicturesCall(ctypes.Structure):
    """Pictures to be delivered, as `Pictures` in pictures.c; it keeps their arrays alive.

    Attributes:
        states: uint8[n]: Of each picture.
        sizes: int32[n, 2]: Height and width of the compressed ones that were delivered.
        undone: Those that no thread has delivered yet, where threads do.
        nanoseconds: That threads have spent on them.
        cpu_nanoseconds: Of their processors' time.
    """

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("_turbo", "_how")),
        *((name, ctypes.c_uint64) for name in ("_num", "_low", "_high")),
        *(
            (f"_{name}", ctypes.c_void_p)
            for name in ("addresses", "lengths", "numbers", "out", "sizes", "states", "next")
        ),
        *(
            (name, ctypes.c_int64)
            for name in ("_begun", "undone", "nanoseconds", "cpu_nanoseconds")
        ),
    )

    def __init__(
        self,
        constant: tuple[int | None, ...],
        given: tuple[NDArray[Any] | None, ...],
        states: NDArray[np.uint8],
    ) -> None:
        self.sizes, self.states = np.empty((len(states), 2), np.int32), states
        self._arrays = *given, self.sizes, states
        addresses = (array if array is None else array.ctypes.data for array in self._arrays)
        super().__init__(*constant, *addresses)


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
            for name, (result, *given) in FUNCTIONS.items():
                function = getattr(found, f"tonari_{name}")
                function.restype, function.argtypes = result, given
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
        turbo = None if self._turbo is None else ctypes.addressof(self._turbo)
        self._addresses = turbo, ctypes.addressof(self._how)
        self.is_there = self._library is not None and (kept is not None or self._turbo is not None)

    def call(
        self,
        addresses: NDArray[np.uint64],
        lengths: NDArray[np.int64],
        drawn: tuple[Key, NDArray[np.int64]] | None,
        out: NDArray[np.uint8],
        states: NDArray[np.uint8],
    ) -> PicturesCall:
        """Describe pictures to be delivered.

        Args:
            addresses: uint64[n]: Where each picture lies; that memory must stay.
            lengths: int64[n]: Its bytes.
            drawn: The stream, and int64[n], by which each draws; None: nothing is drawn.
            out: uint8[n, height, width, channels], C-contiguous.
            states: uint8[n]: `SKIPPED`, or anything else, which becomes `DONE` or `LEFT`.
        """
        stream, numbers = drawn or (0, None)
        constant = *self._addresses, len(states), stream & (2**64 - 1), stream >> 64
        return PicturesCall(constant, (addresses, lengths, numbers, out), states)

    def deliver(self, call: PicturesCall) -> None:
        """Deliver pictures. Thread-safe."""
        assert self._library is not None
        self._library.tonari_pictures(ctypes.byref(call))
