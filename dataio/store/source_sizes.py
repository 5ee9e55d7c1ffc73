"""How large rows and shards are likely to be, judged by the size of the source. Pure."""

import numpy as np

from dataio.rows.rows import RowSchema
from dataio.source.base import Source


def guess_heap_bytes(source: Source, schema: RowSchema, *, num_slots: int) -> int:
    """Guess the bytes of a pool's variable fields: its part of the source, or 0 if unknown."""
    if not schema.variable:
        return 0
    return source.total_bytes * num_slots // max(source.num_samples, 1)


def guess_variable_bytes(source: Source, schema: RowSchema) -> int:
    """Guess the bytes of a row's variable fields; 0 if unknown."""
    mean = source.total_bytes // max(source.num_samples, 1)
    return max(mean - schema.fixed_bytes, 0) if schema.variable else 0


def guess_shard_bytes(source: Source, schema: RowSchema) -> int:
    """Guess the bytes of the largest shard; 0 if unknown, or if the source is in one piece."""
    starts = np.append(source.shard_starts, source.num_samples)
    most = int(np.diff(starts).max())
    if len(starts) < 3:
        return 0
    total = source.total_bytes
    return most * schema.fixed_bytes if not total else total * most // source.num_samples
