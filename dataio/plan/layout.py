"""Which node owns which rows at first: contiguous ranges of sample ids, replica by replica.

Replicas are numbered node by node. Replica r's share of the dataset is floor or ceil of N/R rows; a
node's pool is its replicas' shares side by side, so slot s of a node holds sample
``pool_start(node) + s`` at first. Where the dataset grew, see `placement.py`.

Whoever reads rows from the source divides them along its shards, so that each is opened once.
"""

from dataclasses import dataclass, field, replace
from functools import cached_property

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True)
class Layout:
    """Replicas on each node, and how many samples they share.

    Attributes:
        replicas: Number of replicas on each node, node by node; each >= 1.
        num_samples: Samples of the dataset, at least one a replica.
        earlier: What the dataset was before it grew: pairs of an epoch and of the samples that it
            had from there on, the first one first; fewer each than `num_samples`.
    """

    replicas: tuple[int, ...]
    num_samples: int
    earlier: tuple[tuple[int, int], ...] = field(default=(), repr=False)

    def __post_init__(self) -> None:
        if not self.replicas or min(self.replicas) < 1:
            raise ValueError(
                f"layout: every node needs at least one replica, found {self.replicas}"
            )
        if self.num_samples < self.num_replicas:
            raise ValueError(
                f"layout: the dataset has {self.num_samples} samples, but there are "
                f"{self.num_replicas} replicas and each needs at least one; start fewer ranks"
            )

    def before_growth(self) -> tuple["Layout", int]:
        """Return the layout of the dataset before it last grew, and the epoch that it began in."""
        first_epoch, num_samples = self.earlier[-1]
        return replace(self, num_samples=num_samples, earlier=self.earlier[:-1]), first_epoch

    @property
    def num_nodes(self) -> int:
        return len(self.replicas)

    @cached_property
    def num_replicas(self) -> int:
        return sum(self.replicas)

    @cached_property
    def widest(self) -> int:
        """Most replicas on one node."""
        return max(self.replicas)

    @cached_property
    def is_even(self) -> bool:
        """Whether all nodes have equally many replicas."""
        return min(self.replicas) == self.widest

    @property
    def can_copy(self) -> bool:
        """Whether each node can hold another's rows: several, of equally many replicas."""
        return self.is_even and self.num_nodes > 1

    @cached_property
    def first_replica(self) -> NDArray[np.int64]:
        """int64[num_nodes + 1]: First replica of each node, and the number of replicas."""
        return np.concatenate([[0], np.cumsum(self.replicas)]).astype(np.int64)

    def node_of(self, replica: int) -> int:
        """Find the node that a replica stands on."""
        return int(np.searchsorted(self.first_replica, replica, side="right")) - 1

    def share_start(self, replica: int) -> int:
        """Count the rows of all replicas before this one; ``share_start(num_replicas)`` is N."""
        quotient, remainder = divmod(self.num_samples, self.num_replicas)
        return replica * quotient + min(replica, remainder)

    def share_rows(self, replica: int) -> int:
        """Count the rows of a replica's share: floor or ceil of N/R."""
        return self.share_start(replica + 1) - self.share_start(replica)

    def pool_start(self, node: int) -> int:
        """First sample of a node's pool before any exchange."""
        return self.share_start(int(self.first_replica[node]))

    def pool_rows(self, node: int) -> int:
        """Count the slots of a node's pool; never changes within a layout."""
        return self.pool_start(node + 1) - self.pool_start(node)

    def share_slots(self, replica: int) -> tuple[int, int]:
        """Bound the slots [start, stop) of a replica's share in its node's pool."""
        start = self.share_start(replica) - self.pool_start(self.node_of(replica))
        return start, start + self.share_rows(replica)

    @cached_property
    def pool_starts(self) -> NDArray[np.int64]:
        """int64[num_nodes]: `pool_start` of every node."""
        return np.cumsum(self.pool_sizes) - self.pool_sizes

    @cached_property
    def pool_sizes(self) -> NDArray[np.int64]:
        """int64[num_nodes]: Slots of every node's pool."""
        quotient, remainder = divmod(self.num_samples, self.num_replicas)
        starts = self.first_replica * quotient + np.minimum(self.first_replica, remainder)
        return np.diff(starts)


def divide_along_shards(
    sample_ids: NDArray[np.int64], *, shard_starts: NDArray[np.int64], num_parts: int
) -> NDArray[np.int64]:
    """Cut rows into parts of about equal size, between two shards wherever one begins near by.

    Args:
        sample_ids: int64[n]: Sorted.
        shard_starts: int64[num_shards]: First sample of each shard.
        num_parts: Parts, >= 1; a part may be empty.

    Returns:
        int64[num_parts + 1]: Ascending bounds of the parts in ``sample_ids``, from 0 to n. No cut
        moves by more than half a part; a shard is cut only if it is larger than that.
    """
    num_rows = len(sample_ids)
    even = num_rows * np.arange(num_parts + 1, dtype=np.int64) // num_parts
    bounds = np.unique(np.append(np.searchsorted(sample_ids, shard_starts), [0, num_rows]))
    above = np.minimum(np.searchsorted(bounds, even), len(bounds) - 1)
    below = np.maximum(above - 1, 0)
    nearest = np.where(bounds[above] - even <= even - bounds[below], bounds[above], bounds[below])
    return np.where(np.abs(nearest - even) * 2 * num_parts <= num_rows, nearest, even)


def cut_at_shards(
    sample_ids: NDArray[np.int64], *, shard_starts: NDArray[np.int64], num_readers: int
) -> NDArray[np.int64]:
    """Cut one rank's part into pieces that its readers take in turn: a shard each, or less.

    Where there are fewer shards than readers, their rows are divided instead.

    Returns:
        int64[num_pieces + 1]: Ascending, distinct bounds in ``sample_ids``, from 0 to n.
    """
    num_rows = len(sample_ids)
    shards = np.unique(np.append(np.searchsorted(sample_ids, shard_starts), [0, num_rows]))
    if len(shards) > num_readers:
        return shards
    return np.unique(
        divide_along_shards(sample_ids, shard_starts=shard_starts, num_parts=num_readers)
    )
