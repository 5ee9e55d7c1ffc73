"""Counting the ones of whole numbers, on any NumPy."""

from typing import Any

import numpy as np
from numpy.typing import NDArray


def count_ones(values: NDArray[np.unsignedinteger[Any]]) -> NDArray[np.uint8]:
    """uint8[...]: How many bits of each number are set; `np.bitwise_count` came with NumPy 2."""
    if hasattr(np, "bitwise_count"):
        return np.asarray(np.bitwise_count(values))
    part = np.asarray(values)[..., None].view(np.uint8)
    # Of each pair of bits, of each four, of each eight
    part = part - (part >> 1 & np.uint8(0x55))
    part = (part & np.uint8(0x33)) + (part >> 2 & np.uint8(0x33))
    part = (part + (part >> 4)) & np.uint8(0x0F)
    return np.asarray(part.sum(axis=-1, dtype=np.uint8))
