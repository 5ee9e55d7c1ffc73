"""The table of values: kinds of source, kinds of field, and values at the edges of both.

A cell is right if the value arrives as the source has it, or is refused by an error that names the
sample and the field. What is right follows from the numbers as Python has them, not from our code.
"""

import datetime
import io
import json
import math
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from decimal import Decimal
from fractions import Fraction
from pathlib import Path
from typing import Any, NamedTuple

import h5py
import numpy as np
import pyarrow as pa
import pyarrow.feather as feather
import pyarrow.parquet as pq
import pytest
import torch

from dataio import ArrayFiles
from dataio.base.errors import DataioError, FieldError
from dataio.rows.fields import Array, Bytes, Field, Float, Int, Text, Tokens
from dataio.source import DatasetSource, NumpySource, Source, TransformedSource, open_source
from tests.dataio.source.formats.record_cases import framed, packed
from tests.dataio.source.shards import read_all, write_tar

DTYPES = "bool uint8 int32 int64 uint64 float16 float32 float64 complex64".split()
FIELDS: tuple[Field, ...] = (
    Int("x"), Float("x"), *(Array("x", (), dtype) for dtype in DTYPES), Array("x", (1,), "int64"),
    *(Array("x", (3,), dtype) for dtype in ("uint8", "int64", "float32")),
    Array("x", (2, 3), "float32"), Array("x", (3, 2), "int64"),
    Tokens("x"), Tokens("x", "uint8"), Tokens("x", "float32"), Text("x"), Bytes("x"),
)  # fmt: skip

WHOLE = (
    0, -1, 255, 256, 2**24, 2**24 + 1, 1_700_000_001, 2**31, 2**53 + 1, -(2**63), 2**63 - 1, 2**63,
    2**64 - 1, 2**70,
)  # fmt: skip
FLOATING = (
    0.1, 1.5, 2.0, -0.0, 2049.0, 70000.0, 16777217.0, 3.5e9 + 0.25, 1e20, 1e300, 1e-45, 1e-60,
    math.nan, math.inf, -math.inf,
)  # fmt: skip
TEXT = ("12", "0.1", "1700000001", "9007199254740993", "1_0", "1e400", "1e-400", "nan", "abc", "é")
LISTS: tuple[Any, ...] = (
    [1, 2, 300], [0.1, 1.5, 2.0], [1, 2, 2**24 + 1], [2**53 + 1, 0.5, 1], [1e300, 0.5, 1.0],
    [True, False, True], [-1, 0, 1], [math.nan, 1.0, 2.0], ["a", "b", "c"], [1, None, 2], [5],
    [[1, 2], [3, 4], [5, 6]], [[1, 2, 3], [4, 5, 6]], [1, 2, 3, 4, 5, 6], [[1, 2], [3]], [[7], [8]],
)  # fmt: skip
OTHERS: tuple[Any, ...] = (
    True, None, b"abc", b"12345678", Decimal("12.50"), Decimal("1700000001"),
    Decimal("9007199254740993"), datetime.datetime(2024, 5, 1), datetime.date(2024, 5, 1),
    np.float32(0.1), np.array([1, 2, 300], ">i4"), np.array(3, ">i8"), np.array([1.5, 2, 3]),
    np.array([0.1, 2, 3], np.float32), np.array([1, "a", 2.5], object), np.array([1, 2, 3], "u1"),
    np.datetime64("2024-05-01", "s"), np.datetime64("NaT", "s"), 1 + 2j,
)  # fmt: skip
VALUES = (*WHOLE, *FLOATING, *TEXT, *LISTS, *OTHERS)


class Held(NamedTuple):
    """What a source was made of.

    Attributes:
        source: The source.
        given: The value of sample 1, as the source has it: numbers of Python, lists, text or bytes.
        dtype: Its own, if it has one.
        key: Of the fields.
        raw: Its bytes, where the source has no more than these.
        listed: Whether the source has numbers only in lists, one too.
    """

    source: Source
    given: Any
    dtype: np.dtype[Any] | None = None
    key: str = "x"
    raw: bytes | None = None
    listed: bool = False


def usual(value: Any) -> Any:
    """Find a value of the same kind that most fields take, for sample 0."""
    if isinstance(value, np.ndarray | np.generic):
        return np.ones_like(value) if value.dtype.kind != "O" else value
    if isinstance(value, list):
        return [usual(each) for each in value]
    return type(value)(1) if isinstance(value, bool | int | float) else value


