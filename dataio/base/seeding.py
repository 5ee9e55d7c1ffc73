"""Make every key, generator and digest: same seed and purpose, same numbers, on any machine."""

import hashlib
from typing import NewType

import numpy as np
import xxhash
from numpy.typing import ArrayLike, NDArray

ORDER_VERSION = 4
"""Raised when the same seed gives another order than before; kept in checkpoints."""

GOLDEN = np.uint64(0x9E3779B97F4A7C15)

Key = NewType("Key", int)
"""128 random bits that name one stream of numbers."""


def key(
    seed: int,
    purpose: str,
    *,
    epoch: int | None = None,
    replica: int | None = None,
    node: int | None = None,
    sample_id: int | None = None,
    step: int | None = None,
) -> Key:
    """Derive the key of one stream of random numbers.

    Args:
        seed: The run's seed.
        purpose: What the numbers decide, such as ``"order"``; two purposes never share numbers.
        epoch: None for what holds in all epochs.
        replica: None for what all ranks share.
        node: For what the replicas of a node share, however many they are.
        sample_id: For what is drawn sample by sample, whichever rank draws it.
        step: For what is drawn batch by batch.
    """
    text = f"{seed}|{purpose}|{epoch}|{replica}|{sample_id}|{step}"
    if node is not None:
        text += f"|{node}"
    return Key(xxhash.xxh3_128_intdigest(text.encode()))


def generator(stream: Key) -> np.random.Generator:
    """Open the stream of a key as a NumPy generator."""
    return np.random.Generator(np.random.Philox(key=stream))


def mix(x: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """Hash each of uint64[...] to another: the finaliser of SplitMix64; see `uniform`."""
    # Arithmetic of unsigned numbers wraps.
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


def uniform(stream: Key, numbers: ArrayLike, count: int) -> NDArray[np.float64]:
    """Draw for each of many numbers, such as sample ids, as if each had a stream of its own.

    Args:
        stream: Key of the purpose.
        numbers: int64[n].
        count: Draws for each.

    Returns:
        float64[n, count], uniform in [0, 1).

    Source: Steele et al., Fast splittable pseudorandom number generators, OOPSLA 2014 (SplitMix64).
    """
    low, high = np.uint64(stream & (2**64 - 1)), np.uint64(stream >> 64)
    own = mix(mix(np.asarray(numbers, np.int64).astype(np.uint64) ^ low) ^ high)
    counter = np.arange(1, count + 1, dtype=np.uint64) * GOLDEN
    # The 53 bits that a float64 holds.
    return np.ldexp((mix(own[:, None] + counter) >> np.uint64(11)).astype(np.float64), -53)


def digest(data: str | bytes) -> str:
    """Hash to 16 hex digits: equal ones are taken for equal data."""
    raw = data.encode() if isinstance(data, str) else data
    return hashlib.blake2b(raw, digest_size=8).hexdigest()
