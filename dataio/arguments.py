"""The arguments of a `Loader`, checked alone: every part of it takes what it needs from here."""

import os
from collections.abc import Mapping
from dataclasses import dataclass, field

import torch

from dataio.base.filesystem import is_named
from dataio.excluding import Exclude
from dataio.opening import Openable
from dataio.options import NodeCache, Reports, Staging, Workers
from dataio.plan.history import ScoreColumn
from dataio.plan.policies import Importance, Local, Shuffle
from dataio.rows.fields import Field
from dataio.rows.samples import BatchTransform, Collate, OnError, Transform
from dataio.source.open import check_openable


@dataclass(frozen=True, kw_only=True)
class Arguments:
    """The arguments of a `Loader`, which says what they mean.

    Raises:
        TypeError: If the source only looks like one.
        ValueError: If one is out of range.
    """

    source: Openable
    batch_size: int
    fields: Mapping[str, Field]
    drop_last: bool = False
    cache: NodeCache = field(default_factory=NodeCache)
    shuffle: Shuffle | None = None
    importance: Importance | None = None
    transform: Transform | None = None
    batch_transform: BatchTransform | None = None
    collate: Collate | None = None
    device: torch.device | str | int | None = None
    seed: int = 0
    on_error: OnError = "raise"
    staging: Staging = field(default_factory=Staging)
    workers: Workers = field(default_factory=Workers)
    reports: Reports = field(default_factory=Reports)
    exclude: Exclude | None = None

    def __post_init__(self) -> None:
        check_openable(self.source)
        find_device(self.device)
        if self.cache.quota is not None and self.staging.when == "overlap":
            raise ValueError(
                'staging: when="overlap" and a quota exclude one another, because what fits is '
                'known only when all is staged; give when="before" or no quota'
            )

    @property
    def shuffle_or_local(self) -> Shuffle:
        """Which node holds which row."""
        return self.shuffle if self.shuffle is not None else Local()

    @property
    def columns(self) -> tuple[ScoreColumn, ...]:
        """What is remembered of a row's reports."""
        return self.importance.columns if self.importance is not None else ()

    @property
    def foreign(self) -> bool:
        """Whether a whole cache of another user may be read."""
        return is_named(os.fspath(self.cache.path))

    @property
    def skips(self) -> bool:
        """Whether a row that is corrupt or does not decode is padding, not an error."""
        return self.on_error == "skip"


def find_device(device: torch.device | str | int | None) -> torch.device | None:
    """Find the device that was named.

    Raises:
        ValueError: If torch knows none of that name.
    """
    try:
        return torch.device(device) if device is not None else None
    except RuntimeError as error:
        raise ValueError(
            f"Loader: device is {device!r}, expected one that torch knows ({error}); give for "
            'example "cuda:0" or "cpu"'
        ) from error
