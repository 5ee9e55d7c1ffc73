"""Rows made from a seed, for benchmarks that need a source which costs no reading."""

from collections.abc import Iterator, Mapping

import numpy as np
from numpy.typing import NDArray

from dataio import Field
from dataio.rows.fields import row_schema
from dataio.rows.rows import Rows, make_rows
from dataio.source.row_block import BLOCK_BYTES


class Generated:
    """A source of random rows: one fixed array or one field of bytes, beside a label.

    Args:
        name: Name of the set; sets with other contents have other names.
        num_samples: How many rows there are.
        row_bytes: Size of a row without its label, > 0.
    """

    made_as = "Generated"
    total_bytes = 0

    def __init__(self, name: str, num_samples: int, row_bytes: int) -> None:
        self.name = self.fingerprint = f"{name}-{num_samples}-{row_bytes}"
        self.num_samples = num_samples
        self.shard_starts = np.zeros(1, np.int64)
        self.bytes_read = 0
        self._row_bytes = row_bytes

    def read(self, sample_ids: NDArray[np.int64], fields: Mapping[str, Field]) -> Iterator[Rows]:
        """Make the rows of some samples, in blocks."""
        schema = row_schema(fields)
        rng = np.random.Generator(np.random.Philox(key=7))
        # Blocks as real sources give them: their size decides how the page cache holds the file.
        per_block = max(BLOCK_BYTES // self._row_bytes, 1)
        for ids in np.array_split(sample_ids, -(-len(sample_ids) // per_block)):
            label = (ids % 10).astype("<i8").view(np.uint8).reshape(-1, 8)
            if len(schema.fixed) == 2:
                data = rng.integers(0, 256, (len(ids), self._row_bytes), np.uint8)
                yield make_rows(schema, ids, [data, label], np.zeros((len(ids), 0), np.int64), [])
                continue
            parts = [rng.bytes(self._row_bytes) for _ in ids.tolist()]
            lengths = np.array([[len(part)] for part in parts])
            yield make_rows(
                schema, ids, [label], lengths, [np.frombuffer(b"".join(parts), np.uint8)]
            )
