"""Open a dataset the way a loader was told to: its own, and those that it evaluates on."""

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import cast

from dataio.rows.fields import Field
from dataio.source import ArrayFiles, Shards, Source, Storage, TransformedSource, open_source
from dataio.source.counts import own_directory
from dataio.source.pipeline import Pipeline, is_pipeline
from dataio.source.torch_dataset import MapDataset
from dataio.source.transformed import StageTransform
from dataio.source.wrapping import Arrays, check_openable, names_shards, wrapped
from dataio.world import World

Openable = (
    str
    | os.PathLike[str]
    | Sequence[str | os.PathLike[str]]
    | Arrays
    | Shards
    | ArrayFiles
    | Pipeline
    | MapDataset
    | Source
)
"""What a loader opens: shards by their names, array files, a pipeline of webdataset, arrays by
their names, a map-style dataset of torch or Hugging Face, or a finished source."""


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
        if isinstance(source, ArrayFiles):
            return source.open(self.world)
        check_openable(source)
        if names_shards(source) or is_pipeline(source):
            source = Shards(cast("str", source))
        if not isinstance(source, Shards):
            return wrapped(source)
        keeps = os.access(self.root, os.W_OK | os.X_OK)
        return open_source(
            source.names,
            world=self.world,
            # One for each source: it counts what is read of it.
            storage=Storage(source.throttle, retry=source.retry, hashes=source.hashes),
            index_cache=own_directory(self.root) if keeps else None,
            version=source.version,
            grows=source.grows,
            sequences=source.sequences,
        )
