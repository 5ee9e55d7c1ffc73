"""What near copies of a picture have in common: a small grey picture of it, and 64 signs. Pure.

The signs are those of the lowest frequencies of a cosine transform, which copies share but for a
few; local contrast shows which pictures that share them are copies.
"""

import numpy as np
from numpy.typing import NDArray

SIDE = 32
"""Pixels of the side of a small picture."""

NUM_BITS = 64

MOVED = 1
"""Pixels by which two small pictures may be moved against each other, each way."""

BLUR = 2
"""Pixels on each side over which a picture is blurred, to see what stands out of it."""

AT_ONCE = 4096
"""Pictures, or pairs of them, that are worked on at once."""

Small = NDArray[np.uint8]
"""uint8[num_pictures, SIDE, SIDE]: Grey."""


def _frequencies() -> NDArray[np.int64]:
    """int64[NUM_BITS, 2]: The lowest but for the mean, which brightness changes."""
    pairs = sorted((u + v, u, v) for u in range(SIDE) for v in range(SIDE) if u + v)
    return np.array([(u, v) for _, u, v in pairs[:NUM_BITS]])


def hash_pictures(small: Small) -> NDArray[np.uint64]:
    """Hash pictures to the signs of their lowest frequencies: uint64[num_pictures]."""
    rows, columns = _frequencies().T
    place = np.arange(SIDE)
    number = np.arange(max(rows.max(), columns.max()) + 1)[:, None]
    waves = np.cos(np.pi * number * (2 * place + 1) / (2 * SIDE)).astype(np.float32)
    hashes = np.empty(len(small), np.uint64)
    for start in range(0, len(small), AT_ONCE):
        part = small[start : start + AT_ONCE].astype(np.float32)
        # float32[pictures, frequencies, frequencies]
        spectrum = waves @ part @ waves.T
        signs = np.ascontiguousarray(spectrum[:, rows, columns] > 0)
        hashes[start : start + len(part)] = np.packbits(signs, axis=1).view(np.uint64)[:, 0]
    return hashes


def similarity(
    small: Small, first: NDArray[np.int64], second: NDArray[np.int64]
) -> NDArray[np.float32]:
    """Measure how much of what stands out of one picture stands out of another in the same place.

    The correlation of their local contrasts, the largest of those where one is moved by up to a
    pixel: a picture without contrast is like no other.

    Args:
        small: Of all pictures.
        first, second: int64[num_pairs]: Which.

    Returns:
        float32[num_pairs], in [-1, 1].
    """
    values = np.empty(len(first), np.float32)
    for start in range(0, len(first), AT_ONCE):
        part = slice(start, start + AT_ONCE)
        ours, theirs = _contrast(small[first[part]]), _contrast(small[second[part]])
        values[part] = _correlation(ours, theirs)
    return values


def _contrast(small: Small) -> NDArray[np.float32]:
    """float32[num_pictures, SIDE, SIDE]: Each pixel less the mean of those around it."""
    width = 2 * BLUR + 1
    padded = np.pad(small, ((0, 0), (BLUR, BLUR), (BLUR, BLUR)), mode="edge").astype(np.float32)
    # A sum over a square is one over rows, then columns
    lines, blurred = np.zeros_like(padded[:, :SIDE]), np.zeros(small.shape, np.float32)
    for place in range(width):
        lines += padded[:, place : place + SIDE]
    for place in range(width):
        blurred += lines[:, :, place : place + SIDE]
    return np.asarray(small - blurred / width**2, np.float32)


def _correlation(ours: NDArray[np.float32], theirs: NDArray[np.float32]) -> NDArray[np.float32]:
    best = np.full(len(ours), -1, np.float32)
    inner = SIDE - 2 * MOVED

    def window(pictures: NDArray[np.float32], down: int, right: int) -> NDArray[np.float32]:
        cut = pictures[:, down : down + inner, right : right + inner].reshape(len(pictures), -1)
        cut = cut - cut.mean(axis=1, keepdims=True)
        return np.asarray(cut / np.maximum(np.linalg.norm(cut, axis=1, keepdims=True), 1e-3))

    fixed = window(ours, MOVED, MOVED)
    for down in range(2 * MOVED + 1):
        for right in range(2 * MOVED + 1):
            together = np.einsum("ij,ij->i", fixed, window(theirs, down, right))
            best = np.maximum(best, together)
    return best
