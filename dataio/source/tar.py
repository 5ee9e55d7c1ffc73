"""Rows from tar shards by WebDataset's conventions."""

from collections.abc import Iterator, Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from dataio.errors import FieldError, SourceError
from dataio.fields import Field
from dataio.rows import Rows
from dataio.source.base import Shard
from dataio.source.files import Storage, StorageFile
from dataio.source.row_block import RowBlock
from dataio.source.tar_headers import BLOCK, read_number, walk_members
from dataio.source.tar_index import (
    ShardIndex,
    count_samples,
    duplicate_member,
    index_path,
    listed_counts,
    read_index,
)
from dataio.source.window import READ_BYTES, Window, merge_extents, skip_piece_bytes

KEY = "__key__"
OCTAL_LIMIT = 8 << 30
"""Sizes from here on are not in the header's octal digits."""

Sample = tuple[int, str, dict[str, memoryview | None]]
"""Number in the shard, key, and for each extension the bytes; None where not asked for."""


class TarFormat:
    """Tar shards: a sample is the members in a row that share their name up to the first dot."""

    def known_counts(self, storage: Storage, paths: Sequence[str]) -> list[int] | None:
        return listed_counts(storage, paths)

    def count(self, storage: Storage, path: str) -> int:
        return count_samples(storage, path)

    def read(
        self,
        storage: Storage,
        shard: Shard,
        numbers: NDArray[np.int64],
        fields: Mapping[str, Field],
    ) -> Iterator[Rows]:
        """Read samples: a whole shard by its headers alone, a part by its index if it has one."""
        block = RowBlock(fields)
        extensions = {name: field.key.lower() for name, field in fields.items()}
        needed = frozenset(extensions.values())
        index = read_index(storage, shard.path) if len(numbers) < shard.num_samples else None
        with storage.open(shard.path) as file:
            if index is None:
                samples = _walk(file, shard, numbers, needed)
            else:
                samples = _seek(file, shard, index, numbers, needed)
            for number, key, members in samples:
                where = f"{shard.path}: sample {key!r}"
                members[KEY] = memoryview(key.encode(errors="surrogateescape"))
                block.add(shard.first + number, _fields(members, extensions, where), where)
                if block.full:
                    yield block.take()
        if len(block):
            yield block.take()


def _fields(
    members: Mapping[str, memoryview | None], extensions: Mapping[str, str], where: str
) -> dict[str, memoryview]:
    """Find each field's bytes by its name."""
    found = {}
    for name, extension in extensions.items():
        data = members.get(extension)
        if data is None:
            held = ", ".join(sorted(set(members) - {KEY})) or "nothing"
            raise FieldError(
                f"{where} holds {held}, expected {extension!r} for field {name!r}; every sample "
                f"needs every field: name a member that it has, or repair the shard"
            )
        found[name] = data
    return found


def _walk(
    file: StorageFile, shard: Shard, numbers: NDArray[np.int64], needed: frozenset[str]
) -> Iterator[Sample]:
    """Find the samples header by header, from the beginning of the shard."""
    window = Window(file)
    pending = iter(numbers.tolist())
    wanted: int | None = next(pending)
    last, mean_bytes = int(numbers[-1]), file.size // shard.num_samples
    window.piece_bytes = skip_piece_bytes(mean_bytes) if wanted else _ahead(last + 1, mean_bytes)
    number, key = -1, ""
    members: dict[str, memoryview | None] = {}
    for member in walk_members(window):
        if number < 0 or member.key != key:
            if number == wanted:
                yield number, key, members
                wanted = next(pending, None)
                if wanted is None and number + 1 < shard.num_samples:
                    return
            number, key, members = number + 1, member.key, {}
            if number == wanted:
                window.piece_bytes = _ahead(last - number + 1, mean_bytes)
        if member.extension in members:
            raise duplicate_member(shard.path, key, member.extension)
        members[member.extension] = None
        if number != wanted:
            window.piece_bytes = skip_piece_bytes(member.num_bytes)
        elif member.extension in needed:
            members[member.extension] = window.view(member.offset, member.num_bytes)
    if number + 1 != shard.num_samples:
        raise _disagree(shard, f"{number + 1} samples", f"{shard.num_samples}")
    yield number, key, members


def _ahead(num_samples: int, mean_bytes: int) -> int:
    """Choose how much to read at once: not far beyond the last sample, the rest is another.s."""
    return min(max(num_samples * mean_bytes, 64 << 10), READ_BYTES)


def _seek(
    file: StorageFile,
    shard: Shard,
    index: ShardIndex,
    numbers: NDArray[np.int64],
    needed: frozenset[str],
) -> Iterator[Sample]:
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
