"""Stored values of MDS and LitData -> what fields take. Nothing is unpickled."""

import json

import numpy as np
from numpy.typing import NDArray

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


def json_value(document: object, key: str, where: str) -> Raw:
    """Bring a value of a JSON document to a form that fields take.

    Args:
        document: The document; "a.b" is found under the keys "a", then "b", unless it has "a.b".
        key: Which of its values.
        where: Shard and sample, for the message.

    Returns:
        Numbers and text as they are, lists of numbers as arrays, objects and other lists as JSON.

    Raises:
        KeyError: If the document has no such key; it names those that are there.
        FieldError: If the value is null.
    """
    found = _find(document, key)
    numbers = listed_numbers(found) if isinstance(found, list) else None
    if numbers is not None:
        return numbers
    if isinstance(found, (dict, list)):
        return json.dumps(found, ensure_ascii=False)
    return raw_value(found, f"{where}, key {key!r}")


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
