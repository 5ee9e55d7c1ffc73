"""Damage drawn by seed: one bit of a file turned, a file cut short, or gone."""

from collections.abc import Iterator
from pathlib import Path

import numpy as np


def plant(files: list[Path], *, flips: int, cuts: int, seed: int) -> Iterator[tuple[Path, str]]:
    """Damage one file at a time, and mend it when the next is asked for.

    Yields:
        The damaged file, and what was done to it.
    """
    rng = np.random.default_rng(seed)
    whole = {path: path.read_bytes() for path in files}
    for number in range(flips + cuts):
        path = files[int(rng.integers(len(files)))]
        data = bytearray(whole[path])
        if number < flips:
            byte, bit = int(rng.integers(len(data))), int(rng.integers(8))
            data[byte] ^= 1 << bit
            path.write_bytes(data)
            words = f"bit {bit} of byte {byte} turned"
        elif number % 4:
            left = int(rng.integers(len(data)))
            path.write_bytes(data[:left])
            words = f"cut to {left} of {len(data)} bytes"
        else:
            path.unlink()
            words = "removed"
        yield path, words
        path.write_bytes(whole[path])
