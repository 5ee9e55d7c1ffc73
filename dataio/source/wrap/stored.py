"""Sequences of tokens that lie in shards as they are trained: one in each sample, of one length."""

from collections.abc import Iterator, Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from dataio.base.errors import FieldError
from dataio.rows.fields import Array, Field
from dataio.rows.rows import Rows
from dataio.source.base import SampleCounts, Shard, ShardedSource, ShardFormat
from dataio.source.formats.arrays import Part, array_rows
from dataio.source.formats.megatron import DOCUMENT, TOKENS
from dataio.source.formats.records import check_keys
from dataio.source.storage.files import Storage
from dataio.source.wrap.packed import Sequences


class StoredFormat(ShardFormat):
    """Reads the ``tokens`` of samples as sequences, in documents where a token ends these.

    Args:
        inner: How the shards are read.
        sequences: Their length, and the token that ends a document.
    """

    def __init__(self, inner: ShardFormat, sequences: Sequences) -> None:
        self._inner, self._sequences = inner, sequences
        self.index_of, self.hint_of = inner.index_of, inner.hint_of  # type: ignore[method-assign]

    def count(self, storage: Storage, path: str) -> SampleCounts:
        """Count the samples of one shard."""
        return self._inner.count(storage, path)

    def known_counts(self, storage: Storage, paths: Sequence[str]) -> list[int] | None:
        """Find the samples of each shard in an index of all."""
        return self._inner.known_counts(storage, paths)

    def read(
        self,
        storage: Storage,
        shard: Shard,
        numbers: NDArray[np.int64],
        fields: Mapping[str, Field],
    ) -> Iterator[Rows]:
        """Read sequences; one token less than a sample has room for is filled up with padding."""
        check_keys(shard.path, (TOKENS, DOCUMENT), fields)
        asked = next((field for field in fields.values() if field.key == TOKENS), None)
        dtype = asked.dtype if isinstance(asked, Array) else "int64"
        room, end, done = self._sequences.length + 1, self._sequences.end, 0
        width = self._width(storage, shard, numbers[:1], dtype)
        for rows in self._inner.read(storage, shard, numbers, _field(width, dtype)):
            found = np.ascontiguousarray(rows.fixed[0]).view(rows.schema.fixed[0].dtype)
            found = found.reshape(len(rows), width)
            tokens = np.zeros((len(rows), room), found.dtype)
            tokens[:, :width] = found
            document = np.zeros((len(rows), room), np.uint16)
            is_end = found == (-1 if end is None else end)
            # A token that ends a document belongs to it
            document[:, :width] = 1 + np.cumsum(is_end, axis=1) - is_end
            ids = shard.first + numbers[done : done + len(rows)]
            done += len(rows)
            values: dict[Part, NDArray[np.generic]] = {(TOKENS, None): tokens}
            yield array_rows(ids, values | {(DOCUMENT, None): document}, fields, shard.path)

    def _width(self, storage: Storage, shard: Shard, number: NDArray[np.int64], dtype: str) -> int:
        """Find how many tokens a sample has: as many as are read, or one more, the last target."""
        length = self._sequences.length
        try:
            list(self._inner.read(storage, shard, number, _field(length, dtype)))
        except FieldError:
            return length + 1
        return length


class StoredSource(ShardedSource):
    """A `Source` of stored sequences."""

    made_as = "Sequences"


def _field(width: int, dtype: str) -> dict[str, Field]:
    return {TOKENS: Array(TOKENS, (width,), dtype)}
