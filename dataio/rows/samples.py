"""What samples and batches are, and the functions of users that change them."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray

from dataio.base.errors import FieldError

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
