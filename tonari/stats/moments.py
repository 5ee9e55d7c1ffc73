"""Mean and deviation of values that come in parts, merged without loss of digits. Pure.

Source: Chan, Golub and LeVeque, Updating formulae and a pairwise algorithm for computing sample
variances, 1979.
"""

import numpy as np
from numpy.typing import NDArray

Moments = NDArray[np.float64]
"""float64[6, num_channels]: how many values are finite, their mean, the sum of their squared
deviations from it, the least, the largest; and how many are not finite."""


def measure(values: NDArray[np.generic]) -> Moments:
    """Measure values[num_channels, n]; what is not finite is counted, and left out of all else."""
    exact = values.astype(np.float64)
    finite = np.isfinite(exact)
    count = finite.sum(axis=1)
    mean = exact.sum(axis=1, where=finite) / np.maximum(count, 1)
    deviations = np.where(finite, exact - mean[:, None], 0.0)
    return np.stack([
        count, mean, np.square(deviations).sum(axis=1),
        exact.min(axis=1, where=finite, initial=np.inf),
        exact.max(axis=1, where=finite, initial=-np.inf),
        values.shape[1] - count,
    ])  # fmt: skip


def merge(one: Moments, other: Moments) -> Moments:
    """Merge the figures of two parts of the same channels."""
    count = one[0] + other[0]
    delta, share = other[1] - one[1], other[0] / np.maximum(count, 1)
    return np.stack([
        count, one[1] + delta * share, one[2] + other[2] + np.square(delta) * one[0] * share,
        np.minimum(one[3], other[3]), np.maximum(one[4], other[4]), one[5] + other[5],
    ])  # fmt: skip
