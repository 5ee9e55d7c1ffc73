"""Open a dataset the way a loader was told to: its own, and those that it evaluates on."""

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import cast

import numpy as np
from numpy.typing import NDArray

from dataio.rows.fields import Field
from dataio.source import (
    DatasetSource,
    NumpySource,
    Shards,
    Source,
    Storage,
    TransformedSource,
    open_source,
)
from dataio.source.counts import own_directory
from dataio.source.pipeline import Pipeline, is_pipeline
from dataio.source.torch_dataset import MapDataset
from dataio.source.transformed import StageTransform
from dataio.world import World

Arrays = Mapping[str, NDArray[np.generic] | str | os.PathLike[str]]
"""Arrays of one row a sample, or paths of such ``.npy`` files, by the keys of fields."""

Openable = (
    str
    | os.PathLike[str]
    | Sequence[str | os.PathLike[str]]
    | Arrays
    | Shards
    | Pipeline
    | MapDataset
    | Source
)
"""What a loader opens: shards by their names, a pipeline of webdataset, arrays by their names, a
map-style dataset of torch or Hugging Face, or a finished source."""


@dataclass(frozen=True)
class Opener:
    """Opens sources of samples with the same fields.

    Attributes:
        root: Of the caches: indexes are kept there, where that can be written.
        fields: What to keep of a sample.
        transform: Changes samples once, as they are staged; None: nothing does.
        world: All ranks.
    """

    root: Path
    fields: Mapping[str, Field]
    transform: StageTransform | None
    world: World

    def open(self, source: Openable) -> tuple[Source, Mapping[str, Field]]:
        """Open a source, and find the fields in which its rows are stored. Collective."""
        opened = self._open(source)
        if self.transform is None:
            return opened, self.fields
        transformed = TransformedSource(opened, self.fields, self.transform, world=self.world)
        return transformed, transformed.fields

    def _open(self, source: Openable) -> Source:
        check_openable(source)
        if _names_shards(source) or is_pipeline(source):
            source = Shards(cast("str", source))
        if not isinstance(source, Shards):
            return _wrapped(source)
        keeps = os.access(self.root, os.W_OK | os.X_OK)
        return open_source(
            source.names,
            world=self.world,
            # One for each source: it counts what is read of it.
            storage=Storage(source.throttle, retry=source.retry),
            index_cache=own_directory(self.root) if keeps else None,
            version=source.version,
        )


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
                f"Loader: source is a mapping of {', '.join(map(str, source))}, of which {other!r} "
                f"is a {type(source[other]).__name__}, expected arrays of NumPy or paths of .npy; "
                "give one of a dataset's splits, or convert each with np.asarray"
            )
    elif isinstance(source, (bytes, bytearray, memoryview)):
        raise TypeError(
            "Loader: source is bytes, expected the names of shards; decode them: os.fsdecode(...)"
        )
    elif _names_shards(source) and isinstance(source, (list, tuple)):
        wrong = [name for name in source if not isinstance(name, (str, os.PathLike))]
        if wrong:
            raise TypeError(
                f"Loader: source is a list of names and of {wrong[0]!r:.100}, expected names of "
                "shards alone; give these, or only samples"
            )


def _names_shards(source: object) -> bool:
    """Whether it is a name, or a list that holds any, or is empty."""
    each = source if isinstance(source, (list, tuple)) else [source]
    return any(isinstance(name, (str, os.PathLike)) for name in each) or not each


def _wrapped(source: object) -> Source:
    """Make a source of arrays or of a dataset; a finished one is returned as it is."""
    if hasattr(source, "made_as"):
        return cast("Source", source)
    if isinstance(source, Mapping):
        return NumpySource(source)
    return DatasetSource(cast("MapDataset", source))
