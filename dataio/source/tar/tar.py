"""Rows from tar shards by WebDataset's conventions."""

from collections.abc import Iterator, Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from dataio.base.buffers import BufferRing
from dataio.base.errors import SourceError
from dataio.rows.fields import Field, Raw
from dataio.rows.rows import Rows
from dataio.source.base import Contents, Mark, Shard
from dataio.source.io.files import Storage, StorageFile
from dataio.source.io.window import File, Window, merge_extents
from dataio.source.row_block import RowBlock
from dataio.source.tar.headers import BLOCK, read_number
from dataio.source.tar.index import (
    ShardIndex,
    index_path,
    indexed_count,
    listed_counts,
    read_index,
)
from dataio.source.tar.keys import (
    MemberKey,
    extensions_of,
    member_keys,
    missing_member,
    value_within,
)
from dataio.source.tar.marks import count_and_mark, cut_at_marks
from dataio.source.tar.samples import Samples, Wanted, walk_samples

KEY = "__key__"
OCTAL_LIMIT = 8 << 30
"""Sizes from here on are not in the header's octal digits."""

TarSample = tuple[int, str, dict[str, memoryview | None]]
"""Number in the shard, key, and for each extension the bytes; None where not asked for."""


class TarFormat:
    """Tar shards: a sample is the members in a row that share their name up to the first dot."""

    def known_counts(self, storage: Storage, paths: Sequence[str]) -> list[int] | None:
        return listed_counts(storage, paths)

    def survey(self, storage: Storage, path: str) -> Contents:
        count = indexed_count(storage, path)
        if count is not None:
            return Contents([count])
        with storage.open(path) as file:
            return count_and_mark(file)

    def read(
        self,
        storage: Storage,
        shard: Shard,
        numbers: NDArray[np.int64],
        fields: Mapping[str, Field],
    ) -> Iterator[Rows]:
        """Read samples: a part of a shard by its index if it has one, else by its headers."""
        index = read_index(storage, shard.path) if len(numbers) < shard.num_samples else None
        with storage.open(shard.path) as file:
            if index is None:
                yield from read_in_order(file, shard, numbers, fields, storage.buffers)
                return
            block = RowBlock(fields, storage.buffers)
            keys = member_keys(fields)
            for sample in _seek(file, shard, index, numbers, extensions_of(keys)):
                where = f"{shard.path}: sample {sample[1]!r}"
                block.add(shard.first + sample[0], _fields(shard.path, sample, keys, fields), where)
                if block.full:
                    yield block.take()
            if len(block):
                yield block.take()


def read_in_order(
    file: File,
    shard: Shard,
    numbers: NDArray[np.int64],
    fields: Mapping[str, Field],
    buffers: BufferRing,
) -> Iterator[Rows]:
    """Read samples by the headers of their shard, from its beginning or the marks before them."""
    keys = member_keys(fields)
    block = RowBlock(fields, buffers)
    for start, run in cut_at_marks(numbers, shard.marks):
        for samples, chosen in _walk(file, shard, start, run, extensions_of(keys)):
            _add(block, samples, shard, chosen, keys, fields)
            if block.full:
                yield block.take()
    if len(block):
        yield block.take()


