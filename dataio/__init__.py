"""Samples: from the source to a batch. See docs/architecture.md.

What needs torch, such as `Loader` and `join`, is imported when first asked for, so that tools and
tests of the parts below start at once.
"""

from importlib import import_module
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
from dataio.metrics import write_prometheus
from dataio.options import NodeCache, Reports, Staging, Workers
from dataio.plan.by_step import ByStep
from dataio.plan.history import Candidates, ScoreColumn
from dataio.plan.policies import Importance, Selection, Shuffle
from dataio.rows.fields import (
    Array,
    Bytes,
    Field,
    Float,
    Image,
    ImageSize,
    Int,
    Mask,
    RandomPatch,
    Text,
    Tokens,
)
from dataio.rows.tiles import Tiles
from dataio.rows.views import (
    CenterCrop,
    Pad,
    RandomCrop,
    RandomResizedCrop,
    Resize,
    ResizeLong,
    ResizeShort,
)
from dataio.source import (
    Anemoi,
    ArrayFiles,
    DatasetSource,
    NumpySource,
    Retry,
    Sequences,
    Shards,
    Source,
    Throttle,
    TransformedSource,
    open_source,
    write_index,
)
from dataio.world import World, discover_world

if TYPE_CHECKING:
    from dataio.job.launch import Job, join
    from dataio.job.live import LiveJob, live
    from dataio.job.watchdog import Watchdog
    from dataio.loader import Loader
    from dataio.mixture import Mixture
    from dataio.rows.samples import AsList, Tuples

__version__ = "0.1.0"
__all__ = [
    "Anemoi",
    "Array",
    "ArrayFiles",
    "AsList",
    "ByStep",
    "Bytes",
    "CacheBusyError",
    "CacheError",
    "Candidates",
    "CenterCrop",
    "CorruptRowError",
    "DataioError",
    "DatasetSource",
    "ExchangeError",
    "Field",
    "FieldError",
    "Float",
    "Image",
    "ImageSize",
    "Importance",
    "Int",
    "Job",
    "LiveJob",
    "Loader",
    "Mask",
    "Mixture",
    "NodeCache",
    "NumpySource",
    "OtherDatasetError",
    "Pad",
    "QuotaError",
    "RandomCrop",
    "RandomPatch",
    "RandomResizedCrop",
    "Reports",
    "Resize",
    "ResizeLong",
    "ResizeShort",
    "Retry",
    "ScoreColumn",
    "Selection",
    "Sequences",
    "Shards",
    "SharedFilesystemError",
    "Shuffle",
    "Source",
    "SourceError",
    "Staging",
    "StallError",
    "StateError",
    "Text",
    "Throttle",
    "Tiles",
    "Tokens",
    "TransformedSource",
    "Tuples",
    "Watchdog",
    "WorkerError",
    "Workers",
    "World",
    "WorldError",
    "discover_world",
    "join",
    "live",
    "open_source",
    "write_index",
    "write_prometheus",
]


_NEED_TORCH = {
    "AsList": f"{__name__}.rows.samples",
    "Job": f"{__name__}.job.launch",
    "LiveJob": f"{__name__}.job.live",
    "Loader": f"{__name__}.loader",
    "Mixture": f"{__name__}.mixture",
    "Tuples": f"{__name__}.rows.samples",
    "Watchdog": f"{__name__}.job.watchdog",
    "join": f"{__name__}.job.launch",
    "live": f"{__name__}.job.live",
}


def __getattr__(name: str) -> object:
    if name in _NEED_TORCH:
        return getattr(import_module(_NEED_TORCH[name]), name)
    raise AttributeError(f"module 'dataio' has no attribute {name!r}")
