"""Stored values of MDS and LitData -> what fields take. Nothing is unpickled."""

import json
import math
from decimal import Decimal

import numpy as np
from numpy.typing import NDArray

from dataio.base.errors import FieldError
from dataio.rows.fields import Array, Field, Int, Raw, Tokens
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
    # Its palette was not stored: what is left are numbers.
    mode = "L" if mode == "P" else mode
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
_EXACT_DECODER = json.JSONDecoder(parse_float=Decimal)
LEAST_ROUNDED, MOST_WHOLE = 2.0**50, 2.0**64
"""From the one on float64 has few digits behind the point, if any; whole numbers end at the other.
"""


def json_value(document: object, key: str, where: str, *, field: Field, text: str) -> Raw:
    """Bring a value of a JSON document to a form that fields take.

    Args:
        document: The document; "a.b" is found under the keys "a", then "b", unless it has "a.b".
        key: Which of its values.
        where: Shard and sample, for the message.
        field: What takes it.
        text: What the document was read from.

    Returns:
        Numbers and text as they are, lists of numbers as arrays, objects and other lists as JSON.

    Raises:
        KeyError: If the document has no such key; it names those that are there.
        FieldError: If the value is null, or a number that float64 makes infinite; or, of a field
            of whole numbers, another number.
    """
    found = _find(document, key)
    numbers = listed_numbers(found) if isinstance(found, list) else None
    value = found if numbers is None else numbers
    if _is_infinite(value) and "Infinity" not in text:
        raise FieldError(
            f"{where}, key {key!r}: found a number beyond 1.8e308, the most of float64, expected "
            "less; repair the value, or write it as Infinity where it is meant so"
        )
    if _is_whole(field) and _may_be_rounded(value):
        _check_exact(_find(_EXACT_DECODER.decode(text), key), f"{where}, key {key!r}")
    if numbers is not None:
        return numbers
    if isinstance(found, (dict, list)):
        return json.dumps(found, ensure_ascii=False)
    return raw_value(found, f"{where}, key {key!r}")


def _is_whole(field: Field) -> bool:
    dtype = field.dtype if isinstance(field, (Array, Tokens)) else ""
    return isinstance(field, Int) or bool(dtype and np.dtype(dtype).kind in "iu")


def _may_be_rounded(value: object) -> bool:
    """Whether a number with a point or an exponent is so large that it may stand for another."""
    if isinstance(value, np.ndarray):
        size = np.abs(value) if value.dtype.kind == "f" else np.zeros(0)
        return bool(((size >= LEAST_ROUNDED) & (size < MOST_WHOLE)).any())
    return isinstance(value, float) and LEAST_ROUNDED <= abs(value) < MOST_WHOLE


def _check_exact(value: object, where: str) -> None:
    if isinstance(value, list):
        for one in value:
            _check_exact(one, where)
    elif isinstance(value, Decimal) and value.is_finite() and value != float(value):
        raise FieldError(
            f"{where}: found {value!s:.40}, of which float64 makes {float(value):.1f}, expected a "
            "whole number that arrives as it is; write its digits alone, without point or exponent"
        )


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
