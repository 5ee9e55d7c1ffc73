"""Rows from tar shards by WebDataset's conventions."""

from collections.abc import Iterator, Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from dataio.base.errors import SourceError
from dataio.rows.fields import Field, Raw
from dataio.rows.rows import Rows
from dataio.source.base import SampleCounts, SeekPoint, Shard, ShardFormat
from dataio.source.formats.seek_points import cut_at_seek_points, point_behind
from dataio.source.formats.tar.counting import count_samples, misplaced_point
from dataio.source.formats.tar.headers import BLOCK, END_BYTES
from dataio.source.formats.tar.index import counts_by_index, index_path, listed_counts
from dataio.source.formats.tar.keys import (
    MemberKey,
    extensions_of,
    member_keys,
    missing_member,
    value_within,
)
from dataio.source.formats.tar.samples import Samples, Wanted, walk_samples
from dataio.source.row_block import RowBlock
from dataio.source.storage.compressed import DecompressedFile
from dataio.source.storage.files import Storage, StorageFile
from dataio.source.storage.window import File, FileWindow

KEY = "__key__"
HEAD_BYTES = 4 * BLOCK
"""A header with one of pax before it."""


class TarFormat(ShardFormat):
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

    def count(self, storage: Storage, path: str) -> SampleCounts:
        """Count by the index of a shard, if it fits; else by all headers."""
        is_indexed = not (self._joined or self.gzipped)
        found = counts_by_index(storage, path) if is_indexed else None
        if found is None:
            with storage.open(path) as file:
                found = count_samples(self._inside(file), joined=self._joined)
        # Nobody can seek in a compressed shard.
        return SampleCounts(found.counts) if self.gzipped else found

    def read(
        self,
        storage: Storage,
        shard: Shard,
        numbers: NDArray[np.int64],
        fields: Mapping[str, Field],
    ) -> Iterator[Rows]:
        """Read samples by the headers of their shard, from the seek points before them."""
        keys = member_keys(fields, shard.path)
        with storage.open(shard.path) as opened:
            file, block = self._inside(opened), RowBlock(fields, storage.buffers)
            for start, run in cut_at_seek_points(numbers, shard.seek_points):
                walk = _walk(file, shard, start, run, extensions_of(keys), joined=self._joined)
                for samples, chosen in walk:
                    _add(block, samples, shard, chosen, keys, fields)
                    if block.full:
                        yield block.take()
            if len(block):
                yield block.take()

    def check_ended(self, storage: Storage, path: str) -> None:
        """Refuse a shard without its end-of-archive: its writer may be about to go on.

        Raises:
            SourceError: If the shard does not end in zeros.
        """
        if self.gzipped:
            return
        with storage.open(path) as file:
            tail = file.read_at(max(file.size - END_BYTES, 0), END_BYTES)
        if len(tail) < END_BYTES or any(tail):
            raise SourceError(
                f"{path}: has no end-of-archive, expected {END_BYTES} bytes of zeros at its end; "
                "close the tar file, and rename it into place when it is whole"
            )

    def _inside(self, file: StorageFile) -> File:
        return DecompressedFile(file, "gzip") if self.gzipped else file


def _walk(
    file: File,
    shard: Shard,
    start: SeekPoint,
    numbers: NDArray[np.int64],
    extensions: frozenset[str],
    *,
    joined: bool,
) -> Iterator[tuple[Samples, NDArray[np.int64]]]:
    """Find samples from a seek point on, the wanted ones among them; and see that all are there."""
    wanted, stop = Wanted(numbers, extensions, file.size // shard.num_samples), start[0]
    # Little is read behind the point that follows: the header there shows that a sample begins.
    behind = point_behind(shard.seek_points, int(numbers[-1]))
    end = file.size if behind is None else behind + HEAD_BYTES
    window = FileWindow(file, np.array([[start[1], end]]))
    for samples in walk_samples(window, wanted, start=start, joined=joined):
        stop = samples.stop
        if wrong := misplaced_point(samples, shard.seek_points):
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
