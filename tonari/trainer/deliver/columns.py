"""Where the columns of a batch lie in a run of bytes: what every rank of a replica agrees on."""

import json
import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from tonari.trainer.errors import DeliveryError

Bytes = NDArray[np.uint8]

ALIGNMENT = 64


@dataclass(frozen=True)
class BatchColumn:
    """One tensor of a batch.

    Attributes:
        name: In the batch.
        dtype: Torch's name of it.
        shape: Of the tensor.
        order: Its dimensions as they lie in memory, outermost first.
        first: Its first byte.
        wanted: By ``"input"``, ``"both"`` or ``"target"``: the stages that take it.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    order: tuple[int, ...]
    first: int
    wanted: str

    @property
    def stop(self) -> int:
        """The byte after its last."""
        return self.first + self._num_values * self.torch_dtype.itemsize

    @cached_property
    def torch_dtype(self) -> torch.dtype:
        """The dtype of its name."""
        return _dtype(self.dtype)

    def view(self, data: Bytes, *, first: int = 0) -> Tensor:
        """See the column in bytes that begin with byte ``first`` of the whole."""
        if not self._num_values:
            return torch.empty(self.shape, dtype=self.torch_dtype)
        # As few calls of torch as do it: between two steps each costs ten times what it does alone.
        flat = torch.frombuffer(
            data, dtype=self.torch_dtype, count=self._num_values, offset=self.first - first
        )
        return flat if len(self.shape) == 1 else flat.as_strided(self.shape, self._strides)

    @cached_property
    def _num_values(self) -> int:
        return math.prod(self.shape)

    @cached_property
    def _strides(self) -> tuple[int, ...]:
        strides = [0] * len(self.shape)
        for place, dim in enumerate(self.order):
            strides[dim] = math.prod(self.shape[inner] for inner in self.order[place + 1 :])
        return tuple(strides)


@dataclass(frozen=True)
class Columns:
    """The columns of a stream of batches: the inputs' first, those of both next, the targets' last.

    So what the first stage takes is one run of bytes, and what the last stage takes is one.
    """

    columns: tuple[BatchColumn, ...]

    @property
    def num_bytes(self) -> int:
        return self.span("input", "target").stop

    def span(self, *wanted: str) -> range:
        """Find the bytes of the columns that some stages take; empty for none."""
        taken = self._taken_by(wanted)
        return range(taken[0].first, taken[-1].stop) if taken else range(0)

    def write(self, batch: Mapping[str, Tensor], into: Bytes, *, where: str) -> None:
        """Lay a batch out.

        Raises:
            DeliveryError: If its columns are not as they were when the layout was made.
        """
        self.copy(batch, self.views(into), where=where)

    def views(self, data: Bytes) -> list[Tensor]:
        """See all columns in the bytes of a whole batch."""
        return [column.view(data) for column in self.columns]

    def copy(self, batch: Mapping[str, Tensor], views: Sequence[Tensor], *, where: str) -> None:
        """Lay a batch out where `views` sees it; raises what `write` does."""
        for column, view in zip(self.columns, views, strict=True):
            value = batch.get(column.name)
            alike = value is not None and value.dtype == column.torch_dtype
            if value is None or not alike or value.shape != column.shape:
                found = None if value is None else (_name(value.dtype), tuple(value.shape))
                raise DeliveryError(
                    f"{where}: column {column.name!r} is {found}, expected "
                    f"{(column.dtype, column.shape)} as in the first batch; ranks of a replica "
                    "take batches of one shape only: pad to it in transform or collate"
                )
            view.copy_(value)

    def read(self, data: Bytes, *wanted: str) -> dict[str, Tensor]:
        """See the columns that some stages take in the bytes of their span."""
        first = self.span(*wanted).start
        return {column.name: column.view(data, first=first) for column in self._taken_by(wanted)}

    def to_json(self) -> str:
        return json.dumps([asdict(column) for column in self.columns])

    @classmethod
    def from_json(cls, text: str) -> "Columns":
        described = [
            column | {"shape": tuple(column["shape"]), "order": tuple(column["order"])}
            for column in json.loads(text)
        ]
        return cls(tuple(BatchColumn(**column) for column in described))

    def _taken_by(self, stages: Sequence[str]) -> list[BatchColumn]:
        return [column for column in self.columns if _takes(column.wanted, stages)]


def lay_columns(
    batch: Mapping[str, object], *, inputs: Collection[str], targets: Collection[str]
) -> Columns:
    """Lay out the columns that the first and the last stage take; others stay behind.

    Raises:
        DeliveryError: If one is missing, or is no tensor.
    """
    laid: list[BatchColumn] = []
    stop = 0
    for name, wanted in _by_stage(batch, inputs, targets):
        value = batch.get(name)
        if not isinstance(value, Tensor):
            raise DeliveryError(
                f"batch: column {name!r} is {type(value).__name__}, expected a tensor of one shape "
                f"for every batch; the batch has {', '.join(batch)}: declare a field of fixed shape"
            )
        # Images lie channels last: kept so, they are copied as they are.
        order = sorted(range(value.dim()), key=lambda dim: -value.stride()[dim])
        first = -(-stop // ALIGNMENT) * ALIGNMENT
        laid.append(
            BatchColumn(name, _name(value.dtype), tuple(value.shape), tuple(order), first, wanted)
        )
        stop = laid[-1].stop
    return Columns(tuple(laid))


def _by_stage(
    batch: Mapping[str, object], inputs: Collection[str], targets: Collection[str]
) -> Iterator[tuple[str, str]]:
    both = [name for name in batch if name in inputs and name in targets]
    yield from ((name, "input") for name in inputs if name not in both)
    yield from ((name, "both") for name in both)
    yield from ((name, "target") for name in targets if name not in both)


def _takes(wanted: str, stages: Sequence[str]) -> bool:
    return bool(stages) and (wanted == "both" or wanted in stages)


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _dtype(name: str) -> torch.dtype:
    dtype = getattr(torch, name)
    assert isinstance(dtype, torch.dtype), "written by _name"
    return dtype
