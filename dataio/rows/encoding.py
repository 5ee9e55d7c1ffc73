"""Check and encode a value of the source, whatever its field declares.

The rule of numbers: each arrives as it is, or is refused. All sources and fields pass here.
"""

import io
import math
import threading
from decimal import Decimal
from typing import Any, NoReturn, Protocol

import numpy as np
from numpy.typing import NDArray

from dataio.base.errors import FieldError

NPY_LOCK = threading.Lock()
"""One thread at a time reads the header of an ``.npy``: it is a Python literal, and CPython 3.11
may fail with a SystemError ("AST constructor recursion depth mismatch") when another thread comes
in while one is being parsed."""

Raw = bytes | memoryview | str | int | float | NDArray[np.generic]
"""A value as the source has it: a tar member's bytes, or a column's value."""

Stored = bytes | memoryview
"""A value as the cache keeps it."""


class Declared(Protocol):
    """A field, as messages name it."""

    @property
    def key(self) -> str: ...


def check_key(field: Declared) -> None:
    """Refuse a key that names no extension and no column."""
    if not isinstance(field.key, str) or not field.key or field.key.startswith("."):
        raise ValueError(
            f"{type(field).__name__}: key is {field.key!r}, must be the extension without its dot, "
            f"or the column, that the field is read from"
        )


def is_numeric(dtype: str) -> bool:
    """Whether a dtype is one of numbers."""
    try:
        return np.dtype(dtype).kind in "biufc"
    except TypeError:
        return False


def read_npy(
    field: Declared, raw: bytes | memoryview, where: str, expected: str
) -> NDArray[np.generic]:
    """Read the array of an ``.npy``; FieldError if it is none."""
    try:
        with NPY_LOCK:
            file = io.BytesIO(raw)
            array = np.asarray(np.lib.format.read_array(file, allow_pickle=False))
    except (ValueError, EOFError) as error:
        reject(field, raw, where, expected, "Bytes", error)
    if behind := len(raw) - file.tell():
        reject(field, raw, where, f"{expected} without the {behind} bytes behind it", "Bytes")
    return array


def compress(field: Declared, pixels: NDArray[np.generic], where: str) -> bytes:
    """Turn pixels into a PNG."""
    # Pillow is not needed by those who only name fields.
    from PIL import Image as Picture

    file = io.BytesIO()
    pixels = pixels.astype(np.uint8) * 255 if pixels.dtype == np.bool_ else pixels
    try:
        if pixels.dtype != np.uint8 or 0 in pixels.shape:
            raise TypeError("not pixels")
        flat = pixels[:, :, 0] if pixels.shape[2:] == (1,) else pixels
        Picture.fromarray(flat).save(file, "PNG", compress_level=1)
    except (TypeError, ValueError, OSError) as error:
        expected = "a compressed image, or uint8[height, width, channels]"
        reject(field, pixels, where, expected, "Array", error)
    return file.getvalue()


def as_bytes(field: Declared, raw: object, where: str) -> bytes | memoryview:
    """Take bytes, or text as UTF-8; FieldError for anything else."""
    if isinstance(raw, str):
        try:
            return raw.encode()
        except UnicodeEncodeError as error:
            reject(field, raw, where, "text that UTF-8 can encode", "nothing", error)
    if isinstance(raw, (bytes, memoryview)):
        return raw
    reject(field, raw, where, "bytes", "Int, Float or Array")


def reject(
    field: Declared,
    raw: object,
    where: str,
    expected: str,
    other: str,
    cause: Exception | None = None,
) -> NoReturn:
    """Raise the FieldError of a value that is not as declared; it names the kind to declare."""
    if isinstance(raw, (bytes, memoryview)):
        shown = f"{bytes(raw[:32])!r} ({len(raw)} bytes)"
    elif isinstance(raw, np.ndarray):
        shown = f"{raw.dtype}{list(raw.shape)}"
    else:
        shown = f"{raw!r:.40}"
    raise FieldError(
        f"{where}: found {shown}, expected {expected}; declare {other} instead of "
        f"{type(field).__name__}({field.key!r}), or repair the sample"
    ) from cause


AT_ONCE = 1 << 16
"""Numbers whose copies stay in a core's cache."""
TIMES = "mM"
"""Kinds of dtypes of durations and of dates."""


def converted(
    found: NDArray[np.generic], dtype: np.dtype[np.generic]
) -> tuple[NDArray[np.generic], int]:
    """Bring numbers to a dtype, and find the first that it does not hold.

    Widening is free. A narrower dtype, or one of another kind, takes a number that it holds
    exactly: True is 1 and 2.0 is 2, while 2.5 and NaN are no whole numbers, and a complex number is
    no real one. One exception: of a floating dtype a *fraction* is rounded to the nearest, which is
    what declaring it means; never to infinity or to zero, and a whole number never. A date, time or
    duration is the whole number of its units; NaT is none.

    Args:
        found: As the source has them.
        dtype: As the field declares it.

    Returns:
        dtype[...] of the same shape, which may be ``found`` itself; and the place, counted through
        all of them, of the first that is refused, or -1. Where one is, the array has no meaning.
    """
    if found.dtype.kind in TIMES:
        missing = np.ravel(np.isnat(found))
        if missing.any():
            return np.zeros(found.shape, dtype), int(missing.argmax())
        found = found.astype(np.int64)
    if found.dtype.kind not in "biufc" or (found.dtype.kind == "c" and dtype.kind != "c"):
        return np.zeros(found.shape, dtype), 0 if found.size else -1
    with np.errstate(all="ignore"):
        stored = found.astype(dtype, copy=False)
        if is_wider(found.dtype, dtype) or not found.size:
            return stored, -1
        refused = np.ravel(_changed(found, stored))
    at = int(refused.argmax())
    return stored, at if refused[at] else -1


