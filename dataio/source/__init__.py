"""What is on the shared filesystem -> rows."""

from dataio.source.base import Source
from dataio.source.expand import expand
from dataio.source.formats.arrays import NumpySource
from dataio.source.formats.folder import ImageFolderSource
from dataio.source.formats.grids import ArrayFiles
from dataio.source.formats.tar.index import ShardIndex, scan_shard, write_index
from dataio.source.open import Shards, open_some, open_source
from dataio.source.storage.files import Storage, StorageFile
from dataio.source.storage.retry import Retry
from dataio.source.storage.throttle import Throttle
from dataio.source.wrap.anemoi import Anemoi
from dataio.source.wrap.packed import Sequences
from dataio.source.wrap.torch_dataset import DatasetSource
from dataio.source.wrap.transformed import TransformedSource

__all__ = [
    "Anemoi",
    "ArrayFiles",
    "DatasetSource",
    "ImageFolderSource",
    "NumpySource",
    "Retry",
    "Sequences",
    "ShardIndex",
    "Shards",
    "Source",
    "Storage",
    "StorageFile",
    "Throttle",
    "TransformedSource",
    "expand",
    "open_some",
    "open_source",
    "scan_shard",
    "write_index",
]
