"""What a source calls its samples, and the fields of theirs that many datasets have."""

from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from dataio.base.errors import FieldError
from dataio.rows.fields import Field, Text
from dataio.rows.rows import row_offsets
from dataio.source.base import Source

NAME_KEYS = ("__key__", "key", "path")
"""Under which one of these names may stand; the first that is there is taken."""

IMAGE_KEYS = ("jpg", "jpeg", "png", "webp", "image", "img")
LABEL_KEYS = ("cls", "label")

BLOCK = 1 << 16


def fields_there(
    source: Source,
    keys: Sequence[str],
    kinds: Sequence[Callable[[str], Field]],
    name: str = "field",
) -> Iterator[Field]:
    """Find which of some keys a source's samples have, each as the first kind that it can be.

    Args:
        source: Its first sample is read.
        keys: To look for.
        kinds: Of fields, such as `Image`.
        name: Of the field, for the message.

    Raises:
        FieldError: At the end, if there is none of them: what the first was refused with.
    """
    refusals: list[FieldError] = []
    for key in keys:
        for make in kinds:
            try:
                # Which fields samples have stands in the samples alone
                list(source.read(np.zeros(1, np.int64), {name: make(key)}))
            except FieldError as error:
                refusals.append(error)
            else:
                yield make(key)
                break
    if len(refusals) == len(keys) * len(kinds):
        raise refusals[0]


def find_name(source: Source) -> Field | None:
    """Find the field of the samples' names; None where they have none."""
    try:
        return next(fields_there(source, NAME_KEYS, (Text,)))
    except FieldError:
        return None


def read_names(source: Source, field: Field, sample_ids: NDArray[np.int64]) -> Iterator[str]:
    """Read the names of samples, int64[n], sorted and distinct, in that order.

    Raises:
        DataioError: As `Source.read`.
    """
    for rows in source.read(sample_ids, {"name": field}):
        data = rows.variable[0]
        for start, stop in pairwise(row_offsets(rows.lengths[:, 0]).tolist()):
            yield data[start:stop].tobytes().decode(errors="surrogatepass")


def find_named(
    source: Source, field: Field, names: set[str]
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
