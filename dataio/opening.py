"""Open a dataset the way a loader was told to: its own, and those that it evaluates on."""

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from dataio.rows.fields import Field
from dataio.source import Retry, Source, Storage, Throttle, TransformedSource, open_source
from dataio.source.counts import own_directory
from dataio.source.transformed import StageTransform
from dataio.world import World


@dataclass(frozen=True)
class Opener:
    """Opens sources of samples with the same fields.

    Attributes:
        root: Of the caches: indexes are kept there, where that can be written.
        throttle: Limits reads from the source.
        retry: How long a request may last, and be repeated.
        fields: What to keep of a sample.
        stage_transform: Changes samples once, as they are staged; None: nothing does.
        world: All ranks.
    """

    root: Path
    throttle: Throttle | None
    retry: Retry | None
    fields: Mapping[str, Field]
    stage_transform: StageTransform | None
    world: World

    def open(
        self, source: str | os.PathLike[str] | Sequence[str | os.PathLike[str]] | Source
    ) -> tuple[Source, Mapping[str, Field]]:
        """Open a source, and tell in which fields its rows are stored. Collective."""
        if isinstance(source, (str, os.PathLike, Sequence)):
            keeps = os.access(self.root, os.W_OK | os.X_OK)
            source = open_source(
                source,
                world=self.world,
                # One for each source: it counts what is read of it.
                storage=Storage(self.throttle, retry=self.retry),
                index_cache=own_directory(self.root) if keeps else None,
            )
        if self.stage_transform is None:
            return source, self.fields
        transformed = TransformedSource(source, self.fields, self.stage_transform, world=self.world)
        return transformed, transformed.fields
