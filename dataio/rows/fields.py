"""What a sample holds: for each field where it lies in the source, and its stored form."""

import dataclasses
import json
import math
import struct
from collections.abc import Mapping
from dataclasses import KW_ONLY, dataclass
from typing import ClassVar, Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from dataio.base.checked import Count, checked
from dataio.base.errors import FieldError
from dataio.rows.encoding import (
    TIMES,
    Raw,
    Stored,
    as_bytes,
    check_key,
    converted,
    dtype_for,
    is_numeric,
    is_wider,
    read_npy,
    read_number,
    read_whole,
    reject,
)
from dataio.rows.image import Image, ImageSize, Mask
from dataio.rows.patch import RandomPatch
from dataio.rows.rows import FixedColumn, RowSchema
from dataio.rows.tiles import Tiles

__all__ = [
    "Array",
    "Bytes",
    "Field",
    "Float",
    "Image",
    "ImageSize",
    "Int",
    "Mask",
    "RandomPatch",
    "Raw",
    "Stored",
    "Text",
    "Tokens",
]

RESERVED_NAMES = ("weight", "sample_id", "slot", "valid")
"""What every batch holds beside its fields."""


class Field(Protocol):
    """One field of a sample.

    A cache holds rows of one declaration: of another kind, or with another value of any attribute,
    a field is stored anew, but for the attributes that its class names in ``DELIVERED``, if it
    does: those that decide only how it is delivered.
    """

    @property
    def key(self) -> str:
        """Tar extension ("jpg", "seg.png"; "__key__" is the sample's name), or column."""
        ...

    def column(self, name: str) -> FixedColumn | None:
        """Describe the stored form; None if its length varies from row to row."""
        ...

    def encode(self, raw: Raw, where: str) -> Stored:
        """Turn a value of the source into the bytes that are kept.

        Args:
            raw: The value.
            where: Shard, sample and field, for the message.

        Raises:
            FieldError: If the value is not what the field declares.
        """
        ...


@runtime_checkable
class Decodes(Protocol):
    """A field that says itself what is delivered of the bytes that are kept.

    For fields whose ``column`` is None.
    """

    def decode(self, data: memoryview, where: str) -> object:
        """Turn kept bytes into what is delivered, on any of the loader's threads or processes.

        Args:
            data: What ``encode`` returned. It is read-only, and gone after the call.
            where: Sample and field, for the message.

        Returns:
            An array, a tensor or a number: stacked, so of one shape and dtype in all rows of a
            batch; or these in an `AsList`, bytes, text or any other object: delivered in a list.

        Raises:
            FieldError: If the bytes are not what the field declares; so is every other exception.
        """
        ...


@checked
@dataclass(frozen=True)
class Bytes:
    """Bytes of any length, delivered as they are in a list[bytes]."""

    key: str

    def __post_init__(self) -> None:
        check_key(self)

    def column(self, name: str) -> None:
        return None

    def encode(self, raw: Raw, where: str) -> Stored:
        return as_bytes(self, raw, where)


@checked
@dataclass(frozen=True)
class Text:
    """UTF-8 text of any length, delivered in a list[str]."""

    key: str

    def __post_init__(self) -> None:
        check_key(self)

    def column(self, name: str) -> None:
        return None

    def encode(self, raw: Raw, where: str) -> Stored:
        data = raw.encode(errors="surrogatepass") if isinstance(raw, str) else raw
        data = as_bytes(self, data, where)
        try:
            str(data, "utf-8")
        except UnicodeDecodeError as error:
            reject(self, data, where, f"UTF-8 text ({error.reason})", "Bytes", error)
        return data


@checked
@dataclass(frozen=True)
class Int:
    """A whole number (ASCII digits in tar), delivered as int64."""

    key: str

    def __post_init__(self) -> None:
        check_key(self)

    def column(self, name: str) -> FixedColumn:
        return FixedColumn(name, "<i8")

    def encode(self, raw: Raw, where: str) -> Stored:
        try:
            return struct.pack("<q", read_whole(raw))
        except (ValueError, TypeError, struct.error) as error:
            reject(self, raw, where, "a whole number of 64 bits", other_for(self, raw), error)


@checked
@dataclass(frozen=True)
class Float:
    """A number (ASCII in tar), delivered as float32, to which fractions are rounded."""

    key: str

    def __post_init__(self) -> None:
        check_key(self)

    def column(self, name: str) -> FixedColumn:
        return FixedColumn(name, "<f4")

    def encode(self, raw: Raw, where: str) -> Stored:
        try:
            number = read_number(raw)
            stored = struct.pack("<f", number)
            (kept,) = struct.unpack("<f", stored)
            # As `converted` does it with many.
            if kept != number and (kept == 0 or float(number).is_integer()):
                raise ValueError(f"float32 makes {kept} of it")
            return stored
        except (ValueError, TypeError, ArithmeticError) as error:
            expected = "a number of 32 bits (whole ones are never rounded)"
            reject(self, raw, where, expected, other_for(self, raw), error)


