"""Which samples are nearly the same: pairs of equal or similar ones, and groups of them. Pure."""

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from dataio.base.bits import count_ones
from dataio.base.seeding import generator, key

NUM_ORDERS = 32
"""Orders of the bits in which hashes are sorted."""

NEIGHBOURS = 8
"""Hashes behind each in such an order that it is compared with."""

MOST_BITS = 16
"""In which hashes of a pair may differ."""

MOST_WAITING = 1 << 22
"""Pairs found before they are sorted, and those found twice are dropped."""

BLOCK = 1024
"""Embeddings compared with all that follow at once."""

Ints = NDArray[np.int64]


class Pairs(NamedTuple):
    """Pairs of samples, the lower one first.

    Attributes:
        first: int64[num_pairs].
        second: int64[num_pairs].
        similarity: float32[num_pairs]: 1 where they are equal.
    """

    first: Ints
    second: Ints
    similarity: NDArray[np.float32]


def equal_pairs(digests: NDArray[np.uint64]) -> Pairs:
    """Pair each sample with the next one of the same content.

    Args:
        digests: uint64[num_samples, words]: Of their contents.
    """
    order = np.lexsort((np.arange(len(digests)), *digests.T))
    same = np.flatnonzero((digests[order[1:]] == digests[order[:-1]]).all(axis=1))
    return Pairs(order[same], order[same + 1], np.ones(len(same), np.float32))


def near_hashes(hashes: NDArray[np.uint64]) -> tuple[Ints, Ints]:
    """Find pairs of hashes that differ in few bits, nearly all of them.

    The hashes are sorted by their bits in several orders, and each is compared with those next to
    it: time O(n log n), whatever they are. Two that differ in d of 64 bits agree in the first 20 of
    an order with probability (1 - d/64) ** 20 or so.

    Args:
        hashes: uint64[n].

    Returns:
        int64[num_pairs] each, the lower first, each pair once.

    Source: Charikar, STOC 2002, section 3; Manku et al., WWW 2007, on sorted permuted tables.
    """
    bits = np.unpackbits(np.ascontiguousarray(hashes)[:, None].view(np.uint8), axis=1)
    rng = generator(key(0, "orders of bits"))
    found = [np.empty(0, np.int64)]
    for _ in range(NUM_ORDERS):
        permuted = np.ascontiguousarray(np.packbits(bits[:, rng.permutation(64)], axis=1))
        order = np.argsort(permuted.view(">u8")[:, 0].astype(np.uint64), kind="stable")
        ordered = hashes[order]
        for apart in range(1, min(NEIGHBOURS + 1, len(hashes))):
            differ = count_ones(ordered[apart:] ^ ordered[:-apart])
            near = np.flatnonzero(differ <= MOST_BITS)
            one, other = order[near], order[near + apart]
            found.append(np.minimum(one, other) * len(hashes) + np.maximum(one, other))
        # Most are found again and again
        if sum(map(len, found)) > 2 * len(found[0]) + MOST_WAITING:
            found = [np.unique(np.concatenate(found))]
    found = [np.unique(np.concatenate(found))]
    return found[0] // max(len(hashes), 1), found[0] % max(len(hashes), 1)


def near_embeddings(embeddings: NDArray[np.floating], *, least: float) -> Pairs:
    """Find the pairs of embeddings of at least a cosine; time O(n**2), block by block.

    Args:
        embeddings: float[n, width]; a file that is mapped will do.
        least: Cosine, in (0, 1].
    """
    norms = np.sqrt([np.square(row, dtype=np.float64).sum() for row in embeddings])
    scale = (1 / np.maximum(norms, 1e-12)).astype(np.float32)
    ones, others, cosines = [], [], []
    for start in range(0, len(embeddings), BLOCK):
        mine = embeddings[start : start + BLOCK] * scale[start : start + BLOCK, None]
        for behind in range(start, len(embeddings), BLOCK):
            theirs = embeddings[behind : behind + BLOCK] * scale[behind : behind + BLOCK, None]
            cosine = np.asarray(mine @ theirs.T, np.float32)
            row, column = np.nonzero(cosine >= least)
            kept = row + start < column + behind
            row, column = row[kept], column[kept]
            ones.append(row + start)
            others.append(column + behind)
            cosines.append(cosine[row, column])
    none = np.empty(0, np.int64)
    return Pairs(
        np.concatenate([none, *ones]),
        np.concatenate([none, *others]),
        np.concatenate([np.empty(0, np.float32), *cosines]),
    )


def group(pairs: Pairs, num_samples: int) -> list[Ints]:
    """Join pairs that share a sample: groups of at least two, each ascending, by their first."""
    parent = np.arange(num_samples)

    def root(sample: int) -> int:
        while parent[sample] != sample:
            parent[sample] = parent[parent[sample]]
            sample = int(parent[sample])
        return sample

    for one, other in zip(pairs.first.tolist(), pairs.second.tolist(), strict=True):
        low, high = sorted((root(one), root(other)))
        parent[high] = low
    members = np.unique(np.concatenate([pairs.first, pairs.second]))
    roots = np.array([root(sample) for sample in members.tolist()], np.int64)
    order = np.argsort(roots, kind="stable")
    cuts = np.flatnonzero(np.diff(roots[order])) + 1
    return [part for part in np.split(members[order], cuts) if len(part)]


def kept_of(members: Ints, labels: NDArray[np.generic] | None) -> int:
    """Choose which sample of a group stays: the first of those with its commonest label."""
    if labels is None:
        return int(members[0])
    values, counts = np.unique(labels, return_counts=True)
    # Of labels as common as each other that of the first sample
    common = values[counts == counts.max()]
    return int(members[np.isin(labels, common)][0])
