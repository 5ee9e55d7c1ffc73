"""Keyed random-access permutations: element j of a shuffled range as a function call.

Feistel network with cycle walking: the range [0, n) is embedded in the next power of two, the
network permutes that, and values outside the range are permuted again until they fall inside. Small
ranges, where few rounds mix badly, sort hashed keys instead.

Source: Black and Rogaway, Ciphers with Arbitrary Finite Domains, CT-RSA 2002, sections 3 and 4.
"""

import numpy as np
from numpy.typing import ArrayLike, NDArray

from dataio.seeding import Key

ROUNDS = 10
SMALL_RANGE = 64


def permute(index: ArrayLike, n: int, stream: Key) -> NDArray[np.int64]:
    """Map places of a keyed permutation of [0, n) to the values that stand there.

    Args:
        index: int64[...]: Places, each in [0, n).
        n: Length of the range, >= 1.
        stream: Key of the permutation.

    Returns:
        int64[...]: One value of [0, n) for each place, in time and memory of ``index`` alone.

    Raises:
        ValueError: If a place lies outside [0, n).
    """
    return _walk(index, n, stream, inverse=False)


def unpermute(value: ArrayLike, n: int, stream: Key) -> NDArray[np.int64]:
    """Map values of a keyed permutation back to their places: the inverse of ``permute``."""
    return _walk(value, n, stream, inverse=True)


def _walk(index: ArrayLike, n: int, stream: Key, *, inverse: bool) -> NDArray[np.int64]:
    places = np.asarray(index, dtype=np.int64)
    if places.size and (places.min() < 0 or places.max() >= n):
        raise ValueError(f"permutation: an index lies outside [0, {n})")
    if n <= SMALL_RANGE:
        order = _small(n, stream)
        return np.argsort(order, kind="stable")[places] if inverse else order[places]
    bits = (n - 1).bit_length()
    keys = _round_keys(stream)
    network = _backward if inverse else _forward
    values = network(places.astype(np.uint64).ravel(), bits, keys)
    outside = np.flatnonzero(values >= n)
    while outside.size:
        values[outside] = network(values[outside], bits, keys)
        outside = outside[values[outside] >= n]
    return values.astype(np.int64).reshape(places.shape)


def _small(n: int, stream: Key) -> NDArray[np.int64]:
    keys = _round_keys(stream)
    hashed = _mix(_mix(np.arange(n, dtype=np.uint64) ^ keys[0]) ^ keys[1])
    return np.argsort(hashed, kind="stable").astype(np.int64)


def _round_keys(stream: Key) -> NDArray[np.uint64]:
    low, high = stream & (2**64 - 1), stream >> 64
    counter = np.arange(1, ROUNDS + 1, dtype=np.uint64)
    return _mix(_mix(counter ^ np.uint64(low)) ^ np.uint64(high))


def _mix(x: NDArray[np.uint64]) -> NDArray[np.uint64]:
    # Finaliser of splitmix64 (Steele et al., OOPSLA 2014); uint64 arithmetic wraps.
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


def _halves(bits: int) -> tuple[np.uint64, np.uint64, np.uint64]:
    low = bits // 2
    return np.uint64(low), np.uint64((1 << low) - 1), np.uint64((1 << (bits - low)) - 1)


def _round(
    left: NDArray[np.uint64],
    right: NDArray[np.uint64],
    masks: tuple[np.uint64, np.uint64],
    round_key: np.uint64,
    *,
    odd: bool,
) -> None:
    # The halves may differ in width by a bit: they take turns in place of being swapped.
    hashed = (left if odd else right) ^ round_key
    _mix_in_place(hashed)
    hashed &= masks[int(odd)]
    changed = right if odd else left
    changed ^= hashed


def _mix_in_place(x: NDArray[np.uint64]) -> None:
    # As `_mix`, with one array to spare in place of five: half the time on long arrays.
    spare = x >> np.uint64(30)
    x ^= spare
    x *= np.uint64(0xBF58476D1CE4E5B9)
    np.right_shift(x, np.uint64(27), out=spare)
    x ^= spare
    x *= np.uint64(0x94D049BB133111EB)
    np.right_shift(x, np.uint64(31), out=spare)
    x ^= spare


def _forward(x: NDArray[np.uint64], bits: int, keys: NDArray[np.uint64]) -> NDArray[np.uint64]:
    shift, low_mask, high_mask = _halves(bits)
    left, right = x >> shift, x & low_mask
    for number, round_key in enumerate(keys):
        _round(left, right, (high_mask, low_mask), round_key, odd=bool(number % 2))
    return (left << shift) | right


def _backward(x: NDArray[np.uint64], bits: int, keys: NDArray[np.uint64]) -> NDArray[np.uint64]:
    shift, low_mask, high_mask = _halves(bits)
    left, right = x >> shift, x & low_mask
    for number in reversed(range(len(keys))):
        _round(left, right, (high_mask, low_mask), keys[number], odd=bool(number % 2))
    return (left << shift) | right
