"""Check and encode a value of the source, whatever its field declares."""

import io
import threading
from typing import NoReturn, Protocol

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
            return np.asarray(np.lib.format.read_array(io.BytesIO(raw), allow_pickle=False))
    except (ValueError, EOFError) as error:
        reject(field, raw, where, expected, "Bytes", error)


def compress(field: Declared, pixels: NDArray[np.generic], where: str) -> bytes:
    """Turn pixels into a PNG."""
    # Pillow is not needed by those who only name fields.
    from PIL import Image as Picture

    file = io.BytesIO()
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
