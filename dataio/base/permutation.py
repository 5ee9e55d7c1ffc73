"""Keyed random-access permutations: element j of a shuffled range as a function call.

Feistel network with cycle walking: the range [0, n) is embedded in a slightly larger product of two
numbers, the network permutes that, and values outside the range are permuted again until they fall
inside. Small ranges, where few rounds mix badly, sort hashed keys instead.

Source: Black and Rogaway, Ciphers with Arbitrary Finite Domains, CT-RSA 2002, sections 3 and 4.
"""

import math
from collections.abc import Sequence
from functools import lru_cache

import numpy as np
from numpy.typing import ArrayLike, NDArray

from dataio.base.seeding import Key, mix

Words = NDArray[np.uint32] | NDArray[np.uint64]

ROUNDS = 8
SMALL_RANGE = 64
BLOCK = 1 << 15
"""Places mapped at once: what stays in a core's cache."""
FEW = 8
"""Up to so many places are mapped one by one, as each NumPy call costs more than a number does."""

WORD = 2**64 - 1
FACTORS = ((0xFF51AFD7ED558CCD, 0xC4CEB9FE1A85EC53), (0x85EBCA6B, 0xC2B2AE35))
"""Of murmur3's finalisers of 64 bits, and of 32 (Appleby, public domain)."""


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


