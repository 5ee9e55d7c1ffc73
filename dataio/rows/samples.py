"""What samples and batches are, and the functions of users that change them."""

import logging
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal, Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from dataio.base.checked import checked
from dataio.base.errors import FieldError

log = logging.getLogger(__name__)

Array = NDArray[np.generic]
Sample = dict[str, Array | bytes | str]
"""The fields of one sample, by name."""


@dataclass(frozen=True, slots=True)
class AsList:
    """A value of one sample that its batch holds in a list, whatever the other samples' shapes.

    A transform, or the ``decode`` of a field, returns it where samples differ in shape: the batch
    then holds a list of tensors, one for each row.

    Attributes:
        value: An array, a tensor, or any other object.
    """

    value: object


class NothingDecodesError(FieldError):
    """No row of a batch decodes, so that nobody knows what its padding is to look like."""


Value = Array | list[Any]
"""One field of all samples of a batch."""

Batch = dict[str, torch.Tensor]
Transform = Callable[[Sample, np.random.Generator], Mapping[str, object]]
BatchTransform = Callable[[Batch, np.random.Generator], Batch]
Collate = Callable[[list[Sample]], object]
OnError = Literal["raise", "skip"]


class Batches(Protocol):
    """A `Loader`, a `Mixture` or an evaluation: what is iterated for batches."""

    def __len__(self) -> int: ...

    def __iter__(self) -> Iterator[Batch]: ...


@checked
class Tuples:
    """Batches as tuples: ``for image, label in Tuples(loader, "image", "label")``.

    For loops that take what a `DataLoader` gives. Padding of a last batch repeats samples, as under
    a `DistributedSampler`; ``"weight"`` among the names, of an evaluation ``"valid"``, says which
    rows are padding, and ``drop_last=True`` leaves none.

    Args:
        batches: A `Loader`, a `Mixture` or an evaluation.
        names: Of what a batch holds, in the order of the tuple.

    Raises:
        FieldError: From ``next``, if a batch has no such name.
    """

    def __init__(self, batches: Batches, *names: str) -> None:
        self.batches, self.names = batches, names
        self._has_warned = False

    def __len__(self) -> int:
        """Count the batches."""
        return len(self.batches)

    def __iter__(self) -> Iterator[tuple[torch.Tensor, ...]]:
        """Yield each batch's tensors, in the order of the names."""
        last = len(self.batches)
        for number, batch in enumerate(self.batches, 1):
            if number == last and not {"weight", "valid"} & {*self.names}:
                self._warn_of_padding(batch)
            try:
                yield tuple(batch[name] for name in self.names)
            except KeyError as error:
                raise FieldError(
                    f"Tuples: a batch has no {error}, expected one of {', '.join(batch)}; give it"
                ) from None

    def _warn_of_padding(self, batch: Batch) -> None:
        padding = int((batch["sample_id"] < 0).sum()) if "sample_id" in batch else 0
        if padding and not self._has_warned:
            self._has_warned = True
            log.warning(
                "Tuples: %d of the last batch's %d rows are padding, which a tuple does not say: "
                "they are trained as samples are; give the loader drop_last=True, or take "
                '"weight" too (of an evaluation "valid")',
                padding, len(batch["sample_id"]),
            )  # fmt: skip
