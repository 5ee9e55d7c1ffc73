"""Zarr stores, versions 2 and 3, by zarr-python, whose bytes come through our own storage."""

import lzma
import math
import os
import zlib
from collections.abc import Iterator, Mapping
from contextlib import closing, contextmanager
from typing import TYPE_CHECKING, Any

import numpy as np
import xxhash
from numpy.typing import NDArray

from dataio.base.errors import SourceError, install_command
from dataio.rows.tiles import Box
from dataio.source.formats.grids.npz import ONE_ARRAY
from dataio.source.formats.grids.variables import Variable
from dataio.source.storage.files import Storage

if TYPE_CHECKING:
    from dataio.source.formats.grids.zarr_tensorstore import ChunkReader

ROOTS = ("zarr.json", ".zgroup", ".zarray", ".zmetadata")
"""A directory that holds one of these is a store."""
_ERRORS = (
    ArithmeticError,
    OSError,
    RuntimeError,
    SystemError,
    LookupError,
    ValueError,
    TypeError,
    EOFError,
    zlib.error,
    lzma.LZMAError,
)
NUM_CHECKED = 1000
"""Files whose size and time of change go into the fingerprint."""


class ZarrFormat:
    """Variables are named by their path in the store; a store that is one array has "arr_0"."""

    @contextmanager
    def opened(self, storage: Storage, path: str) -> Iterator["ZarrFile"]:
        library = _zarr(path)
        # It is a class of zarr's, which may not be installed.
        from dataio.source.formats.grids.zarr_store import SourceStore
        from dataio.source.formats.grids.zarr_tensorstore import ChunkReader

        with _explained(path):
            store = SourceStore(storage, path)
            # What lies beside arrays may be older than they are; behind a URL it saves listing.
            beside = None if "://" in path else False
            node = library.open(store=store, mode="r", use_consolidated=beside)
            found = ZarrFile(node, library, path)
            store.blosc = tuple(
                f"{array.path}/".lstrip("/")
                for array in found.arrays.values()
                if not array.shards and "Blosc" in repr(array.compressors[-1:])
            )
            for array in found.arrays.values():
                how = array.metadata.codecs[0] if array.shards else None
                if how is not None and how.index_location.value == "start":
                    numbers = 2 * math.prod(np.floor_divide(array.shards, array.chunks).tolist())
                    order = ">" if how.index_codecs[0].endian.value == "big" else "<"
                    store.indexes[f"{array.path}/".lstrip("/")] = numbers, f"{order}u8"
        with closing(ChunkReader(found.arrays, store, path)) as found.chunks:
            yield found

    def version(self, storage: Storage, path: str) -> list[int | str]:
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
    except _ERRORS as error:
        raise SourceError(
            f"{path}: zarr cannot read it ({type(error).__name__}: {error}), expected a whole "
            "store of version 2 or 3; files of it are missing or damaged: copy or write it again"
        ) from error


class ZarrFile:
    """An open store."""

    chunks: "ChunkReader"

    def __init__(self, node: Any, library: Any, path: str) -> None:
        self._path = path
        self.arrays: dict[str, Any] = {}
        if isinstance(node, library.Array):
            self.arrays[ONE_ARRAY] = node
        else:
            members = sorted(node.members(max_depth=None), key=lambda member: member[0])
            self.arrays = {n: found for n, found in members if isinstance(found, library.Array)}
        self.attributes = dict(node.attrs)
        self.variables: Mapping[str, Variable] = {
            name: _variable(array) for name, array in self.arrays.items()
        }

    def read(self, name: str, box: Box) -> NDArray[np.generic]:
        with _explained(self._path):
            values = self.chunks.read(name, box)
            if values is None:
                values = np.asarray(self.arrays[name][box])
        return values.astype(object) if values.dtype.kind == "T" else values


def is_store(storage: Storage, path: str) -> bool:
    """Whether a directory, or what a URL ends in, is a store."""
    return any(storage.exists(f"{path}/{name}") for name in ROOTS)


def _variable(array: Any) -> Variable:
    metadata = array.metadata
    named = getattr(metadata, "dimension_names", None) or array.attrs.get("_ARRAY_DIMENSIONS")
    names = tuple(str(name or "") for name in named) if named else ("",) * array.ndim
    return Variable.of(names, array.shape, array.dtype, array.chunks, array.attrs)


def _zarr(path: str) -> Any:
    try:
        import zarr
    except ModuleNotFoundError as error:
        raise SourceError(
            f"{path}: is a Zarr store, and zarr, which reads it, is not installed; run "
            f"`{install_command('zarr')}` on every node"
        ) from error
    return zarr
