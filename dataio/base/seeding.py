"""Make every key and generator: same seed and purpose, same numbers, on any machine."""

from typing import NewType

import numpy as np
import xxhash

ORDER_VERSION = 4
"""Raised when the same seed gives another order than before; kept in checkpoints."""

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
