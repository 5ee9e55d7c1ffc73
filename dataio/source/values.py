"""What sources and transforms give -> what fields take. Neither torch nor Pillow is imported."""

import math
from collections.abc import Mapping, Sequence
from typing import Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from dataio.base.errors import FieldError
from dataio.rows.encoding import converted
from dataio.rows.fields import Array, Field, Float, Int, Raw, Tokens


@runtime_checkable
class _Tensor(Protocol):
    """A tensor of torch, which is not imported for its sake."""

    def detach(self) -> "_Tensor": ...

    def cpu(self) -> "_Tensor": ...

    def numpy(self) -> NDArray[np.generic]: ...


@runtime_checkable
class _Picture(Protocol):
    """An image of Pillow."""

    mode: str

    def convert(self, mode: str, /) -> "_Picture": ...

    def getbands(self) -> tuple[str, ...]: ...


def raw_value(value: object, where: str) -> Raw:
    """Bring what a user's code returned to a form that fields take.

    Args:
        value: A number, bytes, text, an array, a tensor, a sequence of numbers, or an image of
            Pillow, which becomes its pixels: bits, 16 bits and floating numbers as they are.
        where: Sample and field, for the message.

    Raises:
        FieldError: If it is something else.
    """
    if isinstance(value, (bytes, str, int, float)):
        return value
    if isinstance(value, np.ndarray):
        return unmasked(value, where)
    if isinstance(value, (bytearray, memoryview)):
        return bytes(value)
    if isinstance(value, (np.generic, complex)):
        return np.asarray(value)
    if isinstance(value, _Tensor):
        return _array(value, where)
    if isinstance(value, _Picture):
        if value.mode == "1":
            # NumPy is given 255 for True
            return np.asarray(value.convert("L")) > 0
        # Every mode of colours in one of the two that images are decoded to.
        transparent = value.mode in ("RGBA", "LA", "PA", "La", "RGBa")
        is_plain = value.mode[0] in "LIF" and len(value.getbands()) == 1
        mode = value.mode if is_plain else "RGBA" if transparent else "RGB"
        return np.asarray(value if value.mode == mode else value.convert(mode))
    if isinstance(value, Sequence) and (numbers := listed_numbers(value)) is not None:
        return numbers
    raise FieldError(
        f"{where}: found {type(value).__name__}, expected a number, bytes, text, a tensor, an "
        "array or an image of Pillow; return one of these"
    )


def unmasked(array: NDArray[np.generic], where: str) -> NDArray[np.generic]:
    """Refuse an array of which some values are masked: what lies under the mask is none."""
    if np.ma.is_masked(array):
        num_masked = np.count_nonzero(np.ma.getmaskarray(array))
        raise FieldError(
            f"{where}: found an array of which {num_masked} values are masked, "
            "expected values; give array.filled(...)"
        )
    return array


def listed_numbers(values: Sequence[object]) -> NDArray[np.generic] | None:
    """Bring a list of numbers, or one of lists of one shape, to an array; None if it is none."""
    try:
        array = np.asarray(values)
    except (ValueError, TypeError, OverflowError, RuntimeError):
        return None
    if array.dtype.kind not in "biufc":
        return None
    if array.dtype.kind == "f" and (np.abs(array) >= 2.0**53).any():
        # Whole numbers beside fractions became floats too.
        given = np.asarray(values, object).ravel().tolist()
        pairs = zip(given, array.ravel().tolist(), strict=True)
        if any(one == one and one != other for one, other in pairs):
            return None
    return array


def shaped(values: NDArray[np.generic], field: Field, name: str) -> NDArray[np.generic]:
    """Give the numbers of a list, which has no dtype of its own, that of a field.

    A flat list of as many numbers is an array of several dimensions, row by row; a nested one has a
    shape of its own.

    Args:
        values: As the file has them.
        field: The field.
        name: Of the field.

    Returns:
        The same numbers; as they were where they are not what the field declares, which it refuses.
    """
    column = field.column(name)
    if column is None or isinstance(field, (Int, Float)):
        return values
    shape = column.shape
    if values.ndim == 1 and len(shape) > 1 and len(values) == math.prod(shape):
        values = values.reshape(shape)
    if values.shape != shape:
        return values
    stored, at = converted(values, np.dtype(column.dtype).newbyteorder("="))
    return stored if at < 0 else values


def refuse_letters(where: str, field: Field, name: str) -> None:
    """Refuse to take text for an array: its bytes are the codes of letters.

    Raises:
        FieldError: If the field is an array.
    """
    if isinstance(field, (Array, Tokens)):
        raise FieldError(
            f"{where}: found text, expected numbers for field {name!r}; declare "
            f"Text({field.key!r}), or Int or Float where it is the text of one number"
        )


def named_values(sample: object) -> dict[str, object]:
    """Name the values of a sample as a user's code returned it: by its keys, or by position."""
    if isinstance(sample, Mapping):
        return {str(key): value for key, value in sample.items()}
    values = sample if isinstance(sample, (tuple, list)) else [sample]
    return {str(position): value for position, value in enumerate(values)}


def fields_of(
    sample: Mapping[str, object], fields: Mapping[str, Field], where: str
) -> dict[str, Raw]:
    """Take what the fields name out of a sample.

    Args:
        sample: Values by name.
        fields: What is kept.
        where: The sample, for the message.

    Raises:
        FieldError: If it lacks one, or a value has no form that fields take.
    """
    raw: dict[str, Raw] = {}
    for name, field in fields.items():
        if field.key not in sample:
            raise FieldError(
                f"{where} holds {', '.join(sample)}, expected {field.key!r} for field "
                f"{name!r}; name one of these, or return it from the dataset"
            )
        value = sample[field.key]
        found = raw_value(value, f"{where}, field {name!r}")
        if isinstance(value, Sequence) and isinstance(found, np.ndarray):
            found = shaped(found, field, name)
        raw[name] = found
    return raw


def _array(tensor: _Tensor, where: str) -> NDArray[np.generic]:
    try:
        return np.asarray(tensor.detach().cpu().numpy())
    except (TypeError, RuntimeError) as error:
        raise FieldError(
            f"{where}: found a tensor that NumPy has no form for ({error}), expected a dtype that "
            "it has; return tensor.float() or such"
        ) from error
