"""Rows that the disk damaged: read from the source again, and written where they lie."""

from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray

from dataio.base.errors import CorruptRowError
from dataio.rows.fields import Field
from dataio.rows.rows import Rows
from dataio.source.base import Source
from dataio.store.cache import Cache


def repair_rows(
    cache: Cache, slots: NDArray[np.int64], *, source: Source, fields: Mapping[str, Field]
) -> None:
    """Read rows from the source again and write them where they lie.

    Raises:
        CorruptRowError: If the source has no such sample, or other bytes of it than the manifest's
            checksum says.
    """
    ids, first = np.unique(cache.entries.sample_id[slots], return_index=True)
    slots, done = slots[first], 0
    for row in np.flatnonzero((ids < 0) | (ids >= source.num_samples))[:1].tolist():
        raise CorruptRowError(
            f"{cache.directory}: row {slots[row]} is said to be sample {ids[row]}, "
            f"expected one of the {source.num_samples} of {source.name}: whose rows "
            "lie where is no longer known; run `tonari cache verify`, which finds them again"
        )
    for rows in source.read(ids, fields):
        part = slots[done : done + len(rows)]
        done += len(rows)
        _check(cache, part, rows, source=source)
        cache.rewrite_rows(part, rows)


def _check(cache: Cache, slots: NDArray[np.int64], rows: Rows, *, source: Source) -> None:
    expected = cache.entries.checksum[slots]
    for row in np.flatnonzero(rows.checksum != expected)[:1].tolist():
        raise CorruptRowError(
            f"{cache.directory}: row {slots[row]} (sample {rows.sample_id[row]}) is "
            f"damaged; {source.name} now has checksum {rows.checksum[row]:#018x} for it, "
            f"the manifest says {expected[row]:#018x}; the source was changed or is damaged "
            f"too: restore it, or remove {cache.directory} to stage it again"
        )
