"""Sequences of one length as samples, made of the documents in Megatron's indexed datasets.

Which documents a sequence is made of follows from the lengths in the ``.idx`` alone: nothing is
kept of it, every rank finds the same, and a sequence has its number wherever it is read.
"""

from collections.abc import Iterator, Mapping
from dataclasses import KW_ONLY, dataclass
from functools import cached_property
from threading import Lock
from typing import Annotated, Literal

import numpy as np
from numpy.typing import NDArray

from dataio.base.checked import Range, checked
from dataio.base.errors import SourceError
from dataio.rows.fields import Array, Field
from dataio.rows.rows import Rows
from dataio.source.base import SampleCounts, Shard, ShardedSource
from dataio.source.formats.arrays import Part, array_rows
from dataio.source.formats.megatron import (
    DOCUMENT,
    TOKENS,
    Index,
    MegatronFormat,
    open_index,
    read_extents,
    read_head,
)
from dataio.source.formats.records import check_keys, disagree
from dataio.source.storage.files import Storage, StorageFile
from dataio.source.storage.window import merge_extents
from dataio.source.wrap.packing import DocumentPieces, Packing, attention_costs, pack, ranges

GROUP_BYTES = 16 << 20
"""Tokens of sequences that are made together: their pieces lie apart in the file."""


@checked
@dataclass(frozen=True)
class Sequences:
    """How the documents of a tokenized text become samples of one length.

    A sample has the keys ``tokens``, integer[length + 1], and ``document``: uint16[length + 1], the
    number in the sequence of the document that a token is of, from 1 on; 0 where nothing is real.

    Args:
        length: Tokens that a model reads of a sequence; a sample has the target of the last, too.
        packing: ``"concatenated"``: documents follow one another. ``"best_fit"``: documents that
            are no longer than a sequence are not cut. ``"stored"``: each sample of the shards is a
            sequence, of ``length`` tokens or one more.
        end: Of stored sequences the token that ends a document; None: each is one document.

    Raises:
        ValueError: If the length is not in [1, 65534], or ``end`` is given for another packing.
    """

    length: Annotated[int, Range(1, np.iinfo(np.uint16).max - 1)]
    _: KW_ONLY
    packing: Packing | Literal["stored"] = "best_fit"
    end: int | None = None

    def __post_init__(self) -> None:
        if self.end is not None and self.packing != "stored":
            raise ValueError(
                f'Sequences: end is {self.end}, but packing is "{self.packing}", which knows the '
                "documents; leave it out"
            )

    @property
    def key(self) -> str:
        """Names these sequences among others of the same text."""
        return f"{self.packing}-{self.length}{'' if self.end is None else f'-{self.end}'}"

    def fields(self, dtype: str) -> dict[str, Field]:
        """Describe a sample whose tokens have that dtype."""
        shape = (self.length + 1,)
        return {TOKENS: Array(TOKENS, shape, dtype), DOCUMENT: Array(DOCUMENT, shape, "uint16")}


