"""Samples: from the source to a batch. See docs/architecture.md.

Only `Loader` and `Mixture` need torch; they are imported when first asked for, so that tools and
tests of the parts below them start at once.
"""

from typing import TYPE_CHECKING

from dataio.base.errors import (
    CacheBusyError,
    CacheError,
    CorruptRowError,
    DataioError,
    ExchangeError,
    FieldError,
    OtherDatasetError,
    QuotaError,
    SharedFilesystemError,
    SourceError,
    StallError,
    StateError,
    WorkerError,
    WorldError,
)
from dataio.rows.fields import Array, Bytes, Field, Float, Image, Int, Text, Tokens
from dataio.source import (
    DatasetSource,
    NumpySource,
    Retry,
    Source,
    Throttle,
    TransformedSource,
    open_source,
)
from dataio.world import World, discover_world

if TYPE_CHECKING:
    from dataio.loader import Loader
    from dataio.mixture import Mixture

__all__ = [
    "Array",
    "Bytes",
    "CacheBusyError",
    "CacheError",
    "CorruptRowError",
    "DataioError",
    "DatasetSource",
    "ExchangeError",
    "Field",
    "FieldError",
    "Float",
    "Image",
    "Int",
    "Loader",
    "Mixture",
    "NumpySource",
    "OtherDatasetError",
    "QuotaError",
    "Retry",
    "SharedFilesystemError",
    "Source",
    "SourceError",
    "StallError",
    "StateError",
    "Text",
    "Throttle",
    "Tokens",
    "TransformedSource",
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
    if name == "Mixture":
        from dataio.mixture import Mixture

        return Mixture
    raise AttributeError(f"module 'dataio' has no attribute {name!r}")
