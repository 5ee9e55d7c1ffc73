"""What datasets and transforms return -> what fields take. Neither torch nor Pillow is imported."""

from collections.abc import Mapping, Sequence
from typing import Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from dataio.base.errors import FieldError
from dataio.rows.fields import Field, Raw


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
            Pillow, which becomes its pixels.
        where: Sample and field, for the message.

    Raises:
        FieldError: If it is something else.
    """
    if isinstance(value, (bytes, memoryview, str, int, float, np.ndarray)):
        return value
    if isinstance(value, bytearray):
        return bytes(value)
    if isinstance(value, np.generic):
        return np.asarray(value)
    if isinstance(value, _Tensor):
        return _array(value, where)
    if isinstance(value, _Picture):
        # Every mode of Pillow in one of the three that images are decoded to.
        transparent = value.mode in ("RGBA", "LA", "PA", "La", "RGBa")
        gray = value.mode in ("1", "L")
        mode = "L" if gray else "RGBA" if transparent else "RGB"
        return np.asarray(value if value.mode == mode else value.convert(mode))
    if isinstance(value, Sequence):
        array = np.asarray(value)
        if array.dtype.kind in "biufc":
            return array
    raise FieldError(
        f"{where}: found {type(value).__name__}, expected a number, bytes, text, a tensor, an "
        "array or an image of Pillow; return one of these"
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
        raw[name] = raw_value(sample[field.key], f"{where}, field {name!r}")
    return raw


def _array(tensor: _Tensor, where: str) -> NDArray[np.generic]:
    try:
        return np.asarray(tensor.detach().cpu().numpy())
    except TypeError as error:
        raise FieldError(
            f"{where}: found a tensor that NumPy has no form for ({error}), expected a dtype that "
            "it has; return tensor.float() or such"
        ) from error
