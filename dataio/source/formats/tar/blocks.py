"""All plain headers of a part of a tar file at once, with NumPy.

A header is believed only where the one before it says that the next one lies, so that data that
looks like a header never is one. What is not plain (long names, links, sizes in base 256, headers
without magic, damage) ends the part: `tar_headers` reads it one by one.
"""

import sys
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

BLOCK = 512
NAME_BYTES = 100
MAGIC = slice(257, 263)
PREFIX = 345
DIGITS = 8 ** np.arange(11)[::-1]
EVEN_BYTES = np.uint64(0x00FF00FF00FF00FF)


@dataclass(frozen=True)
class Headers:
    """Headers of regular files, in their order.

    Attributes:
        name: uint8[n, width]: Names, filled up with zeros.
        name_bytes: int64[n]: Their lengths.
        offset: int64[n]: Where the files' bytes begin, from the beginning of the part.
        num_bytes: int64[n]: How many there are.
        end: Where the header after the last one begins.
    """

    name: NDArray[np.uint8]
    name_bytes: NDArray[np.int64]
    offset: NDArray[np.int64]
    num_bytes: NDArray[np.int64]
    end: int


def plain_headers(data: memoryview, *, limit: int, most_bytes: int = sys.maxsize) -> Headers:
    """Find the headers from the beginning of ``data`` on, as far as they are plain.

    Args:
        data: A part of a tar file that begins with a header.
        limit: How many bytes the file has from there on: members end within it.
        most_bytes: How many a member may hold.
    """
    num_blocks = len(data) // BLOCK
    blocks = np.frombuffer(data, np.uint8, num_blocks * BLOCK).reshape(num_blocks, BLOCK)
    magic = np.ascontiguousarray(blocks[:, MAGIC.start : MAGIC.start + 4]).view("<u4")[:, 0]
    # int64[num_candidates]: blocks that may be headers
    at = np.flatnonzero(magic == int.from_bytes(b"usta", "little"))
    # uint8[num_candidates, BLOCK]
    header = blocks[at]
    num_bytes, plain = _octal(header[:, 124:136])
    kind = header[:, 156]
    regular = (kind == ord("0")) | (kind == 0) | (kind == ord("7"))
    plain &= _sums_agree(header)
    plain &= np.where(regular, _named_plainly(header), _says_time_only(blocks, at, num_bytes, kind))
    following = at + 1 + (num_bytes + BLOCK - 1) // BLOCK
    plain &= (at * BLOCK + BLOCK + num_bytes <= limit) & (num_bytes <= most_bytes)
    chain = _chase(at, following, plain)
    end = int(following[chain[-1]]) * BLOCK if len(chain) else 0
    chain = chain[regular[chain]]
    name = header[chain, :NAME_BYTES]
    name_bytes = np.count_nonzero(name, axis=1)
    width = max(int(name_bytes.max(initial=0)), 1)
    return Headers(
        np.ascontiguousarray(name[:, :width]),
        name_bytes,
        (at[chain] + 1) * BLOCK,
        num_bytes[chain],
        end,
    )


def _chase(
    at: NDArray[np.int64], following: NDArray[np.int64], plain: NDArray[np.bool_]
) -> NDArray[np.int64]:
    """Follow the headers from the first block, each to the next: their numbers among ``at``."""
    num_candidates = len(at)
    if not num_candidates or at[0] != 0:
        return np.empty(0, np.int64)
    after = np.searchsorted(at, following)
    found = at[np.minimum(after, num_candidates - 1)] == following
    after[~found] = num_candidates
    # Up to here each header is followed by the next candidate.
    astray = np.flatnonzero(~plain | (after != np.arange(1, num_candidates + 1)))
    first = int(astray[0]) if len(astray) else num_candidates
    successors, believed = after.tolist(), plain.tolist()
    chain, number = list(range(first)), first
    while number < num_candidates and believed[number]:
        chain.append(number)
        number = successors[number]
    return np.array(chain, np.int64)


def _octal(field: NDArray[np.uint8]) -> tuple[NDArray[np.int64], NDArray[np.bool_]]:
    """Read numbers that fill their fields but for the last byte; and say which ones do."""
    # uint8[n, width - 1]: what is below "0" wraps round to above 7
    digits = field[:, :-1] - np.uint8(ord("0"))
    good = (digits <= 7).all(axis=1) & ((field[:, -1] == 0) | (field[:, -1] == ord(" ")))
    numbers = digits.astype(np.int64) @ DIGITS[-digits.shape[1] :]
    return np.where(good, numbers, 0), good


def _sums_agree(header: NDArray[np.uint8]) -> NDArray[np.bool_]:
    stored, good = _octal(header[:, 148:155])
    # uint64[n, 64]: four sums side by side in each, which 64 blocks of bytes cannot overflow
    words = header.view("<u8")
    odd_bytes = words >> np.uint64(8)
    odd_bytes &= EVEN_BYTES
    odd_bytes += words & EVEN_BYTES
    lanes = odd_bytes.sum(axis=1)
    total = lanes.view("<u2").reshape(-1, 4).sum(axis=1, dtype=np.int64)
    spaces = 8 * ord(" ") - header[:, 148:156].sum(axis=1, dtype=np.int64)
    agree: NDArray[np.bool_] = good & (stored == total + spaces)
    return agree


def _named_plainly(header: NDArray[np.uint8]) -> NDArray[np.bool_]:
    """Whether the name is in its own field alone, with nothing behind its end."""
    # GNU tar keeps times where POSIX keeps the directory; its magic ends in a space.
    alone = (header[:, PREFIX] == 0) | (header[:, MAGIC.stop - 1] == ord(" "))
    held = header[:, :NAME_BYTES] != 0
    ends = np.where(held.all(axis=1), NAME_BYTES, held.argmin(axis=1))
    plain: NDArray[np.bool_] = alone & (held.sum(axis=1) == ends)
    return plain


def _says_time_only(
    blocks: NDArray[np.uint8],
    at: NDArray[np.int64],
    num_bytes: NDArray[np.int64],
    kind: NDArray[np.uint8],
) -> NDArray[np.bool_]:
    """Whether it is a pax header with one record, the time: WebDataset writes one a member."""
    good: NDArray[np.bool_] = (
        (kind == ord("x")) & (num_bytes > 9) & (num_bytes < 100) & (at + 1 < len(blocks))
    )
    if not good.any():
        return good
    # uint8[num_good, 100]: "NN mtime=...\n", where NN is the length of all that
    said = blocks[at[good] + 1, :100]
    length = num_bytes[good]
    counted = (said[:, 0].astype(np.int64) - ord("0")) * 10 + said[:, 1] - ord("0")
    keyword = (said[:, 2:9] == np.frombuffer(b" mtime=", np.uint8)).all(axis=1)
    last = np.take_along_axis(said, length[:, None] - 1, axis=1)[:, 0]
    good[good] = (counted == length) & keyword & (last == ord("\n"))
    return good
