"""Rows from Megatron's indexed datasets: tokens in a ``.bin``, where they lie in the ``.idx``.

The index is ``bytes[9] magic, uint64 version, uint8 dtype, uint64 num_sequences, uint64
num_documents``, then ``int32 lengths[num_sequences]``, ``int64 pointers[num_sequences]`` and
``int64 documents[num_documents]``: the sequences that documents begin at, and behind the last one.

Source: NVIDIA Megatron-LM, ``megatron/core/datasets/indexed_dataset.py``.
"""

import struct
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from dataio.base.errors import SourceError
from dataio.rows.fields import Field, Raw
from dataio.rows.rows import Rows
from dataio.source.base import SampleCounts, Shard, ShardFormat
from dataio.source.formats.records import Sample, check_keys, disagree, sample_rows
from dataio.source.storage.files import Storage, StorageFile
from dataio.source.storage.window import FileWindow, merge_extents
from dataio.source.values import shaped

TOKENS, DOCUMENT = "tokens", "document"
MAGIC = b"MMIDIDX\0\0"
HEAD = struct.Struct("<9sQBQQ")
DTYPES = {
    1: "uint8", 2: "int8", 3: "int16", 4: "int32", 5: "int64", 6: "float64", 7: "float32",
    8: "uint16",
}  # fmt: skip
CHECKED_AT_ONCE = 1 << 20
"""Sequences: some 30 MB."""


class MegatronFormat(ShardFormat):
    """Megatron datasets: a sample is a sequence, the keys are ``tokens`` and ``document``.

    ``document`` is the number, in the file, of the document that the sequence belongs to.
    """

    def index_of(self, path: str) -> str:
        """Name the ``.idx`` of a ``.bin``."""
        return f"{path.removesuffix('.bin')}.idx"

    def count(self, storage: Storage, path: str) -> SampleCounts:
        """Read the count in the index, and check all of that against the size of the ``.bin``."""
        with open_index(storage, path, self.index_of(path)) as file:
            index = read_head(file)
            bin_bytes = storage.stat(path)[0]
            for first in range(0, index.num_sequences, CHECKED_AT_ONCE):
                stop = min(first + CHECKED_AT_ONCE, index.num_sequences)
                read_extents(file, index, first, stop, bin_bytes=bin_bytes)
        return SampleCounts([index.num_sequences])

    def read(
        self,
        storage: Storage,
        shard: Shard,
        numbers: NDArray[np.int64],
        fields: Mapping[str, Field],
    ) -> Iterator[Rows]:
        """Read samples of a shard: of the index what is about them, and their tokens."""
        check_keys(shard.path, (TOKENS, DOCUMENT), fields)
        beside = open_index(storage, shard.path, self.index_of(shard.path))
        with beside, storage.open(shard.path) as file:
            index = read_head(beside)
            if index.num_sequences != shard.num_samples:
                raise disagree(shard, f"{index.num_sequences} sequences in its index")
            first, stop = int(numbers[0]), int(numbers[-1]) + 1
            extents = read_extents(beside, index, first, stop, bin_bytes=file.size)[numbers - first]
            starts = _documents(beside, index) if _has(fields, DOCUMENT) else None
            samples = _samples(file, index, numbers, extents, starts, fields)
            yield from sample_rows(samples, shard, fields, storage)


@dataclass(frozen=True)
class Index:
    """The head of an index."""

    dtype: np.dtype[np.generic]
    num_sequences: int
    num_documents: int


def open_index(storage: Storage, path: str, index: str) -> StorageFile:
    """Open the ``.idx`` of a shard.

    Raises:
        SourceError: If it is not there.
    """
    if not storage.exists(index):
        raise SourceError(
            f"{path}: there is no {index} beside it, expected the index of a Megatron dataset; "
            "copy it too, or give LitData's chunks as their directory"
        )
    return storage.open(index)


