"""Reads chunks of Zarr by tensorstore, where that is installed and does as zarr-python does.

Bytes come through our own storage, as for zarr-python, into memory of tensorstore's. What that
cannot open, or fails on, zarr-python reads: it delivers the values, or says what is wrong.
"""

import itertools
import json
import logging
import os
import re
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from importlib import metadata
from math import prod
from typing import Any

import google_crc32c
import numpy as np
from numpy.typing import NDArray
from zarr.abc.store import RangeByteRequest, SuffixByteRequest
from zarr.core.buffer import default_buffer_prototype

from dataio.rows.tiles import Box
from dataio.source.formats.grids.zarr_store import MISSING, SourceStore

_log = logging.getLogger(__name__)
_used_by: set[int] = set()
"""The process that has tensorstore's threads: a fork of it that calls tensorstore is aborted."""

OLDEST = [0, 1, 74]
NUM_THREADS = 10
"""Chunks of a region that are asked for at once, as many as zarr-python asks for."""
PACKED = None, "blosc", "zstd"
"""Compressors of which it refuses each chunk that was cut off: not so of gzip, zlib and bz2."""
Place = tuple[int, ...]


class ChunkReader:
    """Reads regions of the arrays of one open store. One thread uses it.

    Args:
        arrays: As zarr-python opened them, by name.
        store: What reads their bytes.
        path: The store's, for the log.
    """

    def __init__(self, arrays: Mapping[str, Any], store: SourceStore, path: str) -> None:
        self._arrays, self._store, self._path = arrays, store, path
        self._opened: dict[str, _Chunked | None] = {}
        self._pool = ThreadPoolExecutor(NUM_THREADS, "zarr")

    def close(self) -> None:
        """End its threads."""
        self._pool.shutdown()

    def read(self, name: str, box: Box) -> NDArray[np.generic] | None:
        """Read a region of an array.

        Returns:
            The region; None where zarr-python is to read it, for a reason that is logged.

        Raises:
            SourceError: If the storage fails.
        """
        try:
            if name not in self._opened:
                self._opened[name] = None
                self._opened[name] = _Chunked(self._arrays[name], self._store)
            array = self._opened[name]
            return None if array is None else array.read(box, self._pool)
        except (ImportError, ValueError, TypeError, RuntimeError, ArithmeticError) as error:
            _log.debug("%s: zarr-python reads %s: %s", self._path, name, error)
            return None


