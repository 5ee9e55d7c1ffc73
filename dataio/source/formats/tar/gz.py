"""Rows from compressed tar shards, which can be read from the beginning only."""

from collections.abc import Iterator, Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from dataio.rows.fields import Field
from dataio.rows.rows import Rows
from dataio.source.base import Contents, Shard
from dataio.source.formats.tar.index import listed_counts
from dataio.source.formats.tar.marks import count_and_mark
from dataio.source.formats.tar.tar import read_tar
from dataio.source.storage.compressed import DecompressedFile
from dataio.source.storage.files import Storage


class GzipTarFormat:
    """Gzipped tar shards: `TarFormat`, but a part of a shard costs all that lies before it.

    Args:
        joined: See `Shards`.
    """

    def __init__(self, *, joined: bool = False) -> None:
        self._joined = joined

    def known_counts(self, storage: Storage, paths: Sequence[str]) -> list[int] | None:
        return listed_counts(storage, paths)

    def survey(self, storage: Storage, path: str) -> Contents:
        with storage.open(path) as file:
            # Nobody can go to a mark.
            inside = DecompressedFile(file, "gzip")
            return Contents(count_and_mark(inside, joined=self._joined).counts)

    def read(
        self,
        storage: Storage,
        shard: Shard,
        numbers: NDArray[np.int64],
        fields: Mapping[str, Field],
    ) -> Iterator[Rows]:
        """Read samples; the shard is decompressed up to the last of them."""
        with storage.open(shard.path) as file:
            inside, buffers = DecompressedFile(file, "gzip"), storage.buffers
            yield from read_tar(inside, shard, numbers, fields, buffers, joined=self._joined)
