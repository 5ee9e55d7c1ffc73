"""What a transform returns for the rows of a batch -> its fields: stacked where they have one form.

Threads add different rows of the same batch. The lock guards the choice of the columns, which the
first row makes; nothing is remembered from one batch to the next.
"""

import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NoReturn, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image as Pillow

from dataio.base.buffers import BufferRing
from dataio.base.errors import About, FieldError
from dataio.rows.samples import Array, AsList, Value

T = TypeVar("T")

NUMBERS = "biufc"
"""Kinds of dtypes that tensors have too."""

CARRIERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32}
"""Whole numbers, by their bytes, that carry what NumPy has no dtype for."""

Form = tuple[tuple[int, ...], np.dtype[np.generic]]


class StackedColumns:
    """The fields of one batch, filled row by row.

    Values of one shape and dtype are written straight into the batch's memory: arrays, tensors,
    images of Pillow and numbers. An `AsList`, bytes, text and any other object go into a list.

    Args:
        ring: Where buffers come from.
        sample_id: int64[batch]: Whose rows they are, for messages.
        maker: What returns the values, for messages.

    Attributes:
        values: By name; empty before the first row.
    """

    def __init__(self, ring: BufferRing, sample_id: NDArray[np.int64], *, maker: str) -> None:
        self.values: dict[str, Value] = {}
        self._ring, self._sample_id, self._maker = ring, sample_id, maker
        self._first = 0
        self._lock = threading.Lock()

    def add(self, row: int, sample: Mapping[str, object]) -> None:
        """Write the values of one row.

        Args:
            row: Its number in the batch.
            sample: By name.

        Raises:
            FieldError: If it has other fields than another row of the batch, or a value is stacked
                for one of them and not for the other, or has another shape or dtype.
        """
        if not self.values:
            self._choose(row, sample)
        columns = self.values
        if columns.keys() != sample.keys():
            self._refuse(row, "fields", str(sorted(sample)), str(sorted(columns)))
        for name, value in sample.items():
            column = columns[name]
            if isinstance(column, list):
                column[row] = self._listed(row, name, value)
                continue
            # The usual case needs no look at what else it could be.
            if isinstance(value, (np.ndarray, np.generic)) and value.dtype == column.dtype:
                array: Array | np.generic | None = value
            else:
                array = as_array(value)
            if array is None or array.shape != column.shape[1:] or array.dtype != column.dtype:
                self._refuse(
                    row, f"field {name!r}", _shown(value), _form(column.dtype, column.shape[1:])
                )
            column[row] = array

    def _choose(self, row: int, sample: Mapping[str, object]) -> None:
        """Make the columns that the first row needs."""
        arrays = {name: as_array(value) for name, value in sample.items()}
        self.columns_of(
            {name: a if a is None else (a.shape, a.dtype) for name, a in arrays.items()}, row
        )

    def columns_of(
        self, described: "Mapping[str, Form | None]", row: int = 0
    ) -> dict[str, Value] | None:
        """Find the columns of rows of these forms, or make them; None if the batch has others.

        Args:
            described: As `forms` does.
            row: The first of them.
        """
        with self._lock:
            if not self.values:
                self._first = row
                self.values = {
                    name: [None] * len(self._sample_id)
                    if form is None
                    else self._ring.take((len(self._sample_id), *form[0]), form[1])
                    for name, form in described.items()
                }
            return self.values if forms(self.values) == dict(described) else None

    def _listed(self, row: int, name: str, value: object) -> object:
        if isinstance(value, AsList):
            array = as_array(value.value)
            # What a tensor can be made from without a copy.
            return value.value if array is None else np.require(array, requirements=["C", "W"])
        if as_array(value) is not None:
            self._refuse(row, f"field {name!r}", _shown(value), "what goes into a list")
        return value

    def _refuse(self, row: int, what: str, found: str, expected: str) -> NoReturn:
        first, this = self._sample_id[[self._first, row]].tolist()
        raise FieldError(
            f"{self._maker}: sample {this}, {what}: returned {found}, expected {expected} like "
            f"sample {first} of its batch; to get one tensor bring all to one shape and dtype "
            "(resize, crop, pad), to get a list return dataio.AsList(value), or put batches "
            "together with collate",
            about=About(this),
        )


