"""Samples: from the source to a batch. See docs/architecture.md.

Only `Loader` needs torch; it is imported when first asked for, so that tools and tests of the parts
below it start at once.
"""

from typing import TYPE_CHECKING

from dataio.errors import (
    CacheBusyError,
    CacheError,
    CorruptRowError,
    DataioError,
    FieldError,
    OtherDatasetError,
    SharedFilesystemError,
    SourceError,
    StallError,
    StateError,
    WorkerError,
    WorldError,
)
from dataio.fields import Array, Bytes, Field, Float, Image, Int, Text, Tokens
from dataio.source import Source, Throttle, open_source
from dataio.world import World, discover_world

if TYPE_CHECKING:
    from dataio.loader import Loader

__all__ = [
    "Array",
    "Bytes",
    "CacheBusyError",
    "CacheError",
    "CorruptRowError",
    "DataioError",
    "Field",
    "FieldError",
    "Float",
    "Image",
    "Int",
    "Loader",
    "OtherDatasetError",
    "SharedFilesystemError",
    "Source",
    "SourceError",
    "StallError",
    "StateError",
    "Text",
    "Throttle",
    "Tokens",
    "WorkerError",
    "World",
    "WorldError",
    "discover_world",
    "open_source",
]


def __getattr__(name: str) -> object:
    if name == "Loader":
        from dataio.loader import Loader

        return Loader
    raise AttributeError(f"module 'dataio' has no attribute {name!r}")
