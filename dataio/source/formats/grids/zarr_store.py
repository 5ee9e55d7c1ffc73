"""A store of zarr's that reads through our own storage. Imported only where zarr is installed."""

import asyncio
import os
from collections.abc import AsyncIterator, Iterable, Sequence

import numpy as np
from numpy.typing import NDArray
from zarr.abc.store import (
    ByteRequest,
    OffsetByteRequest,
    RangeByteRequest,
    Store,
    SuffixByteRequest,
)
from zarr.core.buffer import Buffer, BufferPrototype

from dataio.base.errors import SourceError
from dataio.source.storage.files import Storage

MISSING = 2**64 - 1
"""Where the index of a shard says that a chunk begins which has only fill values."""


class SourceStore(Store):
    """A store that is read through `Storage`. A file that is not there is a chunk of fill."""

    supports_writes = supports_deletes = False
    supports_listing = True

    def __init__(self, storage: Storage, path: str) -> None:
        super().__init__(read_only=True)
        self._storage, self._path = storage, path
        self.blosc: tuple[str, ...] = ()
        """Begins of the keys of chunks that Blosc reads beyond where they were cut off."""
        self.indexes: dict[str, tuple[int, str]] = {}
        """By begins of the keys of shards that begin with an index: its numbers, and their type."""
        self.waits = "://" in path or storage.is_watched(f"{path}/")
        """Whether requests wait for a server, so that several are made at once."""

    def with_read_only(self, read_only: bool = False) -> "SourceStore":
        if not read_only:
            raise ValueError("a source is not written to")
        return self

    def __eq__(self, other: object) -> bool:
        return isinstance(other, SourceStore) and other._path == self._path

    def __hash__(self) -> int:
        return hash(self._path)

    async def get(
        self,
        key: str,
        prototype: BufferPrototype,
        byte_range: ByteRequest | None = None,
    ) -> Buffer | None:
        data = await asyncio.to_thread(self.fetch, key, byte_range)
        return None if data is None else prototype.buffer.from_bytes(data)

    async def get_partial_values(
        self,
        prototype: BufferPrototype,
        key_ranges: Iterable[tuple[str, ByteRequest | None]],
    ) -> "list[Buffer | None]":
        parts = [self.get(key, prototype, byte_range) for key, byte_range in key_ranges]
        return list(await asyncio.gather(*parts))

    async def exists(self, key: str) -> bool:
        return await asyncio.to_thread(self._storage.exists, f"{self._path}/{key}")

    async def list(self) -> AsyncIterator[str]:
        async for key in self.list_prefix(""):
            yield key

    async def list_prefix(self, prefix: str) -> AsyncIterator[str]:
        raise NotImplementedError("a source's directories are listed one by one")
        yield ""

    async def list_dir(self, prefix: str) -> AsyncIterator[str]:
        place = f"{self._path}/{prefix}".rstrip("/")
        for name in await asyncio.to_thread(self._names, place):
            yield name

    async def set(self, key: str, value: Buffer) -> None:
        raise NotImplementedError("a source is not written to")

    async def delete(self, key: str) -> None:
        raise NotImplementedError("a source is not written to")

    def _names(self, place: str) -> Sequence[str]:
        if "://" in place:
            children = self._storage.children(place)
            return [child.rstrip("/").rpartition("/")[2] for child in children]
        return self._storage.ask(place, lambda: sorted(os.listdir(place)))  # noqa: PTH208

    def fetch(self, key: str, byte_range: ByteRequest | None = None) -> bytes | None:
        """Read a file, or a part of it; None if it is not there.

        Raises:
            SourceError: If the storage fails.
            ValueError: If it is empty, ends before the part, or is a shard or a chunk of Blosc that
                was cut off.
        """
        path = f"{self._path}/{key}"
        if "://" in path and not self._storage.exists(path):
            return None
        try:
            opened = self._storage.open(path)
        except SourceError as error:
            if isinstance(error.__cause__, (FileNotFoundError, NotADirectoryError)):
                return None
            raise
        with opened as file:
            start, stop = 0, file.size
            if not stop:
                raise ValueError(f"{key} is empty")
            if isinstance(byte_range, RangeByteRequest):
                start, end = byte_range.start, byte_range.end
                if not start <= end <= stop:
                    raise ValueError(f"{key} has {stop} bytes, expected {start} to {end} in it")
                stop = end
            elif isinstance(byte_range, OffsetByteRequest):
                start = byte_range.offset
            elif isinstance(byte_range, SuffixByteRequest):
                start = max(stop - byte_range.suffix, 0)
            data = file.read_at(start, stop - start)
            is_whole = key[-1] in "0123456789c" and not byte_range
            for begin, (numbers, dtype) in self.indexes.items():
                if is_whole and key.startswith(begin):
                    _check_shard(key, data, np.frombuffer(data, dtype, numbers).reshape(-1, 2))
            is_chunk = is_whole and key.startswith(self.blosc)
            if is_chunk and (length := int.from_bytes(data[12:16], "little")) != len(data):
                raise ValueError(f"{key} has {len(data)} bytes, expected {length} as Blosc wrote")
            return data


def _check_shard(key: str, data: bytes, index: NDArray[np.unsignedinteger]) -> None:
    """Refuse a shard that ends before a chunk of it does, which Blosc would read beyond."""
    starts, lengths = index[index[:, 0] != MISSING].T
    if (lengths > len(data)).any() or (starts > len(data) - lengths).any():
        raise ValueError(f"{key} has {len(data)} bytes, expected all chunks of its index in it")
