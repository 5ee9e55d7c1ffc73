"""Values as JSON and, behind it, the bytes of their arrays: whoever reads them runs nothing.

What JSON has stands for itself. All else is a list, which begins with what it is.
"""

import json
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from dataio.batch.stack import as_array, as_tensor

ITSELF = frozenset((type(None), bool, int, float, str))
GROUPS = {kind.__name__: kind for kind in (list, tuple, frozenset)}

LEAVES: dict[str, Callable[[Any], Any]] = {
    "array": lambda array: array,
    "scalar": lambda array: array[()],
    "tensor": as_tensor,
    "bytes": np.ndarray.tobytes,
}


class NoPlainFormError(Exception):
    """A value cannot be written, and why."""


def written(value: object) -> tuple[bytes, list[bytes | NDArray[Any]]]:
    """Write a value: its JSON, and what goes behind it.

    Args:
        value: Numbers, text, bytes, arrays, tensors and dtypes, in lists, tuples, frozensets and
            dicts; of these types themselves.

    Raises:
        NoPlainFormError: If there is anything else.
    """
    behind: list[bytes | NDArray[Any]] = []
    try:
        return json.dumps(_form(value, behind)).encode(), behind
    except (RecursionError, ValueError) as error:
        raise NoPlainFormError(str(error)) from error


def _form(value: Any, behind: list[bytes | NDArray[Any]]) -> object:
    kind, array = type(value), None
    if kind in ITSELF:
        return value
    if kind in GROUPS.values():
        parts = (part if type(part) in ITSELF else _form(part, behind) for part in value)
        return [kind.__name__, *parts]
    if kind is dict:
        return ["dict", _form([*value], behind), _form([*value.values()], behind)]
    if kind is bytes:
        behind.append(value)
        return ["bytes", "|u1", len(value)]
    if isinstance(value, np.dtype):
        described = np.lib.format.dtype_to_descr(value)
        if not value.itemsize or value.hasobject or _dtype(described) != value:
            raise NoPlainFormError(f"values of dtype {value} cannot be sent")
        return ["dtype", described]
    if kind is torch.Tensor and not value.requires_grad:
        array, name = as_array(value), "tensor"
    elif kind is np.ndarray or isinstance(value, np.generic):
        array, name = np.asarray(value), "array" if kind is np.ndarray else "scalar"
    if array is None:
        raise NoPlainFormError(f"values of {kind.__module__}.{kind.__qualname__} cannot be sent")
    _, described = _form(array.dtype, behind)  # type: ignore[misc]
    behind.append(np.asarray(array, order="C"))
    return [name, described, *array.shape]


def _dtype(described: Any) -> np.dtype[Any]:
    dtype = np.lib.format.descr_to_dtype(described)
    if dtype.hasobject or not dtype.itemsize:
        raise ValueError(f"dtype {dtype} is none of plain values")
    return dtype


def read(form: bytes, data: NDArray[np.uint8]) -> Any:
    """Read what `written` wrote.

    Args:
        form: The JSON.
        data: uint8[num_bytes]: All that goes behind it.

    Raises:
        Exception: Of any kind, if it is nothing that was written.
    """
    at = 0

    def value_of(form: Any) -> Any:
        nonlocal at
        if type(form) is not list:
            return form
        kind, *parts = form
        if kind in GROUPS:
            return GROUPS[kind](value_of(p) if type(p) is list else p for p in parts)
        if kind == "dict":
            return dict(zip(value_of(parts[0]), value_of(parts[1]), strict=True))
        dtype = _dtype(parts[0])
        if kind == "dtype":
            return dtype
        array: NDArray[Any] = np.ndarray(parts[1:], dtype, data, at).copy()
        at += array.nbytes
        return LEAVES[kind](array)

    value = value_of(json.loads(form))
    if at != len(data):
        raise ValueError(f"{len(data) - at} bytes more than its values have")
    return value
