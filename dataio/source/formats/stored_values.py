"""Stored values of MDS and LitData -> what fields take. Nothing is unpickled."""

import json
import math
from decimal import Decimal

import numpy as np
from numpy.typing import NDArray

from dataio.base.errors import FieldError
from dataio.rows.fields import Raw
from dataio.source.values import listed_numbers, raw_value


def picture(data: memoryview, where: str) -> Raw:
    """Read an image of Pillow that was stored raw: width, height, length of the mode, mode, pixels.

    Raises:
        ValueError: If the bytes are none.
    """
    # Pillow is not needed by those who read no such images.
    from PIL import Image as Picture

    width, height, mode_bytes = np.frombuffer(data[:12], "<u4").tolist()
    mode = bytes(data[12 : 12 + mode_bytes]).decode()
    return raw_value(Picture.frombytes(mode, (width, height), data[12 + mode_bytes :]), where)


def array(
    data: memoryview, dtype: np.dtype[np.generic], shape: tuple[int, ...]
) -> NDArray[np.generic]:
    """View bytes as an array; ValueError if they are too few or too many."""
    return np.frombuffer(data, dtype.newbyteorder("<")).reshape(shape)


def json_text(data: memoryview) -> str:
    """Read the text of a document of JSON, which may be in UTF-16 or -32 or begin with a mark.

    Raises:
        ValueError: If it is no text.
    """
    raw = bytes(data)
    return raw.decode(json.detect_encoding(raw))


def read_json(text: str) -> object:
    """Read a document of JSON.

    Raises:
        ValueError: If it is none, or gives a key twice in one object.
        RecursionError: If it is nested too deeply.
    """
    document: object = _DECODER.decode(text)
    return document


def _distinct(pairs: list[tuple[str, object]]) -> dict[str, object]:
    found = dict(pairs)
    if len(found) < len(pairs):
        keys = [key for key, _ in pairs]
        raise ValueError(f"the key {next(key for key in found if keys.count(key) > 1)!r} twice")
    return found


_DECODER = json.JSONDecoder(object_pairs_hook=_distinct)
_EXACT = json.JSONDecoder(parse_float=Decimal)


def json_value(document: object, key: str, where: str, *, text: str) -> Raw:
    """Bring a value of a JSON document to a form that fields take.

    Args:
        document: The document; "a.b" is found under the keys "a", then "b", unless it has "a.b".
        key: Which of its values.
        where: Shard and sample, for the message.
        text: What the document was read from.

    Returns:
        Numbers and text as they are, lists of numbers as arrays, objects and other lists as JSON.

    Raises:
        KeyError: If the document has no such key; it names those that are there.
        FieldError: If the value is null, or a number that float64 makes infinite.
    """
    found = _find(document, key)
    numbers = listed_numbers(found) if isinstance(found, list) else None
    value = found if numbers is None else numbers
    if _is_infinite(value) and "Infinity" not in text:
        raise FieldError(
            f"{where}, key {key!r}: found a number beyond 1.8e308, the most of float64, expected "
            "less; repair the value, or write it as Infinity where it is meant so"
        )
    if _may_be_rounded(value) and (rounded := _rounded(value, _find(_EXACT.decode(text), key))):
        read, written = rounded
        if isinstance(value, float):
            return int(written)
        raise FieldError(
            f"{where}, key {key!r}: found {written}, which float64 rounds to {read:.0f}, expected "
            "a number as it is; write whole numbers without a point"
        )
    if numbers is not None:
        return numbers
    if isinstance(found, (dict, list)):
        return json.dumps(found, ensure_ascii=False)
    return raw_value(found, f"{where}, key {key!r}")


def _may_be_rounded(value: object) -> bool:
    """Say whether there may be whole numbers that float64 does not hold, and 64 bits do."""
    if isinstance(value, float):
        return 2.0**53 <= abs(value) < 2.0**64
    if not isinstance(value, np.ndarray) or value.dtype.kind != "f":
        return False
    return any(map(_may_be_rounded, np.ravel(value)[np.ravel(np.abs(value)) >= 2.0**53].tolist()))


def _rounded(value: object, document: object) -> tuple[float, Decimal] | None:
    """Find the first number that is not what was written, beside that."""
    for read, written in zip(np.ravel(np.asarray(value)).tolist(), _flat(document), strict=True):
        if not isinstance(written, Decimal) or not _may_be_rounded(read):
            continue
        if written == written.to_integral_value() and written != Decimal(read):
            return read, written
    return None


def _flat(value: object) -> list[object]:
    return [one for each in value for one in _flat(each)] if isinstance(value, list) else [value]


def _is_infinite(value: object) -> bool:
    if isinstance(value, np.ndarray):
        return value.dtype.kind == "f" and bool(np.isinf(value).any())
    return isinstance(value, float) and math.isinf(value)


def _find(document: object, key: str) -> object:
    held: object = document
    if not isinstance(held, dict):
        raise KeyError("no object")
    if key in held:
        return held[key]
    first, dot, rest = key.partition(".")
    if dot and isinstance(held.get(first), dict):
        return _find(held[first], rest)
    raise KeyError(", ".join(held))