def is_wider(found: np.dtype[np.generic], dtype: np.dtype[np.generic]) -> bool:
    """Whether a dtype holds every number of another."""
    # NumPy calls it safe to bring the 64 bits of a whole number to the 53 of float64.
    loses = found.kind in "iu" and found.itemsize == 8 and dtype.kind in "fc"
    return np.can_cast(found, dtype, "safe") and not loses


def _changed(found: NDArray[Any], stored: NDArray[Any]) -> NDArray[np.bool_]:
    """Say of each number whether the cast of it is refused."""
    if found.dtype.kind == "c":
        return _changed(found.real, stored.real) | _changed(found.imag, stored.imag)
    if stored.dtype.kind == "c":
        return _changed(found, stored.real)
    if found.dtype.kind == "f":
        return _rounded(found, stored) if stored.dtype.kind == "f" else _cut(found, stored)
    # NumPy compares whole numbers of all kinds exactly.
    return _inexact(found, stored) if stored.dtype.kind == "f" else np.asarray(found != stored)


def _rounded(found: NDArray[Any], stored: NDArray[Any]) -> NDArray[np.bool_]:
    """Of floating numbers in fewer bits: which were whole, or became infinity or zero."""
    limit = 1 << int(np.finfo(stored.dtype).nmant) + 1
    if _are_fractions(np.ravel(found), np.ravel(stored), limit):
        return np.zeros(found.shape, np.bool_)
    refused = np.isinf(stored) | (stored == 0) | (np.trunc(found) == found)
    return np.asarray((stored != found) & refused)


def _are_fractions(found: NDArray[Any], stored: NDArray[Any], limit: int) -> bool:
    """Whether all are below the limit, where nothing but a fraction is rounded, and none is lost.

    The usual case, in few passes over few numbers at a time.
    """
    for at in range(0, len(stored), AT_ONCE):
        part = np.abs(stored[at : at + AT_ONCE])
        if not part.max() < limit:
            return False
        if part.min() == 0 and found[at : at + AT_ONCE][part == 0].any():
            return False
    return True


def _inexact(found: NDArray[Any], stored: NDArray[Any]) -> NDArray[np.bool_]:
    """Of whole numbers that became floating: which are others now."""
    limit = 1 << int(np.finfo(stored.dtype).nmant) + 1
    if -limit <= int(found.min()) and int(found.max()) <= limit:
        return np.zeros(found.shape, np.bool_)
    wide = stored.astype(np.promote_types(stored.dtype, np.float64))
    end = float(int(np.iinfo(found.dtype).max) + 1)
    within = (-end <= wide) & (wide < end)
    return np.asarray(~within | (np.where(within, wide, 0).astype(found.dtype) != found))


def _cut(found: NDArray[Any], stored: NDArray[Any]) -> NDArray[np.bool_]:
    """Of floating numbers that became whole, or bools: which are others now."""
    wide = found.astype(np.promote_types(found.dtype, np.float64))
    if stored.dtype.kind == "b":
        return np.asarray(stored != wide)
    bounds = np.iinfo(stored.dtype)
    # The most itself may be no float64; the power of two behind it is.
    within = (float(bounds.min) <= wide) & (wide < float(int(bounds.max) + 1))
    return np.asarray(~within | (stored.astype(wide.dtype) != wide))


def read_number(raw: object) -> int | float:
    """Read one number, or the text of one.

    Raises:
        TypeError: If it is none.
        ValueError: If it is none, or text of a number that float64 makes another of.
        ArithmeticError: If it is text of a number beyond all that is read.
    """
    raw = _plain(raw)
    if isinstance(raw, str):
        number = float(raw)
        is_digits = abs(number) >= 2.0**53 and not set("eE.") & set(raw)
        # Other text is that of a float, whose last digits are none of the number's.
        if (is_digits or number == 0 or math.isinf(number)) and Decimal(raw) != number:
            raise ValueError(f"float64 makes {number} of it")
        return number
    if isinstance(raw, (int, float)):
        return raw
    raise TypeError(f"a {type(raw).__name__} is no number")


def read_whole(raw: object) -> int:
    """Read one whole number, or the digits of one.

    Raises:
        TypeError: If it is no number.
        ValueError: If it is none, or not whole.
    """
    raw = _plain(raw)
    if isinstance(raw, str):
        return int(raw)
    number = read_number(raw)
    if isinstance(number, float) and not number.is_integer():
        raise ValueError(f"{number} is not whole")
    return int(number)


def _plain(raw: object) -> object:
    """Bring bytes to text, and what NumPy has of one value to what Python has."""
    if isinstance(raw, (np.ndarray, np.generic)) and raw.ndim == 0:
        is_time = raw.dtype.kind in TIMES and not np.isnat(raw)
        raw = (raw.astype(np.int64) if is_time else raw).item()
    if isinstance(raw, (bytes, memoryview)):
        raw = str(raw, "ascii")
    if isinstance(raw, str) and "_" in raw:
        raise ValueError("digits in groups, as only Python writes them")
    return raw


def dtype_for(number: object) -> str:
    """Name a dtype that holds a number that another refused; "" if there is none."""
    if isinstance(number, float):
        return "float64"
    if isinstance(number, int):
        return (
            "int64" if -(1 << 63) <= number < 1 << 63 else "uint64" if 0 <= number < 1 << 64 else ""
        )
    return ""