def read_head(file: StorageFile) -> Index:
    """Read the head of an ``.idx``.

    Raises:
        SourceError: If it is none, or its length is not that of its tables.
    """
    head = file.read_at(0, HEAD.size)
    try:
        magic, version, code, num_sequences, num_documents = HEAD.unpack(head)
        if magic != MAGIC or version != 1:
            raise ValueError(f"magic {magic!r}, version {version}")
        if code not in DTYPES:
            raise ValueError(f"the number {code} for a dtype")
        dtype = np.dtype(DTYPES[code]).newbyteorder("<")
    except (struct.error, ValueError) as error:
        raise SourceError(
            f"{file.path}: found no index of version 1 that begins with {MAGIC!r} ({error}), "
            "expected what Megatron's preprocess_data.py writes; copy or write it again"
        ) from error
    num_bytes = HEAD.size + 12 * num_sequences + 8 * num_documents
    # Multimodal datasets have a mode for each sequence, too.
    if file.size not in (num_bytes, num_bytes + num_sequences):
        raise SourceError(
            f"{file.path}: found {file.size} bytes, expected {num_bytes} for {num_sequences} "
            f"sequences and {num_documents} documents; the index is truncated, damaged or was "
            "joined to another: copy it again"
        )
    return Index(dtype, num_sequences, num_documents)


def read_extents(
    file: StorageFile, index: Index, first: int, stop: int, *, bin_bytes: int
) -> NDArray[np.int64]:
    """Find where sequences lie that follow one another.

    Args:
        file: The ``.idx``.
        index: Its head.
        first: The first of them.
        stop: Behind the last, > first.
        bin_bytes: Length of the ``.bin``.

    Returns:
        int64[stop - first, 2]: [start, end) in the ``.bin``.

    Raises:
        SourceError: If any of them does not begin where the one before it ends, at 0 the first,
            or the last of the index ends elsewhere than the ``.bin``.
    """
    # One more, so that whoever reads parts sees that these join.
    num_read = min(stop + 1, index.num_sequences) - first
    lengths = read_part(file, HEAD.size, "<i4", first, first + num_read).astype(np.int64)
    pointers = HEAD.size + 4 * index.num_sequences
    starts = read_part(file, pointers, "<i8", first, first + num_read).astype(np.int64)
    ends = starts + lengths * index.dtype.itemsize
    begins = np.append(0 if first == 0 else starts[0], ends[:-1])
    is_wrong = (lengths < 0) | (starts < 0) | (starts != begins) | (ends > bin_bytes)
    if first + num_read == index.num_sequences:
        is_wrong[-1] |= ends[-1] != bin_bytes
    if is_wrong.any():
        at = int(is_wrong.argmax())
        raise SourceError(
            f"{file.path}: sequence {first + at} of {index.num_sequences}: found {lengths[at]} "
            f"tokens from byte {starts[at]} of the .bin to {ends[at]}, expected it to begin at "
            f"{begins[at]}, where the one before it ends, and the last to end with the .bin, of "
            f"{bin_bytes} bytes; one of the two is truncated or damaged, numbers overflowed when "
            "files were merged, or they do not belong together: copy or write both again"
        )
    return np.stack([starts, ends], axis=1)[: stop - first]


def _documents(file: StorageFile, index: Index) -> NDArray[np.int64]:
    """Read the first sequence of each document: int64[num_documents]."""
    start = HEAD.size + 12 * index.num_sequences
    found = read_part(file, start, "<i8", 0, index.num_documents).astype(np.int64)
    is_whole = len(found) and found[0] == 0 and found[-1] == index.num_sequences
    if not is_whole or (np.diff(found) < 0).any():
        raise SourceError(
            f"{file.path}: found documents that begin at {', '.join(map(str, found[:4]))} ..., "
            f"expected ascending numbers of sequences, from 0 to {index.num_sequences}; the index "
            "is damaged: copy or write it again, or leave out the field of the document"
        )
    return found


def read_part(
    file: StorageFile, start: int, dtype: str, first: int, stop: int
) -> NDArray[np.signedinteger]:
    """Read entries [first, stop) of a list that begins at a byte."""
    width = np.dtype(dtype).itemsize
    return np.frombuffer(file.read_at(start + width * first, width * (stop - first)), dtype)


def _has(fields: Mapping[str, Field], key: str) -> bool:
    return any(field.key == key for field in fields.values())


def _samples(
    file: StorageFile,
    index: Index,
    numbers: NDArray[np.int64],
    extents: NDArray[np.int64],
    starts: NDArray[np.int64] | None,
    fields: Mapping[str, Field],
) -> Iterator[Sample]:
    window = FileWindow(file, merge_extents(extents))
    for number, (start, stop) in zip(numbers.tolist(), extents.tolist(), strict=True):
        values: list[Raw] = []
        for name, field in fields.items():
            if field.key == DOCUMENT:
                assert starts is not None
                values.append(int(np.searchsorted(starts, number, side="right")) - 1)
                continue
            tokens = np.frombuffer(window.view(start, stop - start), index.dtype)
            values.append(shaped(tokens, field, name))
        yield number, values
