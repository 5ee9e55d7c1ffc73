"""Thresholds over the rows of all pools: exact, by totals of a few kilobytes, no score gathered."""

import numpy as np
from numpy.typing import NDArray

from dataio.plan.history import QUANTUM, Candidates, Total

DIGIT_BITS = 12
"""Bits that a round of `lowest` decides: a total of 4,096 counts, 32 KiB."""

BLOCK = 1 << 15
"""Rows taken at once: what stays in a core's cache."""

NUM_LEVELS = 1 << 14
"""Losses that `loss_levels` distinguishes: multiples of the quantum from 0 to 16."""


def loss_keys(rows: Candidates) -> NDArray[np.uint64]:
    """Number rows by last loss, ties by their place: distinct over all pools.

    A loss that is not a number, or was never reported, counts as infinite.

    Returns:
        uint64[num_slots]: Below 2**`key_bits`.
    """
    loss, places = rows.scores["loss"], rows.places
    place_bits = np.uint64(_place_bits(rows))
    keys = np.empty(len(loss), np.uint64)
    for start in range(0, len(loss), BLOCK):
        part = slice(start, start + BLOCK)
        # The sum makes -0.0 a plain 0
        bits = (np.fmin(loss[part], np.float32(np.inf)) + np.float32(0)).view(np.uint32)
        # Bits of floats order as unsigned integers, once those of negative ones are turned over
        ordered = np.where(bits >> 31, ~bits, bits | np.uint32(1 << 31)).astype(np.uint64)
        keys[part] = ordered << place_bits | places[part].astype(np.uint64)
    return keys


def count_keys(rows: Candidates, counts: NDArray[np.uint16]) -> tuple[NDArray[np.uint64], int]:
    """Number rows by a count each, ties by their place: distinct over all pools.

    Returns:
        uint64[num_slots]; and the bits of such a number, the same in all pools.
    """
    place_bits = _place_bits(rows)
    keys: NDArray[np.uint64] = counts.astype(np.uint64) << np.uint64(place_bits)
    keys |= rows.places.astype(np.uint64)
    return keys, 16 + place_bits


def key_bits(rows: Candidates) -> int:
    """Count the bits of a key by loss and place."""
    return 32 + _place_bits(rows)


def _place_bits(rows: Candidates) -> int:
    bits = max(rows.num_samples - 1, 1).bit_length()
    assert bits <= 32, "keys of 64 bits hold the places of 2**32 samples"
    return bits


def lowest(
    keys: NDArray[np.uint64], count: int, total: Total, *, num_bits: int
) -> NDArray[np.int64]:
    """Find which of this pool's rows are among those of the lowest keys of all pools.

    Finds the threshold digit by digit: after each round only rows that share its first digits
    are counted. Collective where ``total`` is: num_bits / 12 rounds at most.

    Args:
        keys: uint64[n], below 2**num_bits: Distinct over all pools.
        count: Rows wanted over all pools; all, if there are fewer.
        total: Sums over the pools.
        num_bits: Of a key.

    Returns:
        int64[...]: Indices into ``keys``, ascending.
    """
    here, left, threshold = keys, count, 0
    for shift in reversed(range(0, num_bits, DIGIT_BITS)):
        counts = total(_count_digits(here, shift))
        ends = np.cumsum(counts)
        if left >= int(ends[-1]):  # only in the first round, as later ones lie below a digit
            return np.arange(len(keys))
        digit = int(np.searchsorted(ends, left, side="right"))
        left -= int(ends[digit] - counts[digit])
        threshold += digit << shift
        if left == 0:
            break
        prefix = np.uint64(threshold >> shift)
        here = here[here >> np.uint64(shift) == prefix]
    return np.flatnonzero(keys < np.uint64(threshold))


def _count_digits(keys: NDArray[np.uint64], shift: int) -> NDArray[np.int64]:
    """int64[2**DIGIT_BITS]: Rows by the digit of their keys."""
    counts = np.zeros(1 << DIGIT_BITS, np.int64)
    mask = np.uint64(len(counts) - 1)
    for start in range(0, len(keys), BLOCK):
        digits = keys[start : start + BLOCK] >> np.uint64(shift) & mask
        counts += np.bincount(digits.view(np.int64), minlength=len(counts))
    return counts


def lowest_of_each(
    keys: NDArray[np.uint64], groups: NDArray[np.int64], counts: NDArray[np.int64], total: Total,
    *, num_bits: int,
) -> NDArray[np.int64]:  # fmt: skip
    """Find which of this pool's rows are among those of the lowest keys of their groups.

    As `lowest` for each group, all of them in the same rounds, which total at most 65,536 counts
    each; collective likewise.

    Args:
        keys: uint64[n], below 2**num_bits: Distinct over all pools.
        groups: int64[n], in [0, num_groups).
        counts: int64[num_groups], the same in all pools: Rows wanted of each group over all pools;
            all, where a group has fewer.
        total: Sums over the pools.
        num_bits: Of a key.

    Returns:
        int64[...]: Indices into ``keys``, ascending.
    """
    num_groups = len(counts)
    bits = min(max(16 - (num_groups - 1).bit_length(), 1), DIGIT_BITS)
    left, thresholds = counts.copy(), np.zeros(num_groups, np.uint64)
    is_whole = np.zeros(num_groups, np.bool_)
    # Groups whose threshold is not yet known, and the rows that may lie on either side of it
    is_open, here = counts > 0, np.arange(len(keys))
    shift = -(-num_bits // bits) * bits
    while shift and is_open.any():
        shift -= bits
        here = here[is_open[groups[here]]]
        digits = (keys[here] >> np.uint64(shift) & np.uint64((1 << bits) - 1)).astype(np.int64)
        cells = np.bincount(groups[here] << bits | digits, minlength=num_groups << bits)
        ends = np.cumsum(total(cells).reshape(num_groups, -1), axis=1)
        # Only in the first round, as later ones lie below a digit
        is_whole |= is_open & (ends[:, -1] <= left)
        is_open &= ~is_whole
        # int64[num_groups]
        digit = np.where(is_open, (ends <= left[:, None]).sum(axis=1), 0)
        below = np.take_along_axis(ends, np.maximum(digit - 1, 0)[:, None], axis=1)[:, 0]
        left -= np.where(digit > 0, below, 0)
        thresholds += digit.astype(np.uint64) << np.uint64(shift)
        is_open &= left > 0
        here = here[keys[here] >> np.uint64(shift) == thresholds[groups[here]] >> np.uint64(shift)]
    return np.flatnonzero((keys < thresholds[groups]) | is_whole[groups])


def loss_levels(loss: NDArray[np.float32]) -> NDArray[np.int64]:
    """Give losses in quanta: int64[n], in [0, `NUM_LEVELS`); those beyond are as the outermost."""
    most = np.float32((NUM_LEVELS - 1) * QUANTUM)
    # Bounded before it is cast: fmin makes a loss that is not a number the most
    bounded = np.fmax(np.fmin(loss, most), np.float32(0))
    return np.round(bounded / QUANTUM).astype(np.int64)


def percentiles(rows: Candidates, total: Total) -> NDArray[np.float64]:
    """Find the share of all pools' rows whose last loss is lower; of equal ones half counts.

    One total of 128 KiB. Exact for losses from 0 to 16; beyond these all are alike.

    Returns:
        float64[num_slots], in (0, 1).
    """
    level = loss_levels(rows.scores["loss"])
    counts = total(np.bincount(level, minlength=NUM_LEVELS))
    share: NDArray[np.float64] = (np.cumsum(counts) - counts / 2) / max(int(counts.sum()), 1)
    return np.asarray(share[level])