def plain(value: Any) -> Any:
    """Bring a value to Python's numbers."""
    if isinstance(value, np.ndarray | np.generic):
        kind = value.dtype.kind
        return (
            plain(value.astype(np.int64)) if kind == "M" and not np.isnat(value) else value.tolist()
        )
    return value


def is_of_json(value: Any) -> bool:
    if isinstance(value, list):
        return all(map(is_of_json, value))
    return value is None or isinstance(value, str | bool | int | float)


def json_lines(directory: Path, value: Any) -> Held | None:
    if not is_of_json(value):
        return None
    path = directory / "x.jsonl"
    path.write_text("".join(json.dumps({"x": each}) + "\n" for each in (usual(value), value)))
    return Held(open_source(str(path)), value)


def tar_of_json(directory: Path, value: Any) -> Held | None:
    if not is_of_json(value):
        return None
    members = [
        (f"{i}.json", json.dumps({"x": each}).encode())
        for i, each in enumerate((usual(value), value))
    ]
    path = write_tar(directory / "x.tar", members)
    return Held(open_source(str(path)), value, key="json.x")


def tar(directory: Path, value: Any) -> Held | None:
    """Text and bytes as they are, numbers by their digits, arrays as .npy."""
    if value is None or isinstance(value, bool | list | Decimal | datetime.date):
        return None

    def member(each: Any) -> bytes:
        if isinstance(each, np.ndarray | np.generic):
            file = io.BytesIO()
            np.save(file, each)
            return file.getvalue()
        return each if isinstance(each, bytes) else str(each).encode()

    members = [(f"{i}.x", member(each)) for i, each in enumerate((usual(value), value))]
    source = open_source(str(write_tar(directory / "x.tar", members)))
    is_array = isinstance(value, np.ndarray | np.generic)
    raw = member(value)
    return Held(
        source, plain(value) if is_array else raw, value.dtype if is_array else None, raw=raw
    )


def column(value: Any) -> pa.Array | None:
    if (isinstance(value, np.ndarray) and value.ndim) or isinstance(value, np.generic):
        value = value.tolist()
    try:
        return pa.array([usual(value), value])
    except OverflowError:
        return pa.array([1, value], pa.uint64()) if 0 < value < 2**64 else None
    except (pa.ArrowException, TypeError, ValueError):
        return None


def in_column(values: pa.Array) -> Any:
    if pa.types.is_temporal(values.type) and values[1].is_valid:
        return values[1].value
    return values.to_pylist()[1]


def parquet(directory: Path, value: Any) -> Held | None:
    values = column(value)
    if values is None:
        return None
    pq.write_table(pa.table({"x": values}), directory / "x.parquet")
    values = pq.read_table(directory / "x.parquet").column("x").combine_chunks()
    return Held(open_source(str(directory / "x.parquet")), in_column(values))


def arrow(directory: Path, value: Any) -> Held | None:
    values = column(value)
    if values is None:
        return None
    feather.write_feather(pa.table({"x": values}), str(directory / "x.arrow"), "uncompressed")
    return Held(open_source(str(directory / "x.arrow")), in_column(values))


def typed(value: Any) -> np.ndarray[Any, Any] | None:
    """Make of both samples an array that has a dtype."""
    try:
        array = np.array([usual(value), value])
    except (ValueError, OverflowError):
        return None
    return None if array.dtype.hasobject else array


def in_array(array: np.ndarray[Any, Any], source: Source) -> Held:
    return Held(source, plain(array[1]), array.dtype)


def arrays(directory: Path, value: Any) -> Held | None:
    array = typed(value)
    return None if array is None else in_array(array, NumpySource({"x": array}))


def npz(directory: Path, value: Any) -> Held | None:
    array = typed(value)
    if array is None:
        return None
    np.savez(directory / "x.npz", x=array)
    return in_array(array, ArrayFiles(directory / "x.npz").open())


def hdf5(directory: Path, value: Any) -> Held | None:
    array = typed(value)
    if array is None or array.dtype.kind not in "biufc":
        return None
    with h5py.File(directory / "x.h5", "w") as file:
        file["x"] = array
    return in_array(array, ArrayFiles(directory / "x.h5").open())


def dataset(directory: Path, value: Any) -> Held:
    own = value.dtype if isinstance(value, np.ndarray | np.generic) else None
    source = DatasetSource([{"x": usual(value)}, {"x": value}], name="values")
    return Held(source, plain(value), own)


