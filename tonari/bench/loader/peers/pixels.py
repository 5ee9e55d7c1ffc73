"""One decoder for all loaders that have none of their own, so that they differ in the rest."""

from collections.abc import Sequence

import numpy as np
import simplejpeg
from numpy.typing import NDArray

Encoded = bytes | NDArray[np.uint8]


def decode_one(data: Encoded, shape: tuple[int, ...]) -> NDArray[np.uint8]:
    """Decode one image: uint8[height, width, channels]."""
    out = np.empty(shape, np.uint8)
    simplejpeg.decode_jpeg(data, "RGB", buffer=out)
    return out


def decode(samples: Sequence[Encoded], shape: tuple[int, ...]) -> NDArray[np.uint8]:
    """Decode a batch in place: uint8[batch, height, width, channels]."""
    out = np.empty((len(samples), *shape), np.uint8)
    for data, pixels in zip(samples, out, strict=True):
        simplejpeg.decode_jpeg(data, "RGB", buffer=pixels)
    return out
