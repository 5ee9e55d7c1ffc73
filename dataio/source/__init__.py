"""What is on the shared filesystem -> rows."""

from dataio.source.base import Source
from dataio.source.expand import expand
from dataio.source.files import Storage, StorageFile
from dataio.source.opening import open_source
from dataio.source.retry import Retry
from dataio.source.tar_index import ShardIndex, scan_shard, write_index
from dataio.source.throttle import Throttle

__all__ = [
    "Retry",
    "ShardIndex",
    "Source",
    "Storage",
    "StorageFile",
    "Throttle",
    "expand",
    "open_source",
    "scan_shard",
    "write_index",
]
