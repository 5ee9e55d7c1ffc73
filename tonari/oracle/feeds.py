"""What the loaders of a job do beside its steps: batches, and rows that travel. Pure."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from dataio.plan.layout import Layout
from dataio.plan.order import NUM_GROUPS
from dataio.rows.fields import row_schema
from dataio.store.files.reader import MEMORY_FRACTION
from dataio.store.quota import Need
from shuffle import Partial
from shuffle.ring import crossing_fraction
from tonari.oracle.cluster.cluster import StorageRates
from tonari.oracle.costs import Feed, Machine, TaskCost
from tonari.oracle.probe.data import DataTimes
from tonari.oracle.probe.messages import EXCHANGE
from tonari.oracle.windows import Quota, share_quota
from tonari.trainer.config.config import Config
from tonari.trainer.run.build import make_fields
from tonari.trainer.run.own import Own, own_of

PAGE_BYTES = 4096
"""Of memory, on most machines; a disk is asked for no less."""


@dataclass(frozen=True, kw_only=True)
class RowsOnNodes:
    """How the rows of a job lie on its nodes, and travel.

    Attributes:
        layout: Replicas on each node, and samples.
        readers: Ranks that read, one for each replica, node by node.
        row_bytes: Mean.
        source_row_bytes: Read from the source for one; mean.
        pool_bytes: Of the node that holds most, copies and all.
        staged_bytes: Of these, what stays in its cache.
        quota: How its rows share one; None: it has none.
        leaving_bytes: Of each replica, over its node's link, an epoch; with its copies.
        arriving_bytes: Of each replica, written in an epoch; with its copies.
        memory_bytes: Of a node; None: not known, and no row stays there.
    """

    layout: Layout
    readers: tuple[int, ...]
    row_bytes: float
    source_row_bytes: float
    pool_bytes: float
    staged_bytes: float
    leaving_bytes: float
    arriving_bytes: float
    quota: Quota | None = None
    memory_bytes: float | None = None

    @property
    def disk_row_bytes(self) -> float:
        """Read from a node's disk for one, in an epoch but the first: mean.

        The whole pages that it lies on, unless it is in memory still.
        """
        return (self.row_bytes + PAGE_BYTES - 1) * self._read_share

    @property
    def _read_share(self) -> float:
        """Work out how many of the rows are no longer in memory when they are read again.

        A row that is read at x of an epoch and at y of the next one, each drawn from [0, 1), finds
        x + (1 - x) y of the rows read in between, counted backwards for x. A memory of the share f
        of all has it still where that is less than f: for 1 - c + c ln c of the rows, c = 1 - f.
        """
        if self.memory_bytes is None or not self.staged_bytes:
            return 1.0
        missing = 1 - MEMORY_FRACTION * self.memory_bytes / self.staged_bytes
        return missing - missing * math.log(missing) if missing > 0 else 0.0

    def num_steps(self, config: Config, *, hidden_fraction: float = 0.0) -> int:
        """Count an epoch's optimizer steps; the same on every replica."""
        visible = self.layout.num_samples - int(hidden_fraction * self.layout.num_samples)
        share = -(-visible // self.layout.num_replicas)
        data = config.data
        batches = share // data.batch_size if data.drop_last else -(-share // data.batch_size)
        return max(-(-batches // config.optimizer.accumulate), 1)


def lay_rows(
    config: Config, data: DataTimes, *, readers: Sequence[int], node_of: Sequence[int],
    own: Own | None = None, memory_bytes: float | None = None,
) -> RowsOnNodes:  # fmt: skip
    """Deal a job's rows out to its nodes.

    Args:
        config: The settings.
        data: Of the job's data.
        readers: Ranks that read, ascending.
        node_of: Of each rank.
        own: What the caller of `trainer.train` would bring.
        memory_bytes: Of a node; None: not known.

    Raises:
        QuotaError: If no epoch could be trained within the cache's quota.
    """
    nodes = [node_of[rank] for rank in readers]
    layout = Layout(
        tuple(nodes.count(node) for node in dict.fromkeys(nodes)),
        max(data.num_rows, len(readers)),
    )
    shuffle = config.shuffle.make()
    holds_all = shuffle.holds_all
    pool_rows = layout.num_samples if holds_all else int(layout.pool_sizes.max())
    pool_bytes = pool_rows * data.row_bytes
    leaving = 0.0
    if layout.num_nodes > 1 and isinstance(shuffle, Partial):
        leaving = shuffle.num_leaving(layout) * crossing_fraction(layout)
    elif layout.num_nodes > 1 and shuffle.num_leaving(layout):
        leaving = layout.num_samples / layout.num_replicas * (1 - 1 / layout.num_nodes)
    copies = config.data.cache.copies if layout.can_copy and not holds_all else 1
    # Of the other nodes one need not be sent a row, and one not its copy: it lies there.
    sends = 1 if copies == 1 else 2 - 2 / (layout.num_nodes - 1)
    quota = None
    if config.data.cache.quota_bytes is not None:
        schema = row_schema(make_fields(config, own_of(config, own)))
        own_bytes = max(round(data.row_bytes) - schema.position_bytes, 1)
        guess_bytes = own_bytes
        if data.guessed_row_bytes is not None:
            guess_bytes = max(int(data.guessed_row_bytes) - schema.fixed_bytes, 0)
        need = Need(
            schema, layout.num_samples, pool_rows,
            2 * math.ceil(leaving) * layout.widest, layout.widest, config.data.batch_size,
            scored=True, variable_bytes=guess_bytes if schema.variable else 0, shard_bytes=0,
        )  # fmt: skip
        quota = share_quota(
            config.data.cache.quota_bytes, need,
            variable_bytes=own_bytes if schema.variable else 0, row_bytes=data.row_bytes,
            source_row_bytes=data.source_row_bytes,
            first_row=0 if holds_all else int(layout.pool_starts[np.argmax(layout.pool_sizes)]),
            pieces=data.pieces,
        )  # fmt: skip
    return RowsOnNodes(
        layout=layout,
        readers=tuple(readers),
        row_bytes=data.row_bytes,
        source_row_bytes=data.source_row_bytes,
        pool_bytes=copies * pool_bytes,
        staged_bytes=pool_bytes if quota is None else quota.resident_rows * data.row_bytes,
        leaving_bytes=sends * leaving * data.row_bytes,
        arriving_bytes=copies * leaving * data.row_bytes,
        quota=quota,
        memory_bytes=memory_bytes,
    )


@dataclass(frozen=True)
class SourceRates:
    """What rows are read at from where they were in the beginning, in bytes/s.

    Attributes:
        of_node: By one node.
        of_all: By all together; None: no limit of its own.
    """

    of_node: float
    of_all: float | None = None

    def seconds(self, num_bytes: float, num_nodes: int) -> float:
        """Compute how long each node takes to read so much, all at a time."""
        together_s = 0.0 if self.of_all is None else num_bytes * num_nodes / self.of_all
        return max(num_bytes / self.of_node, together_s)


def find_source(storage: StorageRates, data: DataTimes) -> SourceRates:
    """Find at what rates rows are read from where they lie in the beginning."""
    of_node, of_all = storage.node_read_gbyte_s, storage.read_gbyte_s
    return SourceRates(
        of_node=min(data.staging_bytes_per_s, math.inf if of_node is None else of_node * 1e9),
        of_all=None if of_all is None else of_all * 1e9,
    )


def stage_s(
    storage: StorageRates, source: SourceRates, rows: RowsOnNodes, *, limit_bytes_per_s: float = 0.0
) -> float:  # fmt: skip
    """Price staging: each node reads so much from the source, and writes it to its disk.

    Args:
        storage: Of the cluster.
        source: What rows are read at.
        rows: As they lie on the nodes.
        limit_bytes_per_s: Of the settings; 0: none.
    """
    disk = storage.disk_write_gbyte_s
    rates = [
        *([] if disk is None else [disk * 1e9]),
        *([limit_bytes_per_s] * (limit_bytes_per_s > 0)),
    ]
    read_bytes = rows.staged_bytes / rows.row_bytes * rows.source_row_bytes
    read_s = source.seconds(read_bytes, rows.layout.num_nodes)
    return max(read_s, *(rows.staged_bytes / rate for rate in rates), 0.0)


def stage_beside(staging_s: float, *, steps_s: float) -> tuple[float, float]:
    """Split staging where training begins with the first group of rows.

    What readers take of cores and links meanwhile is not counted.

    Args:
        staging_s: Of all rows.
        steps_s: Of the first epoch, where nobody waits.

    Returns:
        Seconds before the first step, and for which later ones wait for the other groups.
    """
    first_s = staging_s / NUM_GROUPS
    return first_s, (1 - 1 / NUM_GROUPS) * max(staging_s - steps_s, 0.0)


def make_feeds(
    config: Config, data: DataTimes, rows: RowsOnNodes, machine: Machine, *, source: SourceRates,
    exchanges: bool = True, staged: bool = True, hidden_fraction: float = 0.0,
    disk_bytes_per_s: float | None = None,
) -> dict[int, Feed]:  # fmt: skip
    """Let each reader's loader make batches and send rows, an optimizer step at a time.

    Rows that a quota leaves no room for come in windows, not with batches: see `oracle.windows`.
    What a window takes of processors is spread over the batches.

    Args:
        config: The settings.
        data: What a batch takes.
        rows: Where they lie.
        machine: What it takes there.
        source: For rows that are not staged.
        exchanges: Whether rows leave.
        staged: Whether caches hold rows; else every row is read from the source with its batch.
        hidden_fraction: Of the rows: as many leave, beside fewer steps.
        disk_bytes_per_s: That all readers of a node read from its own disk, where staged rows lie;
            None: as fast as what was timed.
    """
    num_steps = rows.num_steps(config, hidden_fraction=hidden_fraction)
    windows_s = 0.0
    if rows.quota is not None and staged:
        windows_s = rows.quota.reading_s(visible_fraction=1 - hidden_fraction)
        windows_s /= num_steps * config.optimizer.accumulate
    read_bytes = 0.0 if staged else config.data.batch_size * rows.source_row_bytes
    accumulate = config.optimizer.accumulate
    per_step = 0.0
    if exchanges:
        per_step = rows.leaving_bytes / num_steps
    feeds = {}
    # Nodes that share processors, in a test, have disks of their own
    node = np.repeat(range(rows.layout.num_nodes), rows.layout.replicas).tolist()
    for number, rank in enumerate(rows.readers):
        cores = machine.cores(rank)
        # What was timed includes what readers do to one another
        crowd = machine.slowdown(cores, data.readers * data.batch_cores)
        sends: tuple[TaskCost, ...] = ()
        if per_step:
            # As far along the ring as there are replicas on a node: to another one
            partner = rows.readers[(number + rows.layout.widest) % len(rows.readers)]
            sends = (machine.message(EXCHANGE, (rank, partner), round(per_step)),)
        busy_s, node_s = data.batch_s / crowd, read_bytes / source.of_node
        all_s = read_bytes / source.of_all if source.of_all else 0.0
        disk_s = 0.0
        if staged and disk_bytes_per_s is not None:
            disk_s = config.data.batch_size * rows.disk_row_bytes / disk_bytes_per_s
        # Read, and made, one beside the other
        parts = (
            (cores, busy_s + windows_s, data.batch_cores * busy_s + windows_s),
            (("source of node", *cores[1:]), node_s, node_s),
            (("source",), all_s, all_s),
            (("disk of node", node[number]), disk_s, disk_s),
        )
        one_s = max(seconds for _, seconds, _ in parts)
        asked = [part for part in parts if part[2]]
        feeds[rank] = Feed(
            batch=TaskCost(
                one_s * accumulate,
                demands=tuple((resource, demand_s / one_s) for resource, _, demand_s in asked),
                busy=tuple(seconds / one_s for _, seconds, _ in asked),
            ),
            ahead=-(-config.data.workers.prefetch // accumulate),
            sends=sends,
        )
    return feeds