@checked
@dataclass(frozen=True)
class Array:
    """An array of one shape: raw little-endian bytes, an ``.npy``, or a list column.

    Attributes:
        key: Extension or column.
        shape: Of a whole sample.
        dtype: Of its numbers.
        tiles: Cuts each sample among ranks; None: a rank holds whole ones. See docs/grids.md.
        patch: Deliver `RandomPatch` es of it; the cache keeps all of it. None: all is delivered.
    """

    DELIVERED: ClassVar = ("patch",)

    key: str
    shape: tuple[Count, ...]
    dtype: str
    tiles: Tiles | None = dataclasses.field(default=None, repr=False)
    _: KW_ONLY
    patch: RandomPatch | None = None

    def __post_init__(self) -> None:
        check_key(self)
        if self.tiles is not None:
            self.tiles.check(self.shape, f"Array({self.key!r})")
        if not is_numeric(self.dtype):
            raise ValueError(
                f"Array({self.key!r}): dtype {self.dtype!r} is not one of numbers; use "
                "float32 or such"
            )
        if self.tiles is not None and self.patch is not None:
            raise ValueError(
                f"Array({self.key!r}): has tiles and a patch, expected one of them, as a patch may "
                "lie on several ranks; leave one out"
            )
        cut = self.patch.shape if self.patch is not None else ()
        if len(cut) > len(self.shape) or any(map(int.__gt__, cut[::-1], self.shape[::-1])):
            raise ValueError(
                f"Array({self.key!r}): patch is {list(cut)}, must be no larger than the last axes "
                f"of {list(self.shape)}; give a smaller one"
            )

    @property
    def draws(self) -> bool:
        """Whether deliveries differ from epoch to epoch."""
        return self.patch is not None

    def column(self, name: str) -> FixedColumn:
        shape = self.shape
        # Of no rank's tile it is that of whole samples
        if self.tiles is not None and self.tiles.index is not None:
            shape = tuple(part.stop - part.start for part in self.tiles.box(shape))
        return FixedColumn(name, np.dtype(self.dtype).newbyteorder("<").str, shape)

    def encode(self, raw: Raw, where: str) -> Stored:
        expected = f"{self.dtype}{list(self.shape)}"
        if isinstance(raw, str):
            reject(self, raw, where, expected, "Text")
        if isinstance(raw, (int, float)):
            return self._checked(np.asarray(raw), where, has_dtype=False)
        if isinstance(raw, np.ndarray):
            return self._checked(raw, where)
        dtype = np.dtype(self.dtype)
        if bytes(raw[:6]) == np.lib.format.MAGIC_PREFIX:
            return self._checked(read_npy(self, raw, where, f"an .npy of {expected}"), where)
        if self.key.split(".")[-1] == "npy" or len(raw) != dtype.itemsize * math.prod(self.shape):
            reject(
                self, raw, where, f"the bytes of {expected}, or an .npy", "the true shape and dtype"
            )
        return raw

    def _checked(self, found: NDArray[np.generic], where: str, *, has_dtype: bool = True) -> bytes:
        """Take numbers of this shape; those that have a dtype of their own only to widen it."""
        dtype = np.dtype(self.dtype).newbyteorder("<")
        own = np.dtype(np.int64) if found.dtype.kind in TIMES else found.dtype
        stored, at = converted(found, dtype)
        if found.shape == self.shape and at < 0 and (is_wider(own, dtype) or not has_dtype):
            return stored.tobytes()
        refused = f", which does not hold {found.reshape(-1)[at]!s:.40}" if at >= 0 else ""
        raise FieldError(
            f"{where}: found {found.dtype}{list(found.shape)}, expected "
            f"{self.dtype}{list(self.shape)}{refused}; declare the true shape and dtype, which all "
            "samples must share"
        )


