"""Rows from Megatron's indexed datasets: tokens in a ``.bin``, where they lie in the ``.idx``.

The index is ``bytes[9] magic, uint64 version, uint8 dtype, uint64 num_sequences, uint64
num_documents``, then ``int32 lengths[num_sequences]``, ``int64 pointers[num_sequences]`` and
``int64 documents[num_documents]``: the sequences that documents begin at, and behind the last one.

Source: NVIDIA Megatron-LM, ``megatron/core/datasets/indexed_dataset.py``.
"""

import struct
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from dataio.base.errors import SourceError
from dataio.rows.fields import Field, Raw
from dataio.rows.rows import Rows
from dataio.source.base import Contents, Shard
from dataio.source.io.files import Storage, StorageFile
from dataio.source.io.window import Window, merge_extents
from dataio.source.records.samples import Sample, check_keys, disagree, sample_rows, shaped

TOKENS, DOCUMENT = "tokens", "document"
MAGIC = b"MMIDIDX\0\0"
HEAD = struct.Struct("<9sQBQQ")
DTYPES = {
    1: "uint8", 2: "int8", 3: "int16", 4: "int32", 5: "int64", 6: "float64", 7: "float32",
    8: "uint16",
}  # fmt: skip


class MegatronFormat:
    """Megatron datasets: a sample is a sequence, the keys are ``tokens`` and ``document``.

    ``document`` is the number, in the file, of the document that the sequence belongs to.
    """

    def index_of(self, path: str) -> str:
        """Name the ``.idx`` of a ``.bin``."""
        return f"{path.removesuffix('.bin')}.idx"

    def known_counts(self, storage: Storage, paths: Sequence[str]) -> None:
        return None

    def survey(self, storage: Storage, path: str) -> Contents:
        """Read the count in the index."""
        with open_index(storage, path, self.index_of(path)) as file:
            index = read_head(file)
        return Contents([index.num_sequences])

    def read(
        self,
        storage: Storage,
        shard: Shard,
        numbers: NDArray[np.int64],
        fields: Mapping[str, Field],
    ) -> Iterator[Rows]:
        """Read samples of a shard: of the index what is about them, and their tokens."""
        check_keys(shard.path, (TOKENS, DOCUMENT), fields)
        with open_index(storage, shard.path, self.index_of(shard.path)) as file:
            index = read_head(file)
            if index.num_sequences != shard.num_samples:
                raise disagree(shard, f"{index.num_sequences} sequences in its index")
            extents = _extents(file, index, numbers)
            starts = _documents(file, index) if _has(fields, DOCUMENT) else None
        with storage.open(shard.path) as file:
            if len(extents) and int(extents[:, 1].max()) > file.size:
                raise SourceError(
                    f"{file.path}: found {file.size} bytes, expected {int(extents[:, 1].max())} by "
                    "its .idx; the file is truncated: copy both again"
                )
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
        SourceError: If it is none, or truncated.
    """
    head = file.read_at(0, HEAD.size)
    try:
        magic, version, code, num_sequences, num_documents = HEAD.unpack(head)
        if magic != MAGIC or version != 1:
            raise ValueError(f"magic {magic!r}, version {version}")
        dtype = np.dtype(DTYPES[code]).newbyteorder("<")
    except (struct.error, ValueError, KeyError) as error:
        raise SourceError(
            f"{file.path}: found no index of version 1 that begins with {MAGIC!r} ({error}), "
            "expected what Megatron's preprocess_data.py writes; copy or write it again"
        ) from error
    num_bytes = HEAD.size + 12 * num_sequences + 8 * num_documents
    if file.size < num_bytes:
        raise SourceError(
            f"{file.path}: found {file.size} bytes, expected {num_bytes} for {num_sequences} "
            "sequences; the index is truncated: copy it again"
        )
    return Index(dtype, num_sequences, num_documents)


def _extents(file: StorageFile, index: Index, numbers: NDArray[np.int64]) -> NDArray[np.int64]:
    """Find where sequences lie: int64[n, 2], [start, stop) in the ``.bin``."""
    first, stop = int(numbers[0]), int(numbers[-1]) + 1
    lengths = read_part(file, HEAD.size, "<i4", first, stop)
    pointers = read_part(file, HEAD.size + 4 * index.num_sequences, "<i8", first, stop)
    chosen = numbers - first
    starts = pointers[chosen].astype(np.int64)
    return np.stack([starts, starts + lengths[chosen].astype(np.int64) * index.dtype.itemsize], 1)


def _documents(file: StorageFile, index: Index) -> NDArray[np.int64]:
    """Read the first sequence of each document: int64[num_documents]."""
    start = HEAD.size + 12 * index.num_sequences
    return read_part(file, start, "<i8", 0, index.num_documents).astype(np.int64)


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
    window = Window(file, merge_extents(extents))
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
