"""Which sample every slot of a node is to hold, by name: the ids only when they are needed."""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True)
class Placement:
    """The samples of a node's slots at the start of an epoch.

    Attributes:
        name: Of what it is a function (shuffle, layout, node, seed); equal names and epochs are
            equal placements. A cache records it, so that a warm start computes no ids.
        epoch: The epoch.
        num_slots: Slots of the node's pool.
        sample_ids: Computes int64[num_slots].
    """

    name: str
    epoch: int
    num_slots: int
    sample_ids: Callable[[], NDArray[np.int64]]
