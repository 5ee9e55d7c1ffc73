"""Zarr stores, versions 2 and 3, by zarr-python, whose bytes come through our own storage."""

import asyncio
import os
from collections.abc import AsyncIterator, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache
from typing import TYPE_CHECKING, Any

import numpy as np
import xxhash
from numpy.typing import NDArray

from dataio.base.errors import SourceError
from dataio.source.formats.grids.npz import ONE_ARRAY
from dataio.source.formats.grids.variables import Box, Variable
from dataio.source.storage.files import Storage

if TYPE_CHECKING:
    from zarr.abc.store import ByteRequest
    from zarr.core.buffer import Buffer, BufferPrototype

ROOTS = ("zarr.json", ".zgroup", ".zarray", ".zmetadata")
"""A directory that holds one of these is a store."""
NUM_CHECKED = 1000
"""Files whose size and time of change go into the fingerprint."""


class ZarrFormat:
    """Variables are named by their path in the store; a store that is one array has "arr_0"."""

    @contextmanager
    def opened(self, storage: Storage, path: str) -> Iterator["ZarrFile"]:
        library = _zarr(path)
        with _explained(path):
            store = _store_class()(storage, path)
            found = ZarrFile(library.open(store=store, mode="r"), library, path)
        yield found

    def marks(self, storage: Storage, path: str) -> list[int | str]:
        """Hash the names of its files, and size and time of change of 1,000 of them.

        Behind a URL only of the root's own metadata, which is one request.
        """
        if "://" in path:
            root = next(f"{path}/{name}" for name in ROOTS if storage.exists(f"{path}/{name}"))
            return [root, *storage.stat(root)]
        names = sorted(
            os.path.join(place, name)  # noqa: PTH118
            for place, _, files in os.walk(path, followlinks=True)
            for name in files
        )
        digest = xxhash.xxh3_64("\0".join(name[len(path) :] for name in names).encode())
        checked = [name for name in names if name.endswith(ROOTS)]
        for name in checked + names[:: -(-len(names) // NUM_CHECKED)]:
            digest.update(f"{storage.stat(name)}".encode())
        return [len(names), digest.hexdigest()]


@contextmanager
def _explained(path: str) -> Iterator[None]:
    """Name the store where zarr fails; errors of the storage stay as they are."""
    try:
        yield
    except (OSError, RuntimeError, KeyError, ValueError, TypeError) as error:
        raise SourceError(
            f"{path}: zarr cannot read it ({type(error).__name__}: {error}), expected a whole "
            "store of version 2 or 3; files of it are missing or damaged: copy or write it again"
        ) from error


class ZarrFile:
    """An open store."""

    def __init__(self, node: Any, library: Any, path: str) -> None:
        self._path = path
        self._arrays: dict[str, Any] = {}
        if isinstance(node, library.Array):
            self._arrays[ONE_ARRAY] = node
        else:
            members = sorted(node.members(max_depth=None), key=lambda member: member[0])
            self._arrays = {n: found for n, found in members if isinstance(found, library.Array)}
        self.variables: Mapping[str, Variable] = {
            name: _variable(array) for name, array in self._arrays.items()
        }

    def read(self, name: str, box: Box) -> NDArray[np.generic]:
        with _explained(self._path):
            values = np.asarray(self._arrays[name][box])
        return values.astype(object) if values.dtype.kind == "T" else values


def is_store(storage: Storage, path: str) -> bool:
    """Whether a directory, or what a URL ends in, is a store."""
    return any(storage.exists(f"{path}/{name}") for name in ROOTS)


def _variable(array: Any) -> Variable:
    metadata = array.metadata
    named = getattr(metadata, "dimension_names", None) or array.attrs.get("_ARRAY_DIMENSIONS")
    names = tuple(str(name or "") for name in named) if named else ("",) * array.ndim
    dtype = "|O" if array.dtype.kind == "T" else array.dtype.str
    return Variable(names, array.shape, dtype, array.chunks)


@cache
def _store_class() -> type:
    from zarr.abc.store import OffsetByteRequest, RangeByteRequest, Store, SuffixByteRequest

    class SourceStore(Store):
        """A store that is read through `Storage`. A file that is not there is a chunk of fill."""

        supports_writes = supports_deletes = False
        supports_listing = True

        def __init__(self, storage: Storage, path: str) -> None:
            super().__init__(read_only=True)
            self._storage, self._path = storage, path

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
            prototype: "BufferPrototype",
            byte_range: "ByteRequest | None" = None,
        ) -> "Buffer | None":
            data = await asyncio.to_thread(self._get, key, byte_range)
            return None if data is None else prototype.buffer.from_bytes(data)

        async def get_partial_values(
            self,
            prototype: "BufferPrototype",
            key_ranges: "Iterable[tuple[str, ByteRequest | None]]",
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

        async def set(self, key: str, value: "Buffer") -> None:
            raise NotImplementedError("a source is not written to")

        async def delete(self, key: str) -> None:
            raise NotImplementedError("a source is not written to")

        def _names(self, place: str) -> Sequence[str]:
            if "://" in place:
                children = self._storage.children(place)
                return [child.rstrip("/").rpartition("/")[2] for child in children]
            return self._storage.ask(place, lambda: sorted(os.listdir(place)))  # noqa: PTH208

        def _get(self, key: str, byte_range: "ByteRequest | None") -> bytes | None:
            path = f"{self._path}/{key}"
            if not self._storage.exists(path):
                return None
            with self._storage.open(path) as file:
                start, stop = 0, file.size
                if isinstance(byte_range, RangeByteRequest):
                    start, stop = byte_range.start, min(byte_range.end, stop)
                elif isinstance(byte_range, OffsetByteRequest):
                    start = byte_range.offset
                elif isinstance(byte_range, SuffixByteRequest):
                    start = max(stop - byte_range.suffix, 0)
                return file.read_at(start, stop - start)

    return SourceStore


def _zarr(path: str) -> Any:
    try:
        import zarr
    except ModuleNotFoundError as error:
        raise SourceError(
            f"{path}: is a Zarr store, and zarr, which reads it, is not installed; run "
            "`pip install 'tonari[zarr]'` on every node"
        ) from error
    return zarr
