"""Open a dataset with the arguments of a loader: its own, and those that it evaluates on."""

import json
import os
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import cast

import numpy as np

from dataio.rows.fields import Array, Field
from dataio.source import (
    Anemoi,
    ArrayFiles,
    Shards,
    Source,
    Storage,
    TransformedSource,
    open_source,
)
from dataio.source.classes import Classes, class_names, with_classes
from dataio.source.counts import own_directory
from dataio.source.formats.grids.source import ArrayFilesSource
from dataio.source.open import Arrays, check_openable, names_shards, wrapped
from dataio.source.wrap.torch_dataset import MapDataset
from dataio.source.wrap.transformed import StageTransform
from dataio.source.wrap.webdataset import WebDatasetPipeline, is_pipeline
from dataio.world import World
from dataio.world.agree import agree

Openable = (
    str
    | os.PathLike[str]
    | Sequence[str | os.PathLike[str]]
    | Arrays
    | Shards
    | ArrayFiles
    | Anemoi
    | WebDatasetPipeline
    | MapDataset
    | Source
)
"""What a loader opens: shards by their names, array files, a dataset of anemoi, a pipeline of
webdataset, arrays by their names, a map-style dataset of torch or Hugging Face, or a finished
source."""


@dataclass(frozen=True)
class Opener:
    """Opens sources of samples with the same fields.

    Attributes:
        root: Of the caches: indexes are kept there, where that can be written.
        fields: What to keep of a sample.
        transform: Changes samples once, as they are staged; None: nothing does.
        world: All ranks.
        tile: Which tile of the fields that are cut is this rank's; None: none is cut.
    """

    root: Path
    fields: Mapping[str, Field]
    transform: StageTransform | None
    world: World
    tile: int | None = None

    def open(
        self,
        source: Openable,
        *,
        trained: Mapping[str, list[str]] | None = None,
        classes: Classes = "same",
        may_lack: Collection[str] = (),
    ) -> tuple[Source, Mapping[str, Field]]:
        """Open a source, and find the fields in which its rows are stored. Collective.

        Args:
            source: The source.
            trained: Of one that is evaluated: see `with_classes`.
            classes: See `with_classes`.
            may_lack: See `Storage`.
        """
        opened = self._open(source, may_lack)
        if trained:
            opened = self._with_classes(opened, trained, classes)
        if self.tile is not None:
            return opened, _with_tile(self.fields, self.tile, opened)
        if self.transform is None:
            return opened, self.fields
        transformed = TransformedSource(opened, self.fields, self.transform, world=self.world)
        return transformed, transformed.fields

    def class_names(self, source: Source) -> dict[str, list[str]]:
        """Find the names of classes, by field, that a source has. Collective: one rank looks."""

        def find() -> bytes:
            if self.world.rank:
                return b""
            found = {name: class_names(source, field.key) for name, field in self.fields.items()}
            return json.dumps(found).encode()

        found = json.loads(agree(self.world, find, doing="find the names of the classes")[0])
        return {name: names for name, names in found.items() if names is not None}

    def _with_classes(
        self, source: Source, trained: Mapping[str, list[str]], classes: Classes
    ) -> Source:
        return with_classes(source, self.class_names(source), trained=trained, classes=classes)

    def _open(self, source: Openable, may_lack: Collection[str]) -> Source:
        if isinstance(source, ArrayFiles | Anemoi):
            return source.open(self.world)
        check_openable(source)
        if not isinstance(source, Mapping) and (names_shards(source) or is_pipeline(source)):
            source = Shards(cast("str", source))
        if not isinstance(source, Shards):
            return wrapped(source)
        keeps = os.access(self.root, os.W_OK | os.X_OK)
        return open_source(
            source.names,
            world=self.world,
            # One for each source: it counts what is read of it.
            storage=Storage(
                source.throttle, retry=source.retry, hashes=source.hashes, may_lack=may_lack
            ),
            index_cache=own_directory(self.root) if keeps else None,
            version=source.version,
            grows=source.grows,
            sequences=source.sequences,
            joined=source.joined,
        )


def _with_tile(fields: Mapping[str, Field], tile: int, source: Source) -> dict[str, Field]:
    """Say of each field that is cut along which positions, and which of its tiles is kept.

    Raises:
        FieldError: If the source is array files, and a sample of theirs is not as declared.
        ValueError: If an axis has a name that the source does not know.
    """
    placed = dict(fields)
    for name, field in fields.items():
        if not isinstance(field, Array) or field.tiles is None:
            continue
        tiles = replace(field.tiles, index=tile)
        if isinstance(source, ArrayFilesSource):
            # Its shape is checked where it is asked for, before anything is read
            source.read(np.empty(0, np.int64), {name: replace(field, tiles=None)})
            tiles = tiles.named(source.sample_dims(field.key), f"field {name!r}")
        placed[name] = replace(field, tiles=tiles)
    return placed