@checked
@dataclass(frozen=True)
class Tokens:
    """Numbers in one dimension, as many as each sample has.

    Raw little-endian bytes, an ``.npy``, or a list column. All of them are kept.

    Attributes:
        key: Extension or column.
        dtype: Of the numbers.
        length: Cut or pad to this many: delivered as dtype[batch, length]. None: delivered as a
            list of tensors, each of its own length.
        pad: What is put behind the numbers of a shorter sample.
    """

    DELIVERED: ClassVar = ("length", "pad")

    key: str
    dtype: str = "<i4"
    length: Count | None = None
    pad: int | float = 0

    def __post_init__(self) -> None:
        check_key(self)
        if not is_numeric(self.dtype):
            raise ValueError(
                f"Tokens({self.key!r}): dtype {self.dtype!r} is not one of numbers; use int32 or "
                "such"
            )
        if converted(np.asarray(self.pad), np.dtype(self.dtype))[1] >= 0:
            raise ValueError(
                f"Tokens({self.key!r}): pad is {self.pad}, must be a number of {self.dtype}"
            )

    def column(self, name: str) -> None:
        return None

    def encode(self, raw: Raw, where: str) -> Stored:
        dtype = np.dtype(self.dtype).newbyteorder("<")
        expected = f"numbers of {np.dtype(self.dtype).name} in one dimension"
        if isinstance(raw, (bytes, memoryview)):
            if self.key.split(".")[-1] != "npy" and bytes(raw[:6]) != np.lib.format.MAGIC_PREFIX:
                if len(raw) % dtype.itemsize:
                    reject(self, raw, where, f"{expected}, as raw bytes or an .npy", "Bytes")
                return raw
            raw = read_npy(self, raw, where, expected)
        if isinstance(raw, str):
            reject(self, raw, where, expected, "Text")
        found = raw if isinstance(raw, np.ndarray) else np.asarray(raw)
        if found.ndim != 1:
            reject(self, found, where, expected, "Array")
        stored, at = converted(found, dtype)
        if at >= 0:
            number = found[at]
            refused = f"{expected}, which do not hold {number!s:.40}"
            reject(self, found, where, refused, other_for(self, number))
        return stored.tobytes()


def other_for(field: Field, raw: object) -> str:
    """Name what to declare in place of a field that does not hold a number, for its message."""
    try:
        number: object = read_number(raw)
        dtype = dtype_for(number)
    except (ValueError, TypeError, ArithmeticError):
        number, dtype = None, ""
    if not isinstance(field, (Int, Float)):
        return f"the dtype {dtype}" if dtype else "Text"
    array = f"Array({field.key!r}, (), {dtype!r})" if dtype else "Array"
    other = "Bytes" if isinstance(raw, (bytes, memoryview, str)) else array
    is_whole = isinstance(number, (int, float)) and abs(number) < 1 << 63 and number == int(number)
    kind = "Float or " if isinstance(field, Int) else "Int or " if is_whole else ""
    return kind + other


def row_schema(fields: Mapping[str, Field]) -> RowSchema:
    """Describe how rows of these fields are stored, in the order given.

    Raises:
        ValueError: If there is no field, or one has a name that every batch holds already.
    """
    if not fields:
        raise ValueError('fields: none given; name at least one, such as {"image": Image("jpg")}')
    for name in fields:
        if name in RESERVED_NAMES:
            raise ValueError(
                f"fields: {name!r} is what the batch itself holds (as "
                f"{', '.join(RESERVED_NAMES)}); choose another name"
            )
    columns = {name: field.column(name) for name, field in fields.items()}
    for name, field in fields.items():
        # An image has a word of that name
        if isinstance(field, Decodes) and not (columns[name] is None or isinstance(field, Image)):
            raise ValueError(
                f"fields: {name!r} is {type(field).__name__}, which has a decode and a column, "
                "expected one of them; let column return None, or change samples in a transform"
            )
    return RowSchema(
        tuple(column for column in columns.values() if column is not None),
        tuple(name for name, column in columns.items() if column is None),
    )


def declarations(fields: Mapping[str, Field]) -> dict[str, dict[str, object]]:
    """Describe for each field all that decides what is stored of a sample, beside the row's schema.

    Returns:
        By name the kind and its attributes, as JSON.
    """
    return {name: _declaration(field) for name, field in fields.items()}


def _declaration(field: Field) -> dict[str, object]:
    stored = {k: v for k, v in vars(field).items() if k not in getattr(field, "DELIVERED", ())}
    if "dtype" in stored:
        stored["dtype"] = np.dtype(stored["dtype"]).newbyteorder("<").str
    if isinstance(field, Array) and (tiles := stored.pop("tiles")) is not None:
        # Ranks of two tiles stage both, also where halos make them the same part
        stored["tile"] = tiles.index
        stored["box"] = [(part.start, part.stop) for part in tiles.box(field.shape)]
    described: dict[str, object] = json.loads(json.dumps(stored, default=repr))
    return {"kind": type(field).__name__, **described}
