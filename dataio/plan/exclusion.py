"""Rows that no epoch shows: a bit for each sample of the dataset, the same on all ranks. Pure."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from dataio.base.bits import count_ones
from dataio.base.seeding import digest
from dataio.plan.layout import Layout

BLOCK = 1 << 21
"""Ids that are marked at once."""

COUNTED_BYTES = 64
"""Bytes of bits between two running totals; one byte's counts within them fit uint16."""


@dataclass(frozen=True, eq=False)
class Exclusion:
    """The samples of a dataset that are left out for good.

    Attributes:
        num_samples: Of the dataset.
        num_excluded: Of these, the ones that are left out.
        name: Digest of the list as it was given, "" where it is empty: equal names are equal lists.
        bits: uint8[...]: Bit ``i % 8`` of byte ``i // 8`` is set where sample ``i`` is left out;
            empty where none is.
    """

    num_samples: int
    num_excluded: int = 0
    name: str = ""
    bits: NDArray[np.uint8] = field(default_factory=lambda: np.empty(0, np.uint8), repr=False)

    @property
    def num_left(self) -> int:
        """Samples that are not left out."""
        return self.num_samples - self.num_excluded

    def flags(self, sample_id: NDArray[np.int64]) -> NDArray[np.bool_]:
        """bool[...]: Whether samples, each in [0, num_samples), are left out."""
        if not len(self.bits):
            return np.zeros(np.shape(sample_id), np.bool_)
        shift = (sample_id & 7).astype(np.uint8)
        found: NDArray[np.bool_] = (self.bits[sample_id >> 3] >> shift & np.uint8(1)).view(np.bool_)
        return found

    def below(self, sample_id: NDArray[np.int64]) -> NDArray[np.int64]:
        """int64[...]: Count the samples left out before each id in [0, num_samples]."""
        if not len(self.bits):
            return np.zeros(np.shape(sample_id), np.int64)
        byte = sample_id >> 3
        before, within = self._running
        part = self.bits[byte] & ((1 << (sample_id & 7)) - 1).astype(np.uint8)
        return np.asarray(before[byte // COUNTED_BYTES] + within[byte] + count_ones(part))

    def numbers(self, sample_id: NDArray[np.int64]) -> NDArray[np.int64]:
        """int64[...]: Number samples that are not left out among those: each in [0, num_left)."""
        return sample_id - self.below(sample_id) if self.num_excluded else sample_id

    def of(self, num_samples: int) -> "Exclusion":
        """Go on with a dataset that has become longer, or is cut; new samples are not left out.

        What lies beyond a cut is remembered, for when the dataset has become longer again.
        """
        if not self.name or num_samples == self.num_samples:
            return replace(self, num_samples=num_samples)
        bits = self.bits
        if len(bits) < _num_bytes(num_samples):
            bits = np.append(bits, np.zeros(_num_bytes(num_samples) - len(bits), np.uint8))
        whole = Exclusion(num_samples, self.num_excluded, self.name, bits)
        return replace(whole, num_excluded=int(whole.below(np.array(num_samples))))

    def beyond(self) -> NDArray[np.int64]:
        """int64[n]: What was left out behind the last sample, counted from there on."""
        first = self.num_samples >> 3
        bits = np.unpackbits(self.bits[first:], bitorder="little")
        ids = np.flatnonzero(bits) + 8 * first - self.num_samples
        return ids[ids >= 0]

    def left_in_pools(self, layout: Layout) -> NDArray[np.int64]:
        """int64[num_nodes]: Rows that are not left out, where each pool holds its first samples."""
        starts = np.append(layout.pool_starts, layout.num_samples)
        return np.asarray(layout.pool_sizes - np.diff(self.below(starts)))

    @cached_property
    def _running(self) -> tuple[NDArray[np.int64], NDArray[np.uint16]]:
        """Samples left out before each run of bytes, and before each byte within its run."""
        counts = count_ones(self.bits).reshape(-1, COUNTED_BYTES)
        within = np.cumsum(counts, axis=1, dtype=np.uint16)
        wholes = within[:, -1].astype(np.int64)
        within -= counts
        return np.cumsum(wholes) - wholes, within.reshape(-1)


def exclude_ids(parts: Sequence[NDArray[np.integer]], num_samples: int) -> Exclusion:
    """Leave out samples by their ids.

    Memory: a bit a sample, and at most 128 MiB; time: 0.1 s a million ids at most.

    Args:
        parts: Whole numbers, in any order, as often as they like.
        num_samples: Of the dataset.

    Raises:
        ValueError: If an id is not one of the dataset.
    """
    for part in parts:
        if len(part) and (part.min() < 0 or part.max() >= num_samples):
            wrong = part[(part < 0) | (part >= num_samples)]
            raise ValueError(
                f"exclude: found sample_id {wrong[0]} (and {len(wrong) - 1} more like it), "
                f"expected ids in [0, {num_samples}), as the source has {num_samples} samples; "
                "give a list that was made of this source"
            )
    bits = np.zeros(_num_bytes(num_samples), np.uint8)
    for part in parts:
        for start in range(0, len(part), BLOCK):
            # Sorted, so that each byte is written once, and memory is walked through forwards
            ids = np.sort(part[start : start + BLOCK])
            byte, bit = ids >> 3, np.uint8(1) << (ids & 7).astype(np.uint8)
            first = np.append(0, np.flatnonzero(byte[1:] != byte[:-1]) + 1)
            bits[byte[first]] |= np.bitwise_or.reduceat(bit, first)
    if not (num_excluded := _count(bits)):
        return Exclusion(num_samples)
    return Exclusion(num_samples, num_excluded, _name(bits), bits)


def _num_bytes(num_samples: int) -> int:
    """Bytes of whole runs, in which the id behind the last sample has a bit too."""
    return -(-(num_samples + 1) // (8 * COUNTED_BYTES)) * COUNTED_BYTES


def _count(bits: NDArray[np.uint8]) -> int:
    return sum(
        int(count_ones(bits[start : start + BLOCK]).sum(dtype=np.int64))
        for start in range(0, len(bits), BLOCK)
    )


def _name(bits: NDArray[np.uint8]) -> str:
    # The same list names itself alike however long the dataset has become
    stop = len(bits)
    while not bits[max(stop - BLOCK, 0) : stop].any():
        stop -= BLOCK
    start = max(stop - BLOCK, 0)
    return digest(bits[: start + int(np.flatnonzero(bits[start:stop])[-1]) + 1].tobytes())
