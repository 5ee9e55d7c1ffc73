"""Samples that a format has found -> rows, and what all formats of records refuse alike."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import islice
from typing import NoReturn

import numpy as np

from dataio.base.errors import FieldError, SourceError
from dataio.rows.fields import Field, Raw
from dataio.rows.rows import Rows
from dataio.source.base import Shard
from dataio.source.row_block import RowBlock
from dataio.source.storage.files import Storage

AT_ONCE = 32
"""Samples that are encoded together."""

Sample = tuple[int, Sequence[Raw]]
"""A sample's number in its shard, and its values in the order of the fields."""


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
