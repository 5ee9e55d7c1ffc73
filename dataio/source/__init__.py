"""What is on the shared filesystem -> rows."""

from dataio.source.arrays import NumpySource
from dataio.source.base import Source
from dataio.source.expand import expand
from dataio.source.grids import ArrayFiles
from dataio.source.image_folder import ImageFolderSource
from dataio.source.io.files import Storage, StorageFile
from dataio.source.io.retry import Retry
from dataio.source.io.throttle import Throttle
from dataio.source.opening import Shards, open_source
from dataio.source.tar.index import ShardIndex, scan_shard, write_index
from dataio.source.text.sequences import Sequences
from dataio.source.torch_dataset import DatasetSource
from dataio.source.transformed import TransformedSource

__all__ = [
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
    "open_source",
    "scan_shard",
    "write_index",
]
