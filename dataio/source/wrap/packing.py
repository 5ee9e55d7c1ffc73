"""Documents in sequences of one length: concatenated, or each where it fits best.

A sequence of ``length`` tokens that a model reads has one token more, as each token's target is the
one behind it. What is put into a sequence are *pieces*: consecutive tokens of one document. Two
pieces of a document that follow one another share a token, the target of one and the input of the
next. So in both ways every token but the first of its document is a target exactly once.

Source: best fit as Ding et al., Fewer truncations improve language modeling, ICML 2024; here in
windows, so that a sequence is made of documents that lie near one another in the file.
"""

from itertools import pairwise
from typing import Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

Packing = Literal["concatenated", "best_fit"]
WINDOW, WINDOW_SEQUENCES = 1 << 12, 256
"""Documents that are fitted together, and what they fill at least."""

Ints = NDArray[np.int64]


class DocumentPieces(NamedTuple):
    """What the sequences of a file are made of.

    Attributes:
        starts: int64[num_sequences + 1]: The first piece of each sequence, and the number of all.
        documents: int64[num_pieces]: The document that a piece is of.
        firsts: int64[num_pieces]: Its first token there.
        lengths: int64[num_pieces]: Its tokens, >= 1.
    """

    starts: Ints
    documents: Ints
    firsts: Ints
    lengths: Ints

    @property
    def num_sequences(self) -> int:
        """Sequences of the file."""
        return len(self.starts) - 1


def attention_costs(pieces: DocumentPieces, *, length: int) -> NDArray[np.uint8]:
    """Compare what attention costs in each sequence, where it skips what documents do not see.

    Returns:
        uint8[num_sequences]: 255 for one document that fills the sequence, in proportion to the sum
        of the squares of its pieces' lengths.
    """
    squares = np.concatenate([np.zeros(1), np.cumsum((pieces.lengths / (length + 1)) ** 2)])
    return np.asarray(np.rint(255 * np.diff(squares[pieces.starts])), np.uint8)


def pack(lengths: Ints, *, length: int, packing: Packing, window: int = WINDOW) -> DocumentPieces:
    """Put documents into sequences.

    Args:
        lengths: int64[num_documents]: Their tokens, >= 0.
        length: Tokens that a model reads of a sequence, >= 1.
        packing: ``"concatenated"``: documents follow one another, and are cut where a sequence is
            full. ``"best_fit"``: only documents that are longer than a sequence are cut; a
            document of one token, which has no target, is left out.
        window: Documents that are fitted together, >= 1; more where they are short.

    Returns:
        The pieces: of one sequence in ascending order of document if concatenated, else in
        descending order of length.
    """
    if packing == "concatenated":
        return _concatenated(lengths, length)
    parts = [
        _best_fit(lengths[first:stop], length, first)
        for first, stop in _windows(lengths, window, WINDOW_SEQUENCES * length)
    ]
    counts = np.concatenate([np.zeros(1, np.int64), *(np.diff(part.starts) for part in parts)])
    columns = zip(*(part[1:] for part in parts), strict=True)
    joined = [np.concatenate(column) for column in columns] or [np.empty(0, np.int64)] * 3
    return DocumentPieces(np.cumsum(counts), *joined)


def _windows(lengths: Ints, window: int, num_tokens: int) -> list[tuple[int, int]]:
    """Cut the documents into windows of as many documents and tokens at least."""
    ends, cuts = np.cumsum(lengths), [0]
    while cuts[-1] < len(lengths):
        reached = num_tokens + int(ends[cuts[-1] - 1] if cuts[-1] else 0)
        stop = max(int(np.searchsorted(ends, reached)) + 1, cuts[-1] + window)
        # What would be left is fitted with the last.
        is_last = len(lengths) - stop < window or ends[-1] - ends[stop - 1] < num_tokens
        cuts.append(len(lengths) if stop >= len(lengths) or is_last else stop)
    return list(pairwise(cuts))


def _concatenated(lengths: Ints, length: int) -> DocumentPieces:
    ends = np.cumsum(lengths)
    begins = ends - lengths
    total = int(ends[-1]) if len(ends) else 0
    # int64[num_sequences]: the tokens of the file that each holds, the last one as target only.
    starts = np.arange(0, max(total - 1, 0), length)
    stops = np.minimum(starts + length + 1, total)
    first = np.searchsorted(ends, starts, side="right")
    last = np.searchsorted(begins, stops, side="left")
    counts = last - first
    rows = np.repeat(np.arange(len(starts)), counts)
    # int64[num_pieces]
    documents = ranges(first, counts)
    begin = np.maximum(begins[documents], starts[rows])
    stop = np.minimum(ends[documents], stops[rows])
    kept = stop > begin
    pieces = np.bincount(rows[kept], minlength=len(starts))
    documents, begin, stop = documents[kept], begin[kept], stop[kept]
    return DocumentPieces(_sums(pieces), documents, begin - begins[documents], stop - begin)


def _best_fit(lengths: Ints, length: int, first_document: int) -> DocumentPieces:
    """Fit the pieces of some documents, the longest first, each where the least room is left."""
    room = length + 1
    # Of n tokens n - 1 are targets.
    counts = np.maximum(-(-(lengths - 1) // length), 0)
    documents = np.repeat(np.arange(len(lengths)), counts)
    firsts = ranges(np.zeros(len(lengths), np.int64), counts) * length
    sizes = np.minimum(lengths[documents] - firsts, room)
    order = np.argsort(-sizes, kind="stable")
    rows = np.empty(len(sizes), np.int64)
    # Bit r is set where a sequence has room for r more; `open_by` lists these.
    rooms, num_rows = 0, 0
    open_by: dict[int, list[int]] = {}
    for piece, size in zip(order.tolist(), sizes[order].tolist(), strict=True):
        fitting = rooms >> size
        if fitting:
            left = size + (fitting & -fitting).bit_length() - 1
            row = open_by[left].pop()
            if not open_by[left]:
                rooms ^= 1 << left
        else:
            left, row = room, num_rows
            num_rows += 1
        rows[piece] = row
        left -= size
        if left > 1:
            open_by.setdefault(left, []).append(row)
            rooms |= 1 << left
    placed = order[np.argsort(rows[order], kind="stable")]
    starts = _sums(np.bincount(rows, minlength=num_rows))
    return DocumentPieces(starts, documents[placed] + first_document, firsts[placed], sizes[placed])


def ranges(firsts: Ints, counts: Ints) -> Ints:
    """Count from each first on, as often as it says: int64[sum of counts]."""
    shift = np.repeat(firsts - (np.cumsum(counts) - counts), counts)
    spread: Ints = np.arange(len(shift)) + shift
    return spread


def _sums(counts: Ints) -> Ints:
    return np.concatenate([np.zeros(1, np.int64), np.cumsum(counts)])