class SequenceFormat(MegatronFormat):
    """Reads sequences.

    Args:
        sequences: How they are made.
    """

    def __init__(self, sequences: Sequences) -> None:
        self._sequences = sequences
        # The pieces of the shard that was read last; guarded by the lock.
        self._last: tuple[str, DocumentPieces] | None = None
        self._lock = Lock()

    def count(self, storage: Storage, path: str) -> SampleCounts:
        """Count the sequences that the lengths in the index make, and what each costs."""
        with open_index(storage, path, self.index_of(path)) as beside:
            index = read_head(beside)
            extents = _all_extents(beside, index, storage.stat(path)[0])
        pieces = self._pack(extents, index)
        costs = attention_costs(pieces, length=self._sequences.length)
        return SampleCounts([pieces.num_sequences], costs=costs.tobytes())

    def read(
        self,
        storage: Storage,
        shard: Shard,
        numbers: NDArray[np.int64],
        fields: Mapping[str, Field],
    ) -> Iterator[Rows]:
        """Read sequences of a shard: the documents that they are made of."""
        check_keys(shard.path, (TOKENS, DOCUMENT), fields)
        beside = open_index(storage, shard.path, self.index_of(shard.path))
        with beside, storage.open(shard.path) as file:
            index = read_head(beside)
            extents = _all_extents(beside, index, file.size)
            pieces = self._pieces(extents, index, shard)
            num_rows = max(GROUP_BYTES // (self._room * index.dtype.itemsize), 1)
            for first in range(0, len(numbers), num_rows):
                chosen = numbers[first : first + num_rows]
                values = self._values(file, index, pieces, extents[:, 0], chosen)
                yield array_rows(shard.first + chosen, values, fields, shard.path)

    def pieces(self, storage: Storage, shard: Shard) -> DocumentPieces:
        """Find what the sequences of a shard are made of."""
        with open_index(storage, shard.path, self.index_of(shard.path)) as beside:
            index = read_head(beside)
            extents = _all_extents(beside, index, storage.stat(shard.path)[0])
        return self._pieces(extents, index, shard)

    @property
    def _room(self) -> int:
        return self._sequences.length + 1

    def _pieces(self, extents: NDArray[np.int64], index: Index, shard: Shard) -> DocumentPieces:
        with self._lock:
            if self._last is None or self._last[0] != shard.path:
                self._last = shard.path, self._pack(extents, index)
            pieces = self._last[1]
        if pieces.num_sequences != shard.num_samples:
            raise disagree(shard, f"documents that make {pieces.num_sequences} sequences")
        return pieces

    def _pack(self, extents: NDArray[np.int64], index: Index) -> DocumentPieces:
        lengths = (extents[:, 1] - extents[:, 0]) // index.dtype.itemsize
        packing = self._sequences.packing
        assert packing != "stored", "read by StoredFormat"
        return pack(lengths, length=self._sequences.length, packing=packing)

    def _values(
        self, file: StorageFile, index: Index, pieces: DocumentPieces, starts: NDArray[np.int64],
        numbers: NDArray[np.int64],
    ) -> dict[Part, NDArray[np.generic]]:  # fmt: skip
        """Read sequences: ``tokens`` dtype[n, length + 1], ``document`` uint16[n, length + 1]."""
        counts = np.diff(pieces.starts)[numbers]
        # int64[num_pieces]: of these sequences.
        chosen = ranges(pieces.starts[numbers], counts)
        rows = np.repeat(np.arange(len(numbers)), counts)
        lengths = pieces.lengths[chosen]
        # In each sequence a piece begins where the one before it ends.
        before = np.cumsum(lengths) - lengths
        first_of_row = np.repeat(before[np.cumsum(counts) - counts], counts)
        begins = starts[pieces.documents[chosen]] + pieces.firsts[chosen] * index.dtype.itemsize
        data, at = _read(file, begins, lengths * index.dtype.itemsize)
        # int64[num_tokens]: where each real token lies in what was read, and in the sequences.
        source = ranges(at // index.dtype.itemsize, lengths)
        target = ranges(rows * self._room + before - first_of_row, lengths)
        tokens = np.zeros(len(numbers) * self._room, index.dtype)
        tokens[target] = data.view(index.dtype)[source]
        document = np.zeros(len(numbers) * self._room, np.uint16)
        own = np.arange(len(chosen)) - np.repeat(np.cumsum(counts) - counts, counts) + 1
        document[target] = np.repeat(own, lengths)
        shape = (len(numbers), self._room)
        return {(TOKENS, None): tokens.reshape(shape), (DOCUMENT, None): document.reshape(shape)}


class SequenceSource(ShardedSource):
    """A `Source` of sequences, whose documents are numbered shard by shard."""

    made_as = "Sequences"

    @cached_property
    def first_documents(self) -> NDArray[np.int64]:
        """int64[num_shards + 1]: The number of each shard's first document, and of all."""
        counts = [0]
        for shard in self.shards:
            with open_index(self.storage, shard.path, self._format.index_of(shard.path)) as beside:
                counts.append(read_head(beside).num_sequences)
        return np.cumsum(counts)

    def pieces(self, shard: int) -> DocumentPieces:
        """Find what the sequences of a shard, by its number, are made of."""
        assert isinstance(self._format, SequenceFormat)
        return self._format.pieces(self.storage, self.shards[shard])

    def documents(self, sample_ids: NDArray[np.int64]) -> list[NDArray[np.int64]]:
        """List the documents of sequences, of each in the order of its ``document``: int64[n]."""
        found: list[NDArray[np.int64]] = [np.empty(0, np.int64)] * len(sample_ids)
        at = np.searchsorted([shard.first for shard in self.shards], sample_ids, side="right") - 1
        for shard in np.unique(at).tolist():
            pieces, first = self.pieces(shard), self.shards[shard].first
            for place in np.flatnonzero(at == shard).tolist():
                mine = slice(*pieces.starts[sample_ids[place] - first :][:2])
                found[place] = self.first_documents[shard] + pieces.documents[mine]
        return found


def _all_extents(beside: StorageFile, index: Index, bin_bytes: int) -> NDArray[np.int64]:
    """Find where all documents lie: int64[num_documents, 2]; see `read_extents`."""
    if not index.num_sequences:
        return np.empty((0, 2), np.int64)
    return read_extents(beside, index, 0, index.num_sequences, bin_bytes=bin_bytes)


def _read(
    file: StorageFile, begins: NDArray[np.int64], num_bytes: NDArray[np.int64]
) -> tuple[NDArray[np.uint8], NDArray[np.int64]]:
    """Read runs of bytes in any order, those that lie near one another together.

    Returns:
        uint8[...]: What was read.
        int64[num_runs]: Where each run begins in it.
    """
    extents = merge_extents(np.stack([begins, begins + num_bytes], axis=1))
    sizes = extents[:, 1] - extents[:, 0]
    parts = [file.view_at(int(start), int(stop - start)) for start, stop in extents]
    data = np.concatenate([np.frombuffer(part, np.uint8) for part in parts])
    extent = np.searchsorted(extents[:, 0], begins, side="right") - 1
    return data, begins - extents[extent, 0] + (np.cumsum(sizes) - sizes)[extent]


def check_suffix(path: str, suffix: str) -> None:
    """Refuse sequences of what holds no documents of tokens.

    Raises:
        SourceError: If the shards are not Megatron's.
    """
    if suffix != ".bin":
        raise SourceError(
            f"{path}: found shards that end in {suffix}, expected .bin and .idx, of whose "
            "documents sequences are made; run `tonari pack SRC DST --tokenizer TOKENIZER`, or "
            'where each sample is a sequence of tokens give packing="stored"'
        )