class _Chunked:
    """An array in memory of tensorstore's, which holds the chunks of one region at a time."""

    def __init__(self, array: Any, store: SourceStore) -> None:
        import tensorstore

        found = metadata.version("tensorstore")
        if [int(part) for part in re.findall(r"\d+", found)[:3]] < OLDEST:
            raise ImportError(f"tensorstore is {found}, which aborts all forks of its process")
        if _used_by - {os.getpid()}:
            raise RuntimeError("this process was forked from one that uses tensorstore")
        if array.dtype.kind not in "biufc":
            raise TypeError(f"its values are {array.dtype}, expected numbers")
        _used_by.add(os.getpid())
        self._array, self._store, self._all = array, store, tensorstore.KvStore.KeyRange()
        self._context = tensorstore.Context()
        self._memory = tensorstore.KvStore.open("memory://", context=self._context).result()
        files = array.metadata.to_buffer_dict(default_buffer_prototype())
        file = files.get("zarr.json") or files[".zarray"]
        form = json.loads(file.to_bytes())
        self._shards = _Shards(array, store, form) if array.shards else None
        if form["zarr_format"] == 3:
            codecs = form["codecs"] if self._shards is None else self._shards.codecs
            form = _as_version_2(array, form["fill_value"], codecs)
        packed = (form["compressor"] or {"id": None})["id"]
        if packed not in PACKED:
            raise ValueError(f"its chunks are packed by {packed}, expected Blosc or Zstandard")
        form["dimension_separator"] = "."
        spec = {"driver": "zarr", "kvstore": "memory://", "metadata": form}
        self._values = tensorstore.open(
            spec, open=True, assume_metadata=True, context=self._context
        ).result()
        fills = {
            np.asarray(0 if fill is None else fill).astype(array.dtype).tobytes()
            for fill in (array.fill_value, self._values.fill_value)
        }
        its = self._values.dtype.numpy_dtype, self._values.shape
        if its != (array.dtype.newbyteorder("="), array.shape) or len(fills) > 1:
            raise TypeError(f"tensorstore takes it for {its}, filled by {fills}")

    def read(self, box: Box, pool: ThreadPoolExecutor) -> NDArray[np.generic]:
        """Read a region, whose chunks are asked for together."""
        parts = (
            range(part.start // chunk, -(-part.stop // chunk))
            for part, chunk in zip(box, self._array.chunks, strict=True)
        )
        places = list(itertools.product(*parts))
        if self._shards is not None:
            self._shards.look_up(places, pool)
        ask: Any = pool.map if self._store.waits else map
        try:
            for _ in ask(self._fetch, places):
                pass
            values: NDArray[np.generic] = self._values[box].read().result()
        finally:
            self._memory.delete_range(self._all).result()
        return values.astype(self._array.dtype, copy=False)

    def _fetch(self, place: Place) -> None:
        if self._shards is not None:
            data = self._shards.fetch(place)
        else:
            data = self._store.fetch(_key(self._array, place))
        if data is not None:
            self._memory.write(".".join(map(str, place)) or "0", data).result()


def _key(array: Any, place: Place) -> str:
    return f"{array.path}/{array.metadata.encode_chunk_key(place)}".lstrip("/")


def _as_version_2(array: Any, fill: object, codecs: Sequence[Any]) -> dict[str, Any]:
    """Describe chunks of version 3 as version 2 does: its driver refuses what is too long."""
    names = [codec["name"] for codec in codecs]
    if names[0] != "bytes" or len(names) > 2:
        raise ValueError(f"its codecs are {', '.join(names)}")
    big = codecs[0].get("configuration", {}).get("endian") == "big"
    return {
        "zarr_format": 2, "shape": array.shape, "chunks": array.chunks, "fill_value": fill,
        "dtype": array.dtype.newbyteorder(">" if big else "<").str, "order": "C", "filters": None,
        "compressor": {"id": names[1]} if names[1:] else None,
    }  # fmt: skip


class _Shards:
    """Finds the chunks that lie in shards.

    Attributes:
        codecs: Of each of these chunks.
    """

    def __init__(self, array: Any, store: SourceStore, form: dict[str, Any]) -> None:
        (codec,) = form["codecs"]
        how = codec["configuration"]
        packed = [each["name"] for each in how["index_codecs"]]
        order = how["index_codecs"][0].get("configuration", {}).get("endian")
        if packed not in (["bytes"], ["bytes", "crc32c"]) or order != "little":
            raise ValueError(f"the index of its shards is packed by {how['index_codecs']}")
        self._array, self._store = array, store
        self._per_shard = tuple(np.floor_divide(array.shards, array.chunks).tolist())
        self._checked = "crc32c" in packed
        num_bytes = 16 * prod(self._per_shard) + 4 * self._checked
        at_end = how.get("index_location", "end") == "end"
        self._where = SuffixByteRequest(num_bytes) if at_end else RangeByteRequest(0, num_bytes)
        self._indexes: dict[Place, NDArray[np.uint64] | None] = {}
        self.codecs = how["codecs"]

    def look_up(self, places: Sequence[Place], pool: ThreadPoolExecutor) -> None:
        """Read the indexes of the shards that hold some chunks, each once."""
        shards = list({self._split(place)[0] for place in places} - self._indexes.keys())
        self._indexes |= zip(shards, pool.map(self._index, shards), strict=True)

    def fetch(self, place: Place) -> bytes | None:
        """Read a chunk; None if it has only fill values."""
        shard, inside = self._split(place)
        index = self._indexes[shard]
        if index is None or index[inside][0] == MISSING:
            return None
        start, length = index[inside].tolist()
        return self._store.fetch(_key(self._array, shard), RangeByteRequest(start, start + length))

    def _split(self, place: Place) -> tuple[Place, Place]:
        pairs = [divmod(at, each) for at, each in zip(place, self._per_shard, strict=True)]
        return tuple(shard for shard, _ in pairs), tuple(inside for _, inside in pairs)

    def _index(self, shard: Place) -> NDArray[np.uint64] | None:
        data = self._store.fetch(_key(self._array, shard), self._where)
        if data is None:
            return None
        numbers = 2 * prod(self._per_shard)
        if self._checked and google_crc32c.value(data[:-4]).to_bytes(4, "little") != data[-4:]:
            raise ValueError(f"the index of the shard {shard} is damaged")
        return np.frombuffer(data, "<u8", numbers).reshape(*self._per_shard, 2)
