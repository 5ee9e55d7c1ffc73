"""What a source calls its samples, and the fields of theirs that many datasets have."""

from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from dataio.base.errors import FieldError
from dataio.rows.fields import Field, Text
from dataio.rows.rows import Rows, row_offsets
from dataio.source.base import Source

NAME_KEYS = ("__key__", "key", "path")
"""Under which one of these names may stand; the first that is there is taken."""

IMAGE_KEYS = ("jpg", "jpeg", "png", "webp", "image", "img")
LABEL_KEYS = ("cls", "label")

BLOCK = 1 << 16

Values = NDArray[np.generic]
"""Numbers, or objects: bytes or str, one a sample."""


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


def read_field(source: Source, sample_ids: NDArray[np.int64], field: Field) -> Values:
    """Read one field of some samples.

    Args:
        source: Where they are.
        sample_ids: int64[n], distinct, in any order.
        field: Int, Float, Text or a compressed Image.

    Returns:
        [n]: In the order of ``sample_ids``: numbers, or objects: str of Text, else bytes.

    Raises:
        DataioError: As `Source.read`.
    """
    order = np.argsort(sample_ids, kind="stable")
    blocks = list(read_blocks(source, sample_ids[order], field))
    if not blocks:
        return np.empty(0, object)
    values = np.concatenate(blocks)
    result = np.empty_like(values)
    result[order] = values
    return result


def read_blocks(source: Source, sample_ids: NDArray[np.int64], field: Field) -> Iterator[Values]:
    """Read one field of some samples block by block; as `read_field`, of sorted ids."""
    for rows in source.read(sample_ids, {"value": field}):
        yield _values(rows, field)


def _values(rows: Rows, field: Field) -> Values:
    if rows.schema.fixed:
        return np.ascontiguousarray(rows.fixed[0]).view(rows.schema.fixed[0].dtype).reshape(-1)
    bounds = row_offsets(rows.lengths[:, 0]).tolist()
    values = np.empty(len(rows), object)
    for row, (start, stop) in enumerate(pairwise(bounds)):
        data = rows.variable[0][start:stop].tobytes()
        values[row] = data.decode() if isinstance(field, Text) else data
    return values


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
