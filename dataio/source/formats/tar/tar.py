"""Rows from tar shards by WebDataset's conventions."""

from collections.abc import Iterator, Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from dataio.base.errors import SourceError
from dataio.rows.fields import Field, Raw
from dataio.rows.rows import Rows
from dataio.source.base import Contents, Mark, Shard
from dataio.source.formats.tar.headers import BLOCK
from dataio.source.formats.tar.index import index_path, indexed_contents, listed_counts
from dataio.source.formats.tar.keys import (
    MemberKey,
    extensions_of,
    member_keys,
    missing_member,
    value_within,
)
from dataio.source.formats.tar.marks import count_and_mark, cut_at_marks, misplaced_mark
from dataio.source.formats.tar.samples import Samples, Wanted, walk_samples
from dataio.source.row_block import RowBlock
from dataio.source.storage.compressed import DecompressedFile
from dataio.source.storage.files import Storage, StorageFile
from dataio.source.storage.window import File, Window

KEY = "__key__"
HEAD_BYTES = 4 * BLOCK
"""A header with one of pax before it."""


class TarFormat:
    """Tar shards: a sample is the members in a row that share their name up to the first dot.

    Args:
        gzipped: Whether they are compressed: then they can be read from the beginning only, and a
            part of a shard costs all that lies before it.
        joined: See `Shards`.
    """

    def __init__(self, *, gzipped: bool = False, joined: bool = False) -> None:
        self.gzipped = gzipped
        self._joined = joined

    def known_counts(self, storage: Storage, paths: Sequence[str]) -> list[int] | None:
        # The index of a shard says where its samples lie, too.
        hint = self.hint_of(paths[0])
        is_indexed = hint and storage.exists(hint, is_optional=True)
        return None if is_indexed else listed_counts(storage, paths)

    def hint_of(self, path: str) -> str:
        """Name the index of a shard."""
        return "" if self.gzipped else index_path(path)

    def survey(self, storage: Storage, path: str) -> Contents:
        """Count and mark by the index of a shard, if it fits; else by all headers."""
        is_indexed = not (self._joined or self.gzipped)
        contents = indexed_contents(storage, path) if is_indexed else None
        if contents is None:
            with storage.open(path) as file:
                contents = count_and_mark(self._inside(file), joined=self._joined)
        # Nobody can go to a mark of a compressed shard.
        return Contents(contents.counts) if self.gzipped else contents

    def read(
        self,
        storage: Storage,
        shard: Shard,
        numbers: NDArray[np.int64],
        fields: Mapping[str, Field],
    ) -> Iterator[Rows]:
        """Read samples by the headers of their shard, from its beginning or the marks before."""
        keys = member_keys(fields, shard.path)
        with storage.open(shard.path) as opened:
            file, block = self._inside(opened), RowBlock(fields, storage.buffers)
            for start, run in cut_at_marks(numbers, shard.marks):
                walk = _walk(file, shard, start, run, extensions_of(keys), joined=self._joined)
                for samples, chosen in walk:
                    _add(block, samples, shard, chosen, keys, fields)
                    if block.full:
                        yield block.take()
            if len(block):
                yield block.take()

    def _inside(self, file: StorageFile) -> File:
        return DecompressedFile(file, "gzip") if self.gzipped else file


def _walk(
    file: File,
    shard: Shard,
    start: Mark,
    numbers: NDArray[np.int64],
    extensions: frozenset[str],
    *,
    joined: bool,
) -> Iterator[tuple[Samples, NDArray[np.int64]]]:
    """Find samples from a mark on, those that are wanted among them; and see that all are there."""
    wanted, stop = Wanted(numbers, extensions, file.size // shard.num_samples), start[0]
    # Little is read behind the mark that follows: the header there shows that a sample begins.
    behind = int(np.searchsorted(shard.marks[:, 0], numbers[-1], side="right"))
    end = int(shard.marks[behind, 1]) + HEAD_BYTES if behind < len(shard.marks) else file.size
    window = Window(file, np.array([[start[1], end]]))
    for samples in walk_samples(window, wanted, start=start, joined=joined):
        stop = samples.stop
        if wrong := misplaced_mark(samples, shard.marks):
            (number, offset), begin = wrong
            raise _disagree(shard, f"sample {number} at byte {begin}", f"it at {offset}")
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


def _disagree(shard: Shard, found: str, expected: str) -> SourceError:
    return SourceError(
        f"{shard.path}: found {found}, expected {expected} by the index; the shard was changed or "
        f"is damaged: remove {index_path(shard.path)} and index.json beside it, or write them "
        "again with `tonari pack`"
    )