def tensors(directory: Path, value: Any) -> Held | None:
    array = typed(value)
    if array is None or array.dtype.kind not in "biufc" or array.dtype.byteorder == ">":
        return None
    values = [{"x": each} for each in torch.from_numpy(array)]
    return in_array(array, DatasetSource(values, name="tensors"))


def transformed(directory: Path, value: Any) -> Held:
    """The fields are those of what the transform returns for the first sample."""
    held = dataset(directory, value)
    inner = NumpySource({"n": np.arange(2)})
    source = TransformedSource(inner, {"n": Int("n")}, lambda sample: {"x": value})
    return held._replace(source=source)


def packed_shard(parts: list[bytes], between: bytes = b"") -> bytes:
    return packed([len(part).to_bytes(4, "little") + part for part in parts], between)


def stored(value: Any) -> tuple[str, list[bytes]] | None:
    """Name the type of a value in MDS and LitData, and write both samples."""
    both = (usual(value), value)
    if isinstance(value, str):
        return "str", [each.encode() for each in both]
    if isinstance(value, bytes):
        return "bytes", list(both)
    if isinstance(value, bool | np.ndarray | np.generic) or not isinstance(value, int | float):
        return None
    if isinstance(value, int) and not -(2**63) <= value < 2**63:
        return None
    kind = "int" if isinstance(value, int) else "float64"
    return kind, [np.array(each, "<i8" if kind == "int" else "<f8").tobytes() for each in both]


def mds(directory: Path, value: Any) -> Held | None:
    found = stored(value)
    if found is None:
        return None
    columns = {"column_names": ["x"], "column_encodings": [found[0]], "column_sizes": [None]}
    data = packed_shard(found[1], json.dumps(columns | {"version": 2}).encode())
    (directory / "shard.00000.mds").write_bytes(data)
    source = open_source(str(directory / "shard.00000.mds"))
    return Held(source, value, None if isinstance(value, str | bytes) else np.asarray(value).dtype)


def litdata(directory: Path, value: Any) -> Held | None:
    found = stored(value)
    if found is None:
        return None
    leaf: dict[str, Any] = {"type": None, "context": None, "children_spec": []}
    spec = {"type": "builtins.dict", "context": '["x"]', "children_spec": [leaf]}
    kind = found[0].removesuffix("64")
    config = {"data_format": [kind], "data_spec": json.dumps([1, spec]), "compression": None}
    index = {"chunks": [{"filename": "chunk-0-0.bin", "chunk_size": 2}], "config": config}
    (directory / "index.json").write_text(json.dumps(index))
    (directory / "chunk-0-0.bin").write_bytes(packed_shard(found[1]))
    source = open_source(str(directory))
    return Held(source, value, None if isinstance(value, str | bytes) else np.asarray(value).dtype)


def varint(number: int) -> bytes:
    number &= (1 << 64) - 1
    parts = []
    while number > 127:
        parts.append(number & 127 | 128)
        number >>= 7
    return bytes([*parts, number])


def tfrecord(directory: Path, value: Any) -> Held | None:
    """Numbers are lists: of 64 bits if they are whole, else of 32."""
    numbers = value if isinstance(value, list) else [value]
    given: Any
    if all(type(each) is int and -(2**63) <= each < 2**63 for each in numbers):
        given, number = numbers, 3

        def packed_list(each: Any) -> bytes:
            return b"".join(map(varint, each))
    elif all(type(each) is float for each in numbers):
        with np.errstate(over="ignore"):
            given, number = np.array(numbers, np.float32).tolist(), 2

        def packed_list(each: Any) -> bytes:
            with np.errstate(over="ignore"):
                return np.array(each, "<f4").tobytes()
    elif isinstance(value, bytes):
        given, number = value, 1

        def packed_list(each: Any) -> bytes:
            return bytes(each)
    else:
        return None

    def message(tag: int, data: bytes) -> bytes:
        return bytes([tag << 3 | 2]) + varint(len(data)) + data

    records = []
    for each in (usual(given), given):
        feature = message(number, message(1, packed_list(each)))
        entry = message(1, message(1, b"x") + message(2, feature))
        records.append(framed(message(1, entry)))
    (directory / "x.tfrecord").write_bytes(b"".join(records))
    one = given[0] if isinstance(given, list) and len(given) == 1 else given
    return Held(open_source(str(directory / "x.tfrecord")), one, listed=True)


SOURCES: Mapping[str, Callable[[Path, Any], Held | None]] = {
    make.__name__: make
    for make in (
        tar, tar_of_json, json_lines, parquet, arrow, mds, litdata, tfrecord, arrays, npz, hdf5,
        dataset, tensors, transformed,
    )
}  # fmt: skip


