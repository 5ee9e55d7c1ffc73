"""The values of a field of all samples, read from all nodes' caches: what a policy draws by."""

import numpy as np
from numpy.typing import NDArray

from dataio.store.files.reader import locate
from dataio.store.pool import Pool


class FieldReader:
    """Reads fields of one number a sample, each once; rows may move afterwards.

    Args:
        pool: Of this node, with all its rows in its cache.
        num_samples: Of the dataset.
        holds_all: Whether every node's pool is the whole dataset.
    """

    def __init__(self, pool: Pool, *, num_samples: int, holds_all: bool) -> None:
        self._pool = pool
        self._num_samples = num_samples
        self._holds_all = holds_all
        self._found: dict[str, NDArray[np.generic]] = {}

    def __call__(self, name: str) -> NDArray[np.generic]:
        """Return dtype[num_samples], by sample id. Collective the first time for each name.

        Time and memory O(num_samples) on every rank: each node sends its values to all.
        """
        if name not in self._found:
            self._found[name] = self._read(name)
        return self._found[name]

    def _read(self, name: str) -> NDArray[np.generic]:
        world, cache = self._pool.world, self._pool.cache
        number = [column.name for column in cache.schema.fixed].index(name)
        file = cache.files.fixed[number]
        located = locate(cache.entries, np.arange(self._pool.num_slots))
        mine = file.rows.view(file.column.dtype).reshape(-1)[located.position]
        found = np.empty(self._num_samples, mine.dtype)
        if self._holds_all:
            found[located.sample_id] = mine
            return found
        leads = world.local_rank == 0
        doing = f"read the field {name!r} of all samples"
        ids = world.allgather(located.sample_id.tobytes() if leads else b"", doing=doing)
        values = world.allgather(mine.tobytes() if leads else b"", doing=doing)
        for theirs, data in zip(ids, values, strict=True):
            found[np.frombuffer(theirs, np.int64)] = np.frombuffer(data, mine.dtype)
        return found
