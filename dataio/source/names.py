"""What a source calls its samples, where they have names."""

from collections.abc import Iterator
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from dataio.base.errors import FieldError
from dataio.rows.fields import Text
from dataio.rows.rows import row_offsets
from dataio.source.base import Source

NAME_KEYS = ("__key__", "key", "path")
"""Under which one of these names may stand; the first that is there is taken."""

BLOCK = 1 << 16


def find_name(source: Source) -> Text | None:
    """Find the field of the samples' names; None where they have none."""
    for key in NAME_KEYS:
        field = Text(key)
        try:
            # Which fields samples have stands in the samples alone
            list(source.read(np.zeros(1, np.int64), {"name": field}))
        except FieldError:
            continue
        return field
    return None


def read_names(source: Source, field: Text, sample_ids: NDArray[np.int64]) -> Iterator[str]:
    """Read the names of samples, int64[n], sorted and distinct, in that order.

    Raises:
        DataioError: As `Source.read`.
    """
    for rows in source.read(sample_ids, {"name": field}):
        data = rows.variable[0]
        for start, stop in pairwise(row_offsets(rows.lengths[:, 0]).tolist()):
            yield data[start:stop].tobytes().decode(errors="surrogatepass")


def find_named(
    source: Source, field: Text, names: set[str]
) -> tuple[dict[str, int], dict[str, tuple[int, int]]]:
    """Find the samples of some names; reads the names of all samples.

    Returns:
        The sample of each name that was found; and two samples of each name that several have.
    """
    found: dict[str, int] = {}
    several: dict[str, tuple[int, int]] = {}
    for first in range(0, source.num_samples, BLOCK):
        ids = np.arange(first, min(first + BLOCK, source.num_samples))
        for sample_id, name in zip(ids.tolist(), read_names(source, field, ids), strict=True):
            if name in names and found.setdefault(name, sample_id) != sample_id:
                several.setdefault(name, (found[name], sample_id))
    return found, several
