"""Rows from compressed tar shards, which can be read from the beginning only."""

import zlib
from collections.abc import Iterator, Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from dataio.base.errors import SourceError
from dataio.rows.fields import Field
from dataio.rows.rows import Rows
from dataio.source.base import Contents, Shard
from dataio.source.io.files import Storage, StorageFile
from dataio.source.io.window import IN_ORDER_BYTES
from dataio.source.tar.index import listed_counts
from dataio.source.tar.marks import count_and_mark
from dataio.source.tar.tar import read_in_order

COMPRESSED_BYTES = 1 << 20
UNKNOWN_SIZE = 1 << 62
WITH_GZIP_HEADER = 16 + zlib.MAX_WBITS


class GzipTarFormat:
    """Gzipped tar shards: `TarFormat`, but a part of a shard costs all that lies before it."""

    def known_counts(self, storage: Storage, paths: Sequence[str]) -> list[int] | None:
        return listed_counts(storage, paths)

    def survey(self, storage: Storage, path: str) -> Contents:
        with storage.open(path) as file:
            # Nobody can go to a mark.
            return Contents(count_and_mark(GunzippedFile(file)).counts)

    def read(
        self,
        storage: Storage,
        shard: Shard,
        numbers: NDArray[np.int64],
        fields: Mapping[str, Field],
    ) -> Iterator[Rows]:
        """Read samples; the shard is decompressed up to the last of them."""
        with storage.open(shard.path) as file:
            yield from read_in_order(GunzippedFile(file), shard, numbers, fields, storage.buffers)


class GunzippedFile:
    """What a gzipped file holds, read forwards.

    Attributes:
        path: Of the file.
        size: Length of what it holds; more than any file's until the end was seen.
        in_order: Whatever is passed over is decompressed all the same.
        request_bytes: Without meaning, as nothing can be passed over.
    """

    in_order = True
    request_bytes = 0

    def __init__(self, file: StorageFile) -> None:
        self.path = file.path
        self.size = UNKNOWN_SIZE
        self._file = file
        self._position = 0
        self._ready = memoryview(b"")
        self._compressed = b""
        self._num_compressed = 0
        self._inflate = zlib.decompressobj(WITH_GZIP_HEADER)

    def read_at(self, offset: int, length: int) -> bytes:
        """Read ``length`` bytes, fewer only at the end; never before what was read last.

        Raises:
            SourceError: If the file is no gzip file, damaged or truncated.
        """
        assert offset >= self._position, "a compressed shard is read forwards"
        parts = []
        while self._position < offset + length:
            if not self._ready:
                self._ready = memoryview(self._next())
                if not self._ready:
                    self.size = self._position
                    break
            passed = offset - self._position
            part = self._ready[: passed if passed > 0 else offset + length - self._position]
            if passed <= 0:
                parts.append(part)
            self._position += len(part)
            self._ready = self._ready[len(part) :]
        return b"".join(parts)

    def view_at(self, offset: int, length: int) -> memoryview:
        """Read as `read_at` does."""
        return memoryview(self.read_at(offset, length))

    def _next(self) -> bytes:
        """Decompress some more; b"" at the end. Without the GIL where it takes time."""
        while True:
            if not self._compressed:
                self._compressed = self._file.read_at(self._num_compressed, COMPRESSED_BYTES)
                self._num_compressed += len(self._compressed)
            if self._inflate.eof:
                # Files may be written one behind the other, and filled up with zeros.
                self._compressed = self._compressed.lstrip(b"\0")
                if self._compressed:
                    self._inflate = zlib.decompressobj(WITH_GZIP_HEADER)
                elif self._num_compressed == self._file.size:
                    return b""
                else:
                    continue
            if not self._compressed:
                raise self._bad("the end of the file in the middle")
            try:
                data = self._inflate.decompress(self._compressed, IN_ORDER_BYTES)
            except zlib.error as error:
                raise self._bad(f"bytes that do not decompress ({error})") from error
            ended = self._inflate.eof
            self._compressed = self._inflate.unused_data if ended else self._inflate.unconsumed_tail
            if data:
                return data

    def _bad(self, found: str) -> SourceError:
        return SourceError(
            f"{self.path}: found {found} before byte {self._num_compressed} of "
            f"{self._file.size}, expected a whole gzip file; it is truncated or damaged: copy the "
            "shard again, or write it again with `tonari pack`"
        )