SAMPLE = "sample '?[01]|a sample of the variable|found text"
"""Text in place of numbers, and arrays of other dtypes, are refused of all samples at once."""

CELLS = {
    "tar": 1100, "tar_of_json": 1200, "json_lines": 1200, "parquet": 1500, "arrow": 1500,
    "mds": 800, "litdata": 800, "tfrecord": 750, "arrays": 1400, "npz": 1400, "hdf5": 1050,
    "dataset": 1600, "tensors": 1050, "transformed": 70,
}  # fmt: skip
"""How many each source has at least: together more than 15,000."""


def number_of(given: Any) -> Any:
    """Read a number as Python does; text of one exactly. None if it is none."""
    if isinstance(given, bytes):
        given = given.decode("latin-1")
    if isinstance(given, str):
        if "_" in given:
            return None
        try:
            given = Decimal(given)
        except ArithmeticError:
            return None
        return given if given.is_finite() else float(given)
    return given if isinstance(given, int | float | complex | Decimal) else None


def is_kept(found: Any, given: Any, dtype: np.dtype[Any]) -> bool:
    """Whether a number is the one that was given, or the nearest of the dtype to a fraction."""
    if isinstance(given, complex) or isinstance(found, complex):
        pairs = ((found.real, complex(given).real), (found.imag, complex(given).imag))
        return dtype.kind == "c" and all(is_kept(*pair, np.dtype("f4")) for pair in pairs)
    if isinstance(given, float) and not math.isfinite(given):
        return found == given or (math.isnan(given) and math.isnan(found))
    if not math.isfinite(found):
        return False
    if Fraction(found) == Fraction(given):
        return True
    is_fraction = Fraction(given).denominator != 1
    return dtype.kind == "f" and is_fraction and found == dtype.type(float(given)) and found != 0


def is_same(found: Any, given: Any, dtype: np.dtype[Any]) -> bool:
    """Whether numbers are those that were given, in the same shape."""
    if isinstance(found, list):
        is_alike = isinstance(given, list) and len(found) == len(given)
        return is_alike and all(is_same(*pair, dtype) for pair in zip(found, given, strict=True))
    number = number_of(given)
    return number is not None and is_kept(found, number, dtype)


def is_right(data: bytes, field: Field, held: Held) -> bool:
    """Whether what is kept of a sample is what the source has."""
    given = held.given
    if isinstance(field, Text | Bytes):
        given = given if held.raw is None else held.raw
        if isinstance(given, list):
            given = json.dumps(given, ensure_ascii=False)  # as of objects, where JSON has them
        return data == (given.encode() if isinstance(given, str) else given)
    is_listed = isinstance(field, Tokens) or (isinstance(field, Array) and field.shape)
    if held.listed and is_listed and not isinstance(given, list | bytes):
        given = [given]
    if isinstance(field, Tokens):
        found = np.frombuffer(data, field.dtype)
        raw = isinstance(given, bytes) and data == given
        return raw or is_same(found.tolist(), given, found.dtype)
    column = field.column("x")
    assert column is not None
    array = np.frombuffer(data, column.dtype).reshape(column.shape)
    if isinstance(field, Array) and isinstance(given, bytes):
        return data == given
    if isinstance(given, list) and len(column.shape) > 1 and not isinstance(given[0], list):
        array = array.reshape(-1)  # a flat list
    return is_same(array.tolist(), given, array.dtype)


def has_to_arrive(field: Field, held: Held) -> bool:
    """Whether a field must take a number: it is declared wide enough."""
    if not isinstance(held.given, int | float):
        return False
    if held.raw is not None and not isinstance(field, Array):
        return False  # an .npy is no digits
    if isinstance(field, Array):
        own = held.dtype
        dtype = np.dtype(field.dtype)
        if field.shape or (own is not None and own != dtype) or abs(held.given) > 2**64:
            return False
    elif not isinstance(field, Int | Float):
        return False
    else:
        dtype = np.dtype("i8" if isinstance(field, Int) else "f4")
    number = held.given
    if dtype.kind in "iub":
        low, high = (0, 1) if dtype.kind == "b" else (np.iinfo(dtype).min, np.iinfo(dtype).max)
        return math.isfinite(number) and number == int(number) and int(low) <= number <= int(high)
    with np.errstate(over="ignore"):
        nearest = dtype.type(float(number))
    return is_kept(nearest.item(), number, np.dtype("f4") if dtype.kind == "c" else dtype)


