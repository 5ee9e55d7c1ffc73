"""Files of records that other libraries write: what their formats have in common.

A walk finds samples in a shard; values are taken from the bytes of each; both become rows here.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import islice
from typing import Generic, NoReturn, Protocol, TypeVar

import numpy as np
from numpy.typing import NDArray

from dataio.base.errors import About, FieldError, SourceError
from dataio.rows.fields import Field, Raw
from dataio.rows.rows import Rows
from dataio.source.base import SampleCounts, SeekPoint, Shard, ShardFormat
from dataio.source.row_block import RowBlock
from dataio.source.storage.compressed import decompressed
from dataio.source.storage.files import Storage, StorageFile
from dataio.source.storage.window import File, ReadFile

AT_ONCE = 32
"""Samples that are encoded together."""

Sample = tuple[int, Sequence[Raw]]
"""A sample's number in its shard, and its values in the order of the fields."""

Take = Callable[[SeekPoint, memoryview], Sequence[Raw]]
"""Takes the values of fields from a sample, by where it begins and its bytes."""


class Walk(Protocol):
    """Finds the samples of an open shard."""

    def count(self) -> SampleCounts:
        """Count them, up to the last byte of the shard where that costs no more."""
        ...

    def find(self, numbers: NDArray[np.int64]) -> Iterator[tuple[SeekPoint, memoryview]]:
        """Find samples, int64[n], sorted, n >= 1: where each begins, and its bytes."""
        ...


AWalk = TypeVar("AWalk", bound=Walk)


class RecordFormat(ShardFormat, Generic[AWalk]):
    """Shards that are one file each, compressed or not, whatever the file's name says.

    Args:
        walk: Begins to find samples in a shard; in one that nobody has counted where it is None.
        values: Makes what takes the values of fields from samples of a shard.
        is_plain: Whether a shard that begins so is not compressed, whatever else it looks like.
    """

    def __init__(
        self,
        walk: Callable[[File, Shard | None], AWalk],
        values: Callable[[Storage, AWalk, Shard, Mapping[str, Field]], Take],
        *,
        is_plain: Callable[[bytes], bool] = lambda begin: False,
    ) -> None:
        self._walk, self._values, self._is_plain = walk, values, is_plain

    def count(self, storage: Storage, path: str) -> SampleCounts:
        """Count the samples of a shard.

        Raises:
            SourceError: If anything that is read on the way is damaged.
        """
        with storage.open(path) as opened:
            file = decompressed(opened, is_plain=self._is_plain)
            return self._walk(file, None).count()

    def read(
        self,
        storage: Storage,
        shard: Shard,
        numbers: NDArray[np.int64],
        fields: Mapping[str, Field],
    ) -> Iterator[Rows]:
        """Read samples of a shard, around what lies between them where that is worth a request."""
        with storage.open(shard.path) as opened:
            file = decompressed(self.checked(storage, opened), is_plain=self._is_plain)
            walk = self._walk(file, shard)
            take = self._values(storage, walk, shard, fields)
            yield from sample_rows(_taken(walk, take, numbers, shard), shard, fields, storage)

    def checked(self, storage: Storage, file: StorageFile) -> ReadFile:
        """Check a shard as a whole before any of it is read, where there is something to check."""
        return file


def _taken(walk: Walk, take: Take, numbers: NDArray[np.int64], shard: Shard) -> Iterator[Sample]:
    for point, data in walk.find(numbers):
        try:
            yield point[0], take(point, data)
        except SourceError as error:
            raise error.knowing(About(shard.first + point[0])) from error.__cause__


def sample_rows(
    samples: Iterable[Sample], shard: Shard, fields: Mapping[str, Field], storage: Storage
) -> Iterator[Rows]:
    """Encode samples in blocks.

    Args:
        samples: Of one shard, by ascending number.
        shard: The shard.
        fields: What each sample holds.
        storage: Lends the memory.
    """
    block = RowBlock(fields, storage.buffers)
    remaining = iter(samples)
    while part := list(islice(remaining, AT_ONCE)):
        numbers = [number for number, _ in part]
        block.extend(
            shard.first + np.array(numbers, np.int64),
            {name: [raws[i] for _, raws in part] for i, name in enumerate(fields)},
            _namer(shard.path, numbers),
        )
        if block.full:
            yield block.take()
    if len(block):
        yield block.take()


def check_keys(where: str, held: Iterable[str], fields: Mapping[str, Field]) -> None:
    """Refuse a field whose key no sample of a shard has.

    Raises:
        FieldError: If there is one.
    """
    names = list(held)
    for name, field in fields.items():
        if field.key not in names:
            refuse_key(where, names, field.key, name)


def refuse_key(where: str, held: Iterable[str], key: str, name: str) -> NoReturn:
    """Raise the FieldError of a key that is not there."""
    raise FieldError(
        f"{where} holds {', '.join(held) or 'nothing'}, expected {key!r} for field {name!r}; name "
        "one of these, or write the shard again with it"
    )


def refuse_twice(where: str, key: str, name: str) -> NoReturn:
    """Raise the FieldError of a key that several columns have."""
    raise FieldError(
        f"{where}: found several columns {key!r}, expected one for field {name!r}; write the shard "
        "again with names that differ"
    )


def disagree(shard: Shard, found: str) -> SourceError:
    """Describe a shard that is no longer what was counted."""
    return SourceError(
        f"{shard.path}: found {found}, expected {shard.num_samples} samples as when it was "
        "counted; the shard was changed or is damaged: copy or write it again"
    )


def _namer(path: str, numbers: Sequence[int]) -> Callable[[int], str]:
    return lambda row: f"{path}: sample {numbers[row]}"
