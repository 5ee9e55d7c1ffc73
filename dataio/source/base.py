"""A source: shards in their order, their samples numbered from 0 through all of them."""

from abc import ABC, abstractmethod
from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import zip_longest
from typing import NamedTuple, Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from dataio.base.errors import SourceError
from dataio.rows.fields import Array, Field
from dataio.rows.rows import Rows
from dataio.rows.tiles import Tiles
from dataio.source.storage.files import Storage


class Source(Protocol):
    """Samples that can be read by number."""

    @property
    def name(self) -> str:
        """The pattern as it was given."""
        ...

    @property
    def made_as(self) -> str:
        """What kind of object must be made to have this source again, such as a class's name.

        A cache keeps it beside the name, so it must never change. "" where `open_source` opens the
        source again by its name alone.
        """
        ...

    @property
    def num_samples(self) -> int: ...

    @property
    def total_bytes(self) -> int:
        """Bytes of all samples as they are stored, or 0 if nobody counted them.

        Staging warns by it of a disk that is too small, and a quota is divided by it.
        """
        ...

    @property
    def fingerprint(self) -> str:
        """Changes when the shards do."""
        ...

    @property
    def shard_starts(self) -> NDArray[np.int64]:
        """int64[num_pieces]: First sample of each shard, or part of it that is read as one.

        The natural places to cut between readers. [0] where any place will do.
        """
        ...

    @property
    def bytes_read(self) -> int:
        """Bytes that this process read so far, indexes and headers included."""
        ...

    def read(self, sample_ids: NDArray[np.int64], fields: Mapping[str, Field]) -> Iterator[Rows]:
        """Read samples, each shard that holds any opened once and read forwards.

        Args:
            sample_ids: int64[n], sorted, distinct.
            fields: What to keep of a sample.

        Yields:
            The rows in that order, in blocks of about 8 MiB.

        Raises:
            SourceError: If a shard is broken, or not what its index says.
            FieldError: If a sample is not what the fields declare.
        """
        ...


def check_ids(source: Source, sample_ids: NDArray[np.int64]) -> None:
    """Refuse what `Source.read` does not take.

    Raises:
        ValueError: If the ids are not sorted, not distinct, or not of this source.
    """
    if len(sample_ids) and (
        (np.diff(sample_ids) <= 0).any()
        or sample_ids[0] < 0
        or sample_ids[-1] >= source.num_samples
    ):
        raise ValueError(
            f"{source.name}: sample ids must be sorted, distinct and in [0, {source.num_samples})"
        )


def costs_of(source: Source) -> NDArray[np.uint8] | None:
    """Find what training each sample costs beside the others; None where they cost alike.

    A source may have it as ``costs``, uint8[num_samples]; then all batches are made to cost alike.

    Raises:
        ValueError: If it is anything else.
    """
    given: NDArray[np.uint8] | None = getattr(source, "costs", None)
    if given is None:
        return None
    costs = np.asarray(given)
    if costs.dtype != np.dtype(np.uint8) or costs.shape != (source.num_samples,):
        raise ValueError(
            f"{source.name}: costs is {costs.dtype}{list(costs.shape)}, expected "
            f"uint8[{source.num_samples}], one number a sample; or None where they cost alike"
        )
    return costs


SeekPoint = tuple[int, int]
"""The number of a sample in its shard, and where its first byte is."""

NO_SEEK_POINTS = np.empty((0, 2), np.int64)
NUM_NAMED = 16


class SampleCounts(NamedTuple):
    """How many samples a shard holds.

    Attributes:
        counts: Samples of each piece that is read as one; of all, where there are no pieces.
        seek_points: int64[num_points, 2]: Samples that reading can begin at, ascending; see
            `SeekPoint`.
        costs: Of each sample one byte, see `costs_of`; empty where they cost alike.
    """

    counts: list[int]
    seek_points: NDArray[np.int64] = NO_SEEK_POINTS
    costs: bytes = b""


@dataclass(frozen=True)
class Shard:
    """A file of the source.

    Attributes:
        path: Where it is.
        num_samples: How many samples it holds, >= 1.
        first: Number of its first sample.
        seek_points: See `SampleCounts`; empty where nobody looked.
        like: Path of the source's first shard, whose units this one must have; "" if it is this.
    """

    path: str
    num_samples: int
    first: int
    seek_points: NDArray[np.int64] = field(default_factory=lambda: NO_SEEK_POINTS, compare=False)
    like: str = ""


