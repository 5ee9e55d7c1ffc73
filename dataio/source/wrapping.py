"""What people hold that is no shard, as a source: arrays by their names, map-style datasets."""

import os
from collections.abc import Mapping
from typing import cast

import numpy as np
from numpy.typing import NDArray

from dataio.source.base import Source
from dataio.source.formats.arrays import NumpySource
from dataio.source.wrap.torch_dataset import DatasetSource, MapDataset

Arrays = Mapping[str, NDArray[np.generic] | str | os.PathLike[str]]
"""Arrays of one row a sample, or paths of such ``.npy`` files, by the keys of fields."""


def check_openable(source: object) -> None:
    """Refuse what only looks like a dataset.

    Raises:
        TypeError: If it is a mapping of anything but arrays, a list of names and other things, or
            bytes.
    """
    kinds = (np.ndarray, str, os.PathLike)
    if isinstance(source, Mapping):
        other = next((key for key, value in source.items() if not isinstance(value, kinds)), None)
        if other is not None:
            raise TypeError(
                f"source: found a mapping of {', '.join(map(str, source))}, of which {other!r} "
                f"is a {type(source[other]).__name__}, expected arrays of NumPy or paths of .npy; "
                "give one of a dataset's splits, or convert each with np.asarray"
            )
    elif isinstance(source, (bytes, bytearray, memoryview)):
        raise TypeError(
            "source: found bytes, expected the names of shards; decode them: os.fsdecode(...)"
        )
    elif names_shards(source) and isinstance(source, (list, tuple)):
        wrong = [name for name in source if not isinstance(name, (str, os.PathLike))]
        if wrong:
            raise TypeError(
                f"source: found a list of names and of {wrong[0]!r:.100}, expected names of "
                "shards alone; give these, or only samples"
            )


def names_shards(source: object) -> bool:
    """Whether it is a name, or a list that holds any, or is empty."""
    each = source if isinstance(source, (list, tuple)) else [source]
    return any(isinstance(name, (str, os.PathLike)) for name in each) or not each


def wrapped(source: object) -> Source:
    """Make a source of arrays or of a dataset; a finished one is returned as it is."""
    if hasattr(source, "made_as"):
        return cast("Source", source)
    if isinstance(source, Mapping):
        return NumpySource(source)
    return DatasetSource(cast("MapDataset", source))