def permute_each(index: ArrayLike, n: int, streams: Sequence[Key]) -> NDArray[np.int64]:
    """Map the same places of many permutations of [0, n): row k is ``permute(index, n, k-th)``.

    For few places each, where a call of its own would cost each permutation more than its numbers.

    Returns:
        int64[len(streams), len(index)].
    """
    places = np.asarray(index, np.int64)
    if n <= SMALL_RANGE or not places.size:
        rows = [permute(places, n, stream) for stream in streams]
        return np.array(rows, np.int64).reshape(len(streams), places.size)
    if places.min() < 0 or places.max() >= n:
        raise ValueError(f"permutation: an index lies outside [0, {n})")
    result = np.empty((len(streams), len(places)), np.int64)
    at_once = max(BLOCK // len(places), 1)
    for start in range(0, len(streams), at_once):
        # uint64[ROUNDS, streams]
        keys = _keys_of_each(streams[start : start + at_once])
        network = _FeistelNetwork(n, keys[:, :, None])
        values = network(
            np.broadcast_to(places.astype(network.dtype), (keys.shape[1], len(places)))
        )
        outside = np.nonzero(values >= n)
        while len(outside[0]):
            again = _FeistelNetwork(n, keys[:, outside[0]])(values[outside])
            values[outside] = again
            outside = tuple(part[again >= n] for part in outside)
        result[start : start + at_once] = values
    return result


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
    if places.size <= FEW:
        found = [_walk_one(place, n, stream, inverse=inverse) for place in places.ravel().tolist()]
        return np.array(found, np.int64).reshape(places.shape)
    network = _FeistelNetwork(n, _round_keys(stream))
    flat = places.ravel()
    result = np.empty(flat.shape, np.int64)
    for start in range(0, len(flat), BLOCK):
        part = slice(start, start + BLOCK)
        values = network(flat[part].astype(network.dtype), inverse=inverse)
        outside = np.flatnonzero(values >= n)
        while outside.size:
            values[outside] = again = network(values[outside], inverse=inverse)
            outside = outside[again >= n]
        result[part] = values
    return result.reshape(places.shape)


def _small(n: int, stream: Key) -> NDArray[np.int64]:
    keys = _round_keys(stream)
    hashed = mix(mix(np.arange(n, dtype=np.uint64) ^ keys[0]) ^ keys[1])
    return np.argsort(hashed, kind="stable").astype(np.int64)


def _round_keys(stream: Key) -> NDArray[np.uint64]:
    return _keys_of_each([stream])[:, 0]


def _keys_of_each(streams: Sequence[Key]) -> NDArray[np.uint64]:
    """uint64[ROUNDS, len(streams)]: The keys of each round."""
    low = np.array([stream & WORD for stream in streams], np.uint64)
    high = np.array([stream >> 64 for stream in streams], np.uint64)
    counter = np.arange(1, ROUNDS + 1, dtype=np.uint64)[:, None]
    return mix(mix(counter ^ low) ^ high)


@lru_cache(maxsize=16)
def _few_keys(stream: Key) -> list[int]:
    """Compute what `_round_keys` does, faster for one network."""
    low, high = stream & WORD, stream >> 64
    return [_mix(_mix(counter ^ low) ^ high) for counter in range(1, ROUNDS + 1)]


def _mix(x: int) -> int:
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9 & WORD
    x = (x ^ (x >> 27)) * 0x94D049BB133111EB & WORD
    return x ^ (x >> 31)


def _walk_one(x: int, n: int, stream: Key, *, inverse: bool) -> int:
    """Map one place as `_FeistelNetwork` does, in plain numbers."""
    rows = math.isqrt(n - 1) + 1
    sizes, keys = (rows, -(-n // rows)), _few_keys(stream)
    narrow = rows <= 1 << 16
    word, shift, half = (2**32 - 1, 15, 16) if narrow else (WORD, 32, 32)
    first, second = FACTORS[narrow]
    while True:
        halves = [*divmod(x, sizes[1])]
        for number in reversed(range(ROUNDS)) if inverse else range(ROUNDS):
            side = number % 2
            size = sizes[side]
            mixed = ((halves[1 - side] ^ keys[number]) & word) * first & word
            mixed = (mixed ^ (mixed >> shift)) * second & word
            mixed = ((mixed >> half) * size & word) >> half
            halves[side] = (halves[side] + (size - mixed if inverse else mixed)) % size
        x = halves[0] * sizes[1] + halves[1]
        if x < n:
            return x


class _FeistelNetwork:
    """A generalised Feistel network over [0, a * b), a and b near the root of n.

    So few places lie outside [0, n) that hardly any is walked on: fewer than a of them. In words of
    32 bits where these are enough: NumPy handles more of them at a time.

    Args:
        n: Length of the range.
        keys: uint64[ROUNDS, ...]: Of each round, for all places or for each.
    """

    def __init__(self, n: int, keys: NDArray[np.uint64]) -> None:
        rows = math.isqrt(n - 1) + 1
        columns = -(-n // rows)
        narrow = rows <= 1 << 16
        self.dtype = np.dtype(np.uint32 if narrow else np.uint64)
        word = self.dtype.type
        self._sizes = (word(rows), word(columns))
        self._keys = keys.astype(self.dtype)
        factors = FACTORS[narrow]
        self._factors = (word(factors[0]), word(factors[1]))
        self._shift, self._half = word(15 if narrow else 32), word(16 if narrow else 32)

    def __call__(self, x: Words, *, inverse: bool = False) -> Words:
        halves: list[Words] = list(np.divmod(x, self._sizes[1]))
        mixed, shifted = np.empty_like(x), np.empty_like(x)
        for number in reversed(range(ROUNDS)) if inverse else range(ROUNDS):
            changed, size = halves[number % 2], self._sizes[number % 2]
            np.bitwise_xor(halves[1 - number % 2], self._keys[number], out=mixed)
            np.multiply(mixed, self._factors[0], out=mixed)
            np.right_shift(mixed, self._shift, out=shifted)
            np.bitwise_xor(mixed, shifted, out=mixed)
            np.multiply(mixed, self._factors[1], out=mixed)
            # The upper half of the word, brought to [0, size) by a product in place of a division
            np.right_shift(mixed, self._half, out=mixed)
            np.multiply(mixed, size, out=mixed)
            np.right_shift(mixed, self._half, out=mixed)
            if inverse:
                np.subtract(size, mixed, out=mixed)
            np.add(changed, mixed, out=changed)
            # Whichever is right: the smaller, as words wrap below 0
            np.subtract(changed, size, out=shifted)
            np.minimum(changed, shifted, out=changed)
        np.multiply(halves[0], self._sizes[1], out=mixed)
        return np.add(mixed, halves[1], out=mixed)