class ShardFormat(ABC):
    """How the shards of one kind are counted and read.

    What a format says of files beside its shards, and of classes, is optional.
    """

    @abstractmethod
    def count(self, storage: Storage, path: str) -> SampleCounts:
        """Count the samples of one shard."""

    @abstractmethod
    def read(
        self,
        storage: Storage,
        shard: Shard,
        numbers: NDArray[np.int64],
        fields: Mapping[str, Field],
    ) -> Iterator[Rows]:
        """Read samples of one shard; ``numbers`` count from its first."""

    def known_counts(self, storage: Storage, paths: Sequence[str]) -> list[int] | None:
        """Find the samples of each shard in an index of all; None where there is none."""
        return None

    def index_of(self, path: str) -> str:
        """Name the file beside a shard that says what it holds; "" where there is none."""
        return ""

    def hint_of(self, path: str) -> str:
        """Name the file that may lie beside a shard and save counting it; "" if none may."""
        return ""

    def check_ended(self, storage: Storage, path: str) -> None:
        """Refuse a shard that its writer may be about to go on with, where the format shows it.

        Raises:
            SourceError: If it has no end.
        """
        return None

    def class_names(self, storage: Storage, path: str, key: str) -> list[str] | None:
        """Name the classes of a key, where a shard has names for them."""
        return None


class ShardedSource:
    """A `Source` in shards of one format, which `open_source` opens again by its name.

    Args:
        name: The pattern as it was given.
        shard_format: How to read them.
        shards: In the order of their samples.
        fingerprint: Of the shards' names, sizes and times.
        storage: Reads and counts.
        piece_starts: int64[num_pieces]: See `Source.shard_starts`; None: the shards' own.
        total_bytes: Bytes of all shards, or 0 if nobody counted them.
        costs: See `costs_of`.
    """

    made_as = ""

    def __init__(
        self,
        name: str,
        shard_format: ShardFormat,
        shards: Sequence[Shard],
        *,
        fingerprint: str,
        storage: Storage,
        piece_starts: NDArray[np.int64] | None = None,
        total_bytes: int = 0,
        costs: NDArray[np.uint8] | None = None,
    ) -> None:
        self.name = name
        self.costs = costs
        self.total_bytes = total_bytes
        self.fingerprint = fingerprint
        self.shards = tuple(shards)
        self.storage = storage
        self.num_samples = sum(shard.num_samples for shard in shards)
        self.shard_starts = (
            np.array([shard.first for shard in shards], np.int64)
            if piece_starts is None
            else piece_starts
        )
        self._format = shard_format

    @property
    def bytes_read(self) -> int:
        return self.storage.bytes_read

    def class_names(self, key: str) -> list[str] | None:
        """Name the classes that a key's numbers stand for, as its shards do that name them.

        Of many shards `NUM_NAMED` are asked, the last among them.

        Raises:
            SourceError: If two of them have other names.
        """
        asked = dict.fromkeys(np.linspace(0, len(self.shards) - 1, NUM_NAMED, dtype=int).tolist())
        known: list[str] | None = None
        by = ""
        for path in [self.shards[number].path for number in asked]:
            names = self._format.class_names(self.storage, path, key)
            if names is not None and known is not None and names != known:
                pairs = enumerate(zip_longest(known, names))
                number, (one, other) = next((n, pair) for n, pair in pairs if pair[0] != pair[1])
                raise SourceError(
                    f"{path}: class {number} of {key!r} is {other!r}, and {one!r} in {by}, so that "
                    "one number stands for two classes; expected the same names in the same order; "
                    "number the classes of one of the shards anew"
                )
            if known is None and names is not None:
                known, by = names, path
        return known

    def place_of(self, sample_id: int) -> str:
        """Name a sample's shard, and its number there."""
        number = bisect_right(self.shards, sample_id, key=lambda shard: shard.first) - 1
        shard = self.shards[number]
        return f"{shard.path}, sample {sample_id - shard.first} of {shard.num_samples}"

    def read(self, sample_ids: NDArray[np.int64], fields: Mapping[str, Field]) -> Iterator[Rows]:
        """Read samples; see `Source.read`."""
        check_ids(self, sample_ids)
        return self._read(sample_ids, fields)

    def _read(self, sample_ids: NDArray[np.int64], fields: Mapping[str, Field]) -> Iterator[Rows]:
        firsts = np.array([shard.first for shard in self.shards] + [self.num_samples])
        cuts = np.searchsorted(sample_ids, firsts)
        for shard, start, stop in zip(self.shards, cuts[:-1], cuts[1:], strict=True):
            if stop > start:
                numbers = sample_ids[start:stop] - shard.first
                first = self.shards[0].path
                asked = shard if shard.path == first else replace(shard, like=first)
                yield from self._format.read(self.storage, asked, numbers, fields)


@runtime_checkable
class ReadsTiles(Protocol):
    """A source that reads a tile alone. Optional: of others whole samples are read, and cut."""

    def tile_bytes(self, field: Array, tiles: Tiles) -> tuple[int, str]:
        """Count the bytes of a sample, unpacked, that are read for a tile, about.

        Returns:
            They, and what would make them fewer, for a message.
        """
        ...


@runtime_checkable
class _KnowsPlaces(Protocol):
    """A source that can say where a sample is. Optional: a source need not."""

    def place_of(self, sample_id: int) -> str: ...


def place_of(source: Source, sample_id: int) -> str:
    """Name the shard or file of a sample; the source alone where it does not know."""
    return source.place_of(sample_id) if isinstance(source, _KnowsPlaces) else source.name
