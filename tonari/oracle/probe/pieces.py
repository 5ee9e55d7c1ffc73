"""How a source's rows lie in pieces that its reader takes whole: counted by that reader."""

import time
from bisect import bisect_right
from collections.abc import Mapping

import numpy as np

from dataio.rows.fields import Field
from dataio.source import Source
from dataio.source.base import ShardedSource
from tonari.oracle.windows import Pieces

SAMPLED = 4
"""Pieces of which one row is read."""
MOST_BYTES = 256 << 20
"""After so many no further piece is looked at."""
WHOLE = 0.8
"""One row that takes this share of its piece's bytes, or more, takes all of them."""


def count_pieces(
    source: Source, fields: Mapping[str, Field], *, source_row_bytes: float
) -> Pieces | None:
    """Read single rows here and there, and count the bytes that it takes.

    Args:
        source: Of shards, or of anything else, whose rows are then taken to be read alone.
        fields: What is kept of a sample.
        source_row_bytes: Read for one where all are read; mean.

    Returns:
        None where rows can be read without their piece.
    """
    if not isinstance(source, ShardedSource):
        return None
    starts, num_pieces = source.shard_starts, len(source.shard_starts)
    stops = np.append(starts[1:], source.num_samples)
    middles = (starts + stops) // 2
    rows = source.num_samples / num_pieces
    before = source.bytes_read

    def count(*pieces: int) -> tuple[int, float]:
        """Count bytes, and processor time, of the second time: a run reads a footer once."""
        for _ in range(2):
            begun, began_cpu_s = source.bytes_read, time.process_time()
            for _ in source.read(middles[list(pieces)], fields):
                pass
        return source.bytes_read - begun, time.process_time() - began_cpu_s

    sampled = np.linspace(0, num_pieces - 1, min(SAMPLED, num_pieces)).astype(int).tolist()
    read_bytes, cpu_s = {}, 0.0
    for piece in sampled:
        read_bytes[piece], one_s = count(piece)
        cpu_s += one_s
        if source.bytes_read - before > MOST_BYTES:
            break
    of_pieces = sum(int(stops[piece] - starts[piece]) for piece in read_bytes)
    if rows < 2 or sum(read_bytes.values()) < WHOLE * of_pieces * source_row_bytes:
        return None
    firsts = [shard.first for shard in source.shards]
    shard_of = [bisect_right(firsts, start) for start in starts.tolist()]
    pair = next((at for at in range(num_pieces - 1) if shard_of[at] == shard_of[at + 1]), None)
    opening_bytes = 0
    if pair is not None:
        # What two of one shard take less than both alone: it is opened once
        opening_bytes = count(pair)[0] + count(pair + 1)[0] - count(pair, pair + 1)[0]
    row_bytes = sum(one - opening_bytes for one in read_bytes.values()) / of_pieces
    return Pieces(
        rows=rows, read_bytes=row_bytes * rows, of_shard=num_pieces / len(firsts),
        opening_bytes=opening_bytes, core_s=cpu_s / of_pieces * rows,
    )  # fmt: skip