def cells(kind: str, directory: Path) -> Iterator[tuple[Field, Held, str, bytes | None, str]]:
    """Read every value into every field.

    Yields:
        The field, what the source has, how to name the cell, what is kept, and the error.
    """
    for number, value in enumerate(VALUES):
        place = directory / str(number)
        place.mkdir()
        held = SOURCES[kind](place, value)
        for field in FIELDS if held is not None else ():
            assert held is not None
            fields: Mapping[str, Field] = {"label": replace(field, key=held.key)}  # type: ignore[type-var]
            if kind == "transformed":
                try:
                    assert isinstance(held.source, TransformedSource)
                    fields = held.source.fields
                except DataioError as error:
                    yield Bytes("x"), held, f"{value!r:.60}", None, str(error)
                    break
            (field,) = fields.values()
            cell = f"{field} of {value!r:.60}"
            try:
                (_, [data]) = read_all(held.source, fields)[1]
                yield field, held, cell, data, ""
            except DataioError as error:
                yield field, held, cell, None, str(error)
            if kind == "transformed":
                break


@pytest.mark.parametrize("kind", SOURCES)
def test_a_value_arrives_as_it_is_or_is_refused(kind: str, tmp_path: Path) -> None:
    wrong, num_kept, num_refused = [], 0, 0
    for field, held, cell, data, error in cells(kind, tmp_path):
        if data is not None:
            num_kept += 1
            if not is_right(data, field, held):
                wrong.append(f"{cell}: {data!r} of {held.given!r}")
            continue
        num_refused += 1
        if has_to_arrive(field, held):
            wrong.append(f"{cell}: refused: {error}")
        if not (re.search(SAMPLE, error) and re.search("'(label|x)'", error)):
            wrong.append(f"{cell}: says nothing of sample or field: {error}")
    assert not wrong, f"{len(wrong)} cells:\n" + "\n".join(wrong)
    assert num_kept + num_refused >= CELLS[kind]
    assert num_kept > 50


def json_sources(directory: Path, number: str) -> Iterator[tuple[str, Source]]:
    """A number as it is written, alone and in a list, in each format that holds JSON."""
    for key, value in (("x", number), ("y", f"[7, {number}, 7]"), ("z.a", f"[[{number}]]")):
        name, _, inner = key.partition(".")
        value = f'{{"{inner}": {value}}}' if inner else value
        text = f'{{"{name}": {value}}}'
        (directory / "x.jsonl").write_text(f"{text}\n")
        yield key, open_source(str(directory / "x.jsonl"))
        yield (
            f"json.{key}",
            open_source(str(write_tar(directory / "x.tar", [("0.json", text.encode())]))),
        )
        columns = {"column_names": ["c"], "column_encodings": ["json"], "column_sizes": [None]}
        data = packed_shard([text.encode()], json.dumps(columns | {"version": 2}).encode())
        (directory / "shard.00000.mds").write_bytes(data)
        yield f"c.{key}", open_source(str(directory / "shard.00000.mds"))


@pytest.mark.parametrize(
    ("number", "whole"),
    [
        ("9007199254740993.0", None), ("-9007199254740993.0", None), ("9007199254740993e0", None),
        ("900719925474099.3e1", None), ("9007199254740991.9", None), ("4503599627370496.4", None),
        ("1.2345678901234567e18", None), ("9007199254740992.0", 2**53), ("1e18", 10**18),
        ("4503599627370497.0", 2**52 + 1), ("1234e15", 1234 * 10**15), ("5.0", 5),
    ],
)  # fmt: skip
def test_whole_numbers_with_a_point_in_json_are_not_rounded(
    number: str, whole: int | None, tmp_path: Path
) -> None:
    for key, source in json_sources(tmp_path, number):
        ending = key.split(".")[-1]
        shape = {"x": (), "y": (3,), "a": (1, 1)}[ending]
        fields: list[Field] = [Array(key, shape, "int64")]
        fields += [Int(key)] if not shape else [Tokens(key, "int64")] if len(shape) == 1 else []
        expected = {"y": [7, whole, 7]}.get(ending, [whole])
        for field in fields:
            if whole is None:
                with pytest.raises(FieldError, match=r"of which float64 makes .*its digits alone"):
                    read_all(source, {"x": field})
            else:
                _, (raw,) = read_all(source, {"x": field})[0]
                assert np.frombuffer(raw, "<i8").tolist() == expected
        _, (raw,) = read_all(source, {"x": Array(key, shape, "float64")})[0]
        assert float(number) in np.frombuffer(raw, "<f8").tolist()
