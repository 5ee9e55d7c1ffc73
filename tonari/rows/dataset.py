"""The dataset of a run: opened, and samples found in it by number, key or shard."""

import os
from collections.abc import Callable, Iterable, Sequence

import numpy as np
from numpy.typing import NDArray

from dataio import DataioError, Source, open_source
from dataio.rowlog.attempts import Setup
from dataio.source.base import ShardedSource
from dataio.source.names import find_name, find_named

Given = Source | Callable[[], Source] | str | Sequence[str] | None
"""A dataset, or what opens it; None: by the name that the log has."""


def open_dataset(run: str, setup: Setup, given: Given) -> Source:
    """Open what a run trained on.

    Raises:
        ValueError: If it is not at hand, or not the one that was trained on.
        DataioError: If it cannot be read.
    """
    if given is None:
        found = _open_by_name(run, setup)
    elif isinstance(given, str | Sequence):
        found = open_source(given)
    else:
        found = given() if callable(given) else given
    same = found.fingerprint == setup.fingerprint
    if setup.made_as in ("Growing", "TransformedSource"):
        same = found.num_samples >= setup.num_samples
    if not same:
        raise ValueError(
            f"{run}: was trained on {setup.source} with {setup.num_samples} samples and "
            f"the fingerprint {setup.fingerprint}, found {found.name} with "
            f"{found.num_samples} and {found.fingerprint}; give the dataset as it was trained "
            "on"
        )
    return found


def check_ids(run: str, sample_id: Iterable[int], num_samples: int) -> NDArray[np.int64]:
    """Sort sample ids: int64[n], distinct.

    Raises:
        ValueError: If one is not of the dataset.
    """
    ids = np.unique(np.array([*sample_id], np.int64))
    if len(ids) and (ids[0] < 0 or ids[-1] >= num_samples):
        wrong = ids[0] if ids[0] < 0 else ids[-1]
        raise ValueError(
            f"{run}: found sample_id {wrong}, expected one in [0, {num_samples}), as the "
            "run's dataset has it; give such a one"
        )
    return ids


def find_key(run: str, source: Source, key: str) -> int:
    """Find the sample of a key, whose keys are all read.

    Raises:
        ValueError: If none has it, or several.
    """
    field = find_name(source)
    if field is None:
        raise ValueError(f"{run}: {source.name} has no keys, found {key!r}; give a sample_id")
    found, several = find_named(source, field, {key})
    if key in several:
        one, other = several[key]
        raise ValueError(
            f"{run}: the key {key!r} is that of the samples {one} and {other}, expected "
            "one; give a sample_id"
        )
    if key not in found:
        raise ValueError(
            f"{run}: the key {key!r} is of no sample of {source.name}, expected one as "
            "the dataset has it; correct it, or give a sample_id"
        )
    return found[key]


def find_shard(run: str, source: Source, shard: str) -> NDArray[np.int64]:
    """Find the samples of a shard, by its path or its file's name: int64[n].

    Raises:
        ValueError: If there is none.
    """
    shards = source.shards if isinstance(source, ShardedSource) else ()
    for one in shards:
        if one.path == shard or (shard and os.path.basename(one.path) == shard):  # noqa: PTH119
            return np.arange(one.first, one.first + one.num_samples)
    if not shards:
        raise ValueError(
            f"{run}: found no shard {shard!r}, as {source.name} has none, expected "
            "a dataset of shards; give a sample_id, or a key"
        )
    raise ValueError(
        f"{run}: found no shard {shard!r} in {source.name}, expected one of its "
        f"{len(shards)}, such as {shards[0].path!r}; give its path, or its file's name"
    )


def _open_by_name(run: str, setup: Setup) -> Source:
    why = f"a {setup.made_as}"
    if setup.made_as in ("", "ImageFolderSource"):
        try:
            return open_source(setup.source)
        except DataioError as error:
            why = str(error)
    raise ValueError(
        f"{run}: was trained on {setup.source}, which cannot be opened by its name "
        f"({why}); give the dataset as source"
    )