def as_array(value: object) -> Array | None:
    """Bring numbers, in whatever they come, to an array; None if they are not numbers.

    Args:
        value: An array, a tensor (a dtype that NumPy lacks is carried as a record of one whole
            number, named after it), a number, a list of numbers, or an image of Pillow, which
            becomes dtype[channels, height, width] in its own mode.
    """
    if isinstance(value, (np.ndarray, np.generic, int, float, complex)):
        array = np.asarray(value)
        if array.dtype.kind not in NUMBERS:
            return None
        return array if array.dtype.isnative else array.astype(array.dtype.newbyteorder("="))
    if isinstance(value, torch.Tensor):
        return _of_tensor(value)
    if isinstance(value, Pillow.Image):
        pixels = np.asarray(value)
        return pixels[None] if pixels.ndim == 2 else pixels.transpose(2, 0, 1)
    return _of_sequence(value) if isinstance(value, (list, tuple)) else None


def _of_tensor(tensor: torch.Tensor) -> Array | None:
    if tensor.layout != torch.strided:
        return None
    try:
        return tensor.numpy(force=True)
    except TypeError:
        carrier = tensor.detach().cpu().contiguous().view(CARRIERS[tensor.element_size()]).numpy()
        return carrier.view([(str(tensor.dtype).removeprefix("torch."), carrier.dtype)])


def _of_sequence(values: list[object] | tuple[object, ...]) -> Array | None:
    first: object = values
    while isinstance(first, (list, tuple)) and first:
        first = first[0]
    # Arrays in a list may differ in shape from sample to sample: these stay what they are.
    if not isinstance(first, (int, float, complex, list, tuple)):
        return None
    try:
        array = np.asarray(values)
    except ValueError:
        return None
    return array if array.dtype.kind in NUMBERS else None


def as_tensor(value: Value | torch.Tensor) -> torch.Tensor:
    """Bring a field of a batch to a tensor, if no device has, or a list of arrays to one of those.

    Bytes, text and other objects have no tensor form: they stay a list.
    """
    if isinstance(value, torch.Tensor):
        return value
    if isinstance(value, np.ndarray):
        return _carried(value)
    rows = [_carried(row) if isinstance(row, np.ndarray) else row for row in value]
    return rows  # type: ignore[return-value]


def _carried(array: Array) -> torch.Tensor:
    names = array.dtype.names
    if names is None:
        return torch.from_numpy(array) if array.dtype.kind in NUMBERS else array  # type: ignore[return-value]
    return torch.from_numpy(array.view(f"i{array.itemsize}")).view(getattr(torch, names[0]))


@dataclass(frozen=True)
class PackedTensor:
    """A tensor as the array that it shows."""

    array: Array


def packed(value: object) -> Any:
    """Bring tensors in lists, tuples and dicts to what a pipe takes without shared memory."""
    return _each(value, torch.Tensor, _packed)


def unpacked(value: object) -> Any:
    """Undo `packed`."""
    return _each(value, PackedTensor, lambda found: _carried(found.array))


def _packed(tensor: torch.Tensor) -> object:
    array = _of_tensor(tensor)
    return tensor if array is None else PackedTensor(array)


def _each(value: Any, kind: type[T], change: Callable[[T], object]) -> object:
    """Change what is of one kind, in plain lists, tuples and dicts."""
    if isinstance(value, kind):
        return change(value)
    if type(value) is dict:
        return {name: _each(part, kind, change) for name, part in value.items()}
    if type(value) in (list, tuple):
        return type(value)(_each(part, kind, change) for part in value)
    return value


def forms(values: Mapping[str, Value]) -> dict[str, Form | None]:
    """Describe one row of a batch: the form of each value, None where it lies in a list."""
    return {
        name: None if isinstance(value, list) else (value.shape[1:], value.dtype)
        for name, value in values.items()
    }


def blank(described: Mapping[str, Form | None], num_rows: int) -> dict[str, Value]:
    """Make the fields of a batch that has no row."""
    return {
        name: [b""] * num_rows if form is None else np.zeros((num_rows, *form[0]), form[1])
        for name, form in described.items()
    }


def _shown(value: object) -> str:
    array = None if isinstance(value, AsList) else as_array(value)
    return type(value).__name__ if array is None else _form(array.dtype, array.shape)


def _form(dtype: np.dtype[np.generic], shape: tuple[int, ...]) -> str:
    return f"{dtype.names[0] if dtype.names else dtype}{list(shape)}"
