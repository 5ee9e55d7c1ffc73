"""Samples as a DataLoader reads them: one by one, from shards in the shared directory."""

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch.utils.data import Dataset

from dataio import Field, Image, Source, World, open_source
from dataio.rows.decode import decode_image, image_shape
from dataio.rows.fields import Stored
from dataio.source import Storage, scan_shard
from dataio.source.formats.tar.index import ShardIndex, read_index
from tonari.bench.errors import BenchError
from tonari.bench.storage.training.own_set import OwnShards
from tonari.cache.stage import along

Value = NDArray[np.generic] | bytes
SampleValues = dict[str, Value]
ReadBatch = dict[str, torch.Tensor | list[bytes]]


@dataclass(frozen=True)
class TarIndex:
    """Where samples lie in tar shards: one read covers all members of one.

    Attributes:
        paths: Of the shards.
        places: int64[num_samples, 3 + 2 * num_fields]: Shard, offset, length; then for each field
            its offset in what is read, and its length.
    """

    paths: Sequence[str]
    places: NDArray[np.int64]


def index_tars(paths: Sequence[str], fields: Mapping[str, Field], world: World) -> TarIndex:
    """Find every sample, each rank in some of the shards. Collective.

    Raises:
        BenchError: If a sample lacks a field.
    """
    mine = {shard: _places(shard, paths[shard], fields)
            for shard in range(world.rank, len(paths), world.world_size)}  # fmt: skip
    received = world.allgather(json.dumps(mine).encode(), doing="index the shards")
    found = {int(shard): rows for part in received for shard, rows in json.loads(part).items()}
    return TarIndex(
        paths, np.array([row for shard in range(len(paths)) for row in found[shard]], np.int64)
    )


def _places(shard: int, path: str, fields: Mapping[str, Field]) -> list[list[int]]:
    rows = []
    index = _shard_index(path)
    for key, members in zip(index.keys, index.members, strict=True):
        try:
            wanted = [members[field.key.lower()] for field in fields.values()]
        except KeyError as lacking:
            raise BenchError(
                f"{path}: sample {key!r} has no member {lacking.args[0]!r}, found "
                f"{', '.join(sorted(members))}; expected one for each field: name other fields"
            ) from lacking
        first = min(offset for offset, _ in wanted)
        last = max(offset + length for offset, length in wanted)
        inside = [number for offset, length in wanted for number in (offset - first, length)]
        rows.append([shard, first, last - first, *inside])
    return rows


def _shard_index(path: str) -> ShardIndex:
    storage = Storage()
    found = read_index(storage, path)
    if found is not None:
        return found
    with storage.open(path) as file:
        return scan_shard(file)


class SharedSamples(Dataset[SampleValues]):
    """Samples of shards, read from where these lie whenever they are asked for.

    A sample of a tar shard is one read. Other formats are read by `Source`, a batch at a time:
    whatever of them can only be read whole is read whole.

    Args:
        data: The shards.
        index: Of tar shards; None for other formats.
    """

    def __init__(self, data: OwnShards, index: TarIndex | None) -> None:
        self.data, self.fields, self.index = data, data.fields, index
        # Opened once a process: workers open their own.
        self._files: dict[int, int] = {}
        self._source: Source | None = None

    def __len__(self) -> int:
        return self.data.num_samples

    def __getitem__(self, number: int) -> SampleValues:
        return self.__getitems__([number])[0]

    def __getitems__(self, numbers: Sequence[int]) -> list[SampleValues]:
        return self.decode(self.fetch(numbers))

    def asked_bytes(self, numbers: Sequence[int], sample_bytes: float) -> int:
        """Count the bytes of some samples by the index; without one, estimate them by the mean."""
        if self.index is None:
            return round(len(numbers) * sample_bytes)
        return int(self.index.places[numbers, 2].sum())

    def fetch(self, numbers: Sequence[int]) -> list[dict[str, Stored]]:
        """Read samples as they are stored."""
        if self.index is None:
            return self._fetch_rows(numbers)
        fetched: list[dict[str, Stored]] = []
        for shard, offset, length, *inside in self.index.places[list(numbers)].tolist():
            data = memoryview(os.pread(self._file(shard), length, offset))
            if len(data) < length:
                raise BenchError(
                    f"{self.data.paths[shard]}: has {len(data)} of {length} bytes at {offset}; "
                    "expected a file that stays as it is until the benchmark ends: keep other jobs "
                    "from it"
                )
            at = zip(self.fields, inside[::2], inside[1::2], strict=True)
            fetched.append({name: data[start : start + size] for name, start, size in at})
        return fetched

    def decode(self, fetched: Sequence[Mapping[str, Stored]]) -> list[SampleValues]:
        """Make values of what was read."""
        # What a `Source` reads it has brought to its stored form already.
        encode = self.index is not None
        return [
            {
                name: _decode(
                    field.encode(sample[name], f"field {name!r}") if encode else sample[name],
                    name,
                    field,
                )
                for name, field in self.fields.items()
            }
            for sample in fetched
        ]

    def close(self) -> None:
        """Close the shards."""
        while self._files:
            os.close(self._files.popitem()[1])

    def __getstate__(self) -> dict[str, object]:
        return {**self.__dict__, "_files": {}, "_source": None}

    def _file(self, shard: int) -> int:
        if shard not in self._files:
            self._files[shard] = os.open(self.data.paths[shard], os.O_RDONLY | os.O_CLOEXEC)
        return self._files[shard]

    def _fetch_rows(self, numbers: Sequence[int]) -> list[dict[str, Stored]]:
        if self._source is None:
            self._source = open_source(along(self.data.paths, self.data.axis))
        found: dict[int, dict[str, Stored]] = {}
        for rows in self._source.read(np.unique(np.asarray(numbers, np.int64)), self.fields):
            ends = np.cumsum(rows.lengths, axis=0)
            for row, sample_id in enumerate(rows.sample_id.tolist()):
                values: dict[str, Stored] = {
                    column.name: data[row].tobytes()
                    for column, data in zip(rows.schema.fixed, rows.fixed, strict=True)
                }
                for field, name in enumerate(rows.schema.variable):
                    end, length = ends[row, field], rows.lengths[row, field]
                    values[name] = rows.variable[field][end - length : end].tobytes()
                found[sample_id] = values
        return [found[number] for number in numbers]


def _decode(stored: Stored, name: str, field: Field) -> Value:
    column = field.column(name)
    if column is not None:
        return np.frombuffer(stored, column.dtype).reshape(column.shape)
    if not isinstance(field, Image):
        return bytes(stored)
    view = memoryview(stored)
    pixels = np.empty((*(field.out or image_shape(view)), field.channels), np.uint8)
    decode_image(view, pixels, field, where=f"field {name!r}")
    return pixels


def collate(samples: Sequence[SampleValues]) -> ReadBatch:
    """Put samples together, field by field; what has no one shape stays a list."""
    batch: ReadBatch = {}
    for name, first in samples[0].items():
        values = [sample[name] for sample in samples]
        if isinstance(first, bytes):
            batch[name] = [bytes(value) for value in values]
        else:
            batch[name] = torch.from_numpy(np.stack([np.asarray(value) for value in values]))
    return batch