def _walk(
    file: File, shard: Shard, start: Mark, numbers: NDArray[np.int64], extensions: frozenset[str]
) -> Iterator[tuple[Samples, NDArray[np.int64]]]:
    """Find samples from a mark on, those that are wanted among them; and see that all are there."""
    wanted, stop = Wanted(numbers, extensions, file.size // shard.num_samples), start[0]
    for samples in walk_samples(Window(file), wanted, start=start):
        stop = samples.stop
        first, last = np.searchsorted(numbers, [samples.start, stop])
        if first < last:
            yield samples, numbers[first:last]
        if last == len(numbers) and stop < shard.num_samples:
            return
    if stop != shard.num_samples:
        raise _disagree(shard, f"{stop} samples", f"{shard.num_samples}")


def _add(
    block: RowBlock,
    samples: Samples,
    shard: Shard,
    numbers: NDArray[np.int64],
    keys: Mapping[str, MemberKey],
    fields: Mapping[str, Field],
) -> None:
    """Add some of the samples to a block."""

    def where(row: int) -> str:
        return f"{shard.path}: sample {samples.key(int(numbers[row]))!r}"

    raws: dict[str, Sequence[Raw]] = {}
    for name, key in keys.items():
        if key.extension == KEY:
            raws[name] = samples.keys(samples.first_members()[numbers - samples.start])
            continue
        chosen, is_within = _members(samples, numbers, key.extension), False
        if not len(chosen) and key.json_extension:
            chosen, is_within = _members(samples, numbers, key.json_extension), True
        if len(chosen) < len(numbers):
            lacking = int(np.setdiff1d(numbers, samples.number[chosen])[0])
            held, extension = samples.held_by(lacking), key.json_extension or key.extension
            raise missing_member(shard.path, samples.key(lacking), held, extension, name)
        found = samples.payloads(chosen)
        raws[name] = found
        if is_within:
            raws[name] = [
                value_within(data, key, fields[name], name, where(row))
                for row, data in enumerate(found)
            ]
    block.extend(shard.first + numbers, raws, where)


def _members(samples: Samples, numbers: NDArray[np.int64], extension: str) -> NDArray[np.int64]:
    """Find the members of one extension that samples have."""
    chosen = np.flatnonzero(samples.code == samples.extensions.codes.get(extension, -1))
    if len(numbers) < samples.stop - samples.start:
        chosen = chosen[np.isin(samples.number[chosen], numbers)]
    return chosen


def _fields(
    path: str, sample: TarSample, keys: Mapping[str, MemberKey], fields: Mapping[str, Field]
) -> dict[str, Raw]:
    """Find each field's value by its name."""
    _, own_key, members = sample
    found: dict[str, Raw] = {}
    for name, key in keys.items():
        data = members.get(key.extension)
        document = members.get(key.json_extension) if key.json_extension else None
        if key.extension == KEY:
            found[name] = memoryview(own_key.encode(errors="surrogateescape"))
        elif data is not None:
            found[name] = data
        elif document is not None:
            where = f"{path}: sample {own_key!r}"
            found[name] = value_within(document, key, fields[name], name, where)
        else:
            extension = key.json_extension or key.extension
            raise missing_member(path, own_key, members, extension, name)
    return found


def _seek(
    file: StorageFile,
    shard: Shard,
    index: ShardIndex,
    numbers: NDArray[np.int64],
    needed: frozenset[str],
) -> Iterator[TarSample]:
    """Find the samples where the index says they are, and check that they are there."""
    if len(index) != shard.num_samples:
        raise _disagree(shard, f"{len(index)} samples in its .idx", f"{shard.num_samples}")
    chosen = [
        sorted(
            (at, extension)
            for extension, at in index.members[number].items()
            if extension in needed
        )
        for number in numbers.tolist()
    ]
    # From each member's header to its end.
    extents = [(at[0] - BLOCK, at[0] + at[1]) for members in chosen for at, _ in members]
    window = Window(file, merge_extents(np.array(extents or [(0, 0)], np.int64)))
    for number, members in zip(numbers.tolist(), chosen, strict=True):
        found: dict[str, memoryview | None] = dict.fromkeys(index.members[number])
        for (offset, num_bytes), extension in members:
            if offset < BLOCK or offset + num_bytes > file.size:
                raise _disagree(shard, f"{file.size} bytes", f"a member up to {offset + num_bytes}")
            view = window.view(offset - BLOCK, BLOCK + num_bytes)
            held = read_number(bytes(view[124:136]))
            if num_bytes < OCTAL_LIMIT and held != num_bytes:
                raise _disagree(shard, f"no member of {num_bytes} bytes at {offset}", "one")
            found[extension] = view[BLOCK:]
        yield number, index.keys[number], found


def _disagree(shard: Shard, found: str, expected: str) -> SourceError:
    return SourceError(
        f"{shard.path}: found {found}, expected {expected} by the index; the shard was changed or "
        f"is damaged: remove {index_path(shard.path)} and index.json beside it, or write them "
        "again with `tonari pack`"
    )
