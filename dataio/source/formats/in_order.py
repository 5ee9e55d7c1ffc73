"""Formats whose samples lie one behind the other, without an index.

A shard is counted once, marked on the way, and read from the mark before.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from dataio.rows.fields import Field, Raw
from dataio.rows.rows import Rows
from dataio.source.base import Contents, Mark, Shard
from dataio.source.formats.records import disagree, sample_rows
from dataio.source.formats.tar.marks import MARK_BYTES, MARKS, MOST_MARK_BYTES, cut_at_marks
from dataio.source.storage.compressed import decompressed
from dataio.source.storage.files import Storage
from dataio.source.storage.window import File


class Walk(Protocol):
    """Walks samples in [the mark's byte, stop), which hold every byte between.

    Yields each one's own mark, and its bytes; these may be left out unless ``reads_all``.
    """

    def __call__(
        self, file: File, start: Mark, stop: int, *, reads_all: bool
    ) -> Iterator[tuple[Mark, memoryview]]: ...


Parse = Callable[[Mark, memoryview], Sequence[Raw]]
"""Takes values from a sample, by its mark and its bytes."""


@dataclass(frozen=True)
class MarkedFormat:
    """Samples one behind the other, compressed or not, whatever the file's name says.

    Attributes:
        walk: Finds the samples.
        parser: Makes what takes the values of fields from samples of the file of a path.
        is_plain: Whether a shard that begins so is not compressed, whatever else it looks like.
    """

    walk: Walk
    parser: Callable[[str, Mapping[str, Field]], Parse]
    is_plain: Callable[[bytes], bool] = lambda begin: False

    def known_counts(self, storage: Storage, paths: Sequence[str]) -> None:
        return None

    def survey(self, storage: Storage, path: str) -> Contents:
        """Count the samples up to the last byte of the shard, and mark some of them.

        Raises:
            SourceError: If anything in it is no sample.
        """
        with storage.open(path) as opened:
            file = decompressed(opened, is_plain=self.is_plain)
            walk = self.walk(file, (0, 0), file.size, reads_all=False)
            contents = _count_and_mark((mark[1] for mark, _ in walk), opened.size)
        # What a compressed shard holds cannot be read from a mark on.
        return Contents(contents.counts) if file.in_order else contents

    def read(
        self,
        storage: Storage,
        shard: Shard,
        numbers: NDArray[np.int64],
        fields: Mapping[str, Field],
    ) -> Iterator[Rows]:
        """Read samples of a shard, from the mark before each run of them."""
        with storage.open(shard.path) as opened:
            file = decompressed(opened, is_plain=self.is_plain)
            parse = self.parser(shard.path, fields)
            samples = (
                (mark[0], parse(mark, data)) for mark, data in self._find(file, shard, numbers)
            )
            yield from sample_rows(samples, shard, fields, storage)

    def _find(
        self, file: File, shard: Shard, numbers: NDArray[np.int64]
    ) -> Iterator[tuple[Mark, memoryview]]:
        """Find samples, int64[n], sorted, n >= 1: each one's own mark, and its bytes."""
        for start, run in cut_at_marks(numbers, shard.marks):
            # Nothing is read behind the first mark that follows the run.
            behind = int(np.searchsorted(shard.marks[:, 0], run[-1], side="right"))
            stop = int(shard.marks[behind, 1]) if behind < len(shard.marks) else file.size
            wanted = iter(run.tolist())
            number = next(wanted)
            for mark, data in self.walk(file, start, stop, reads_all=True):
                if mark[0] < number:
                    continue
                yield mark, data
                number = next(wanted, -1)
                if number < 0:
                    break
            else:
                raise disagree(shard, f"no sample {number}")


def _count_and_mark(begins: Iterable[int], num_bytes: int) -> Contents:
    """Count samples by the first byte of each, and mark some 256 of them."""
    spacing = max(MARK_BYTES, min(num_bytes // MARKS, MOST_MARK_BYTES))
    marks: list[Mark] = []
    due, num_samples = spacing, 0
    for begin in begins:
        if begin >= due:
            marks.append((num_samples, begin))
            due = begin + spacing
        num_samples += 1
    return Contents([num_samples], np.array(marks, np.int64).reshape(-1, 2))
