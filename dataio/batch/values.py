"""What samples and batches are, and the functions of users that change them."""

from collections.abc import Callable
from typing import Literal

import numpy as np
import torch
from numpy.typing import NDArray

Array = NDArray[np.generic]
Sample = dict[str, Array | bytes | str]
"""The fields of one sample, by name."""

Value = Array | list[bytes] | list[str] | list[Array] | list[object]
"""One field of all samples of a batch."""

Batch = dict[str, torch.Tensor]
Transform = Callable[[Sample, np.random.Generator], Sample]
BatchTransform = Callable[[Batch, np.random.Generator], Batch]
Collate = Callable[[list[Sample]], object]
OnError = Literal["raise", "skip"]
