"""The samples that every file of records in these tests holds, computed from their numbers."""

from typing import Any

import numpy as np
from numpy.typing import NDArray

NUM_SAMPLES = 12


def pixels(number: int) -> NDArray[np.uint8]:
    return np.random.default_rng(number).integers(0, 256, (6, 5, 3), np.uint8)


def sample(number: int) -> dict[str, Any]:
    """All that is written of a sample; a format takes what it can hold."""
    return {
        "text": f"sämple {number}",
        "raw": bytes([number]) * (number + 1),
        "label": 7 * number,
        "small": np.uint8(number),
        "score": number / 4,
        "fixed": np.full((2, 3), number, np.float32),
        "vector": np.arange(number + 1, dtype=np.int32) * 1000,
        "free": np.full((number % 3 + 1, 2), number, np.int16),
        "digits": 10**12 + number,
        "meta": {"id": number, "tags": [number, number + 1], "deep": {"name": f"n{number}"}},
        "picture": pixels(number),
        "png": pixels(number),
    }
