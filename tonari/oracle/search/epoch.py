"""What an epoch of a configuration takes, by equations: steps, and the data that they wait for.

As `tonari.oracle.search.price`, to rank by. Its assumptions:

- One rank of each replica reads, of the first stage, so that other nodes hold no rows; see
  `tonari.trainer.mesh.place`.
- Loaders keep up, or set the pace: decoding on the node's cores but one for each rank, or the
  node's disk, on which all rows are read in every epoch.
- Rows that the exchange sends find the gradients on the link, and these find them, for as large a
  part of a step as each takes.
- Rows beyond a quota come in windows: see `oracle.windows`.
- A cache takes all of a node's rows, or as much as its disk has, unless the settings have a quota.

Left out: evaluations, checkpoints, the first batch, rows that stay in memory.
"""

import math
from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache
from typing import NamedTuple

from dataio.base.errors import QuotaError
from dataio.plan.policies import refresh_every
from tonari.oracle.cluster.cluster import Cluster
from tonari.oracle.feeds import RowsOnNodes, find_source, lay_rows, stage_beside, stage_s
from tonari.oracle.search.choices import Group
from tonari.oracle.search.data import DataFacts
from tonari.oracle.windows import wait_for_windows
from tonari.trainer.config.config import Config
from tonari.trainer.run.build import make_importance
from tonari.trainer.run.own import Own


class Fed(NamedTuple):
    """What the data asks of an epoch, where rows lie on nodes in one way.

    Attributes:
        num_steps: Of the optimizer.
        decode_s: Of a step's batches, with as many threads as there may be.
        disk_s: Of the same, read from the node's disk.
        exchange_s: For which a step's leaving rows keep the busiest link.
        shares: Of the steps that each window of rows beyond the quota is for.
        reads_s: What each takes to be read.
        counts: How many of each come one after another.
        scorings: Batches of hidden rows that are scored anew, of a replica, on average.
        staging_s: Of all rows; see `Epochs.staging_s`.
        quota: As `NodeCache` takes it; 0: all rows lie in the cache, or the settings have one.
        batch_core_s: Of a step's batches on one core.
        most_threads: Of a reader; 0: nobody counts them.
    """

    num_steps: int
    decode_s: float
    disk_s: float
    exchange_s: float
    shares: tuple[float, ...]
    reads_s: tuple[float, ...]
    counts: tuple[int, ...]
    scorings: float
    staging_s: float
    quota: int
    batch_core_s: float
    most_threads: int


def share_link(step_s: float, link_s: float, exchange_s: float) -> float:
    """Price a step that shares a link with rows on their way.

    Never shorter where any of the three is longer, which a bound goes by.

    Args:
        step_s: Where nobody else is on the link.
        link_s: For which the step's own messages keep it.
        exchange_s: For which the rows do.
    """
    link_s = min(link_s, step_s)
    if step_s < exchange_s:
        return link_s + exchange_s
    # Each finds the other there for its part of the step
    return step_s + (link_s * exchange_s / step_s if step_s else 0.0)


class Epochs:
    """Prices epochs of one choice of exchange, hidden rows and quota.

    Args:
        config: The settings, with that choice.
        cluster: The machine.
        data: To train on.
        world_size: Ranks.
        hidden_fraction: Of the rows, that an epoch leaves out.
        words: The choice, for people.
        own: What the caller of `trainer.train` would bring.
    """

    def __init__(
        self, config: Config, cluster: Cluster, data: DataFacts, *, world_size: int,
        hidden_fraction: float = 0.0, words: tuple[str, ...] = (), own: Own | None = None,
    ) -> None:  # fmt: skip
        self.words, self.hidden_fraction = words, hidden_fraction
        self._config, self._cluster, self._data, self._own = config, cluster, data, own
        self._here = min(cluster.ranks_per_node, world_size)
        self._source = find_source(cluster.storage, probed_bytes_per_s=data.read_bytes_per_s)
        self._every = refresh_every(make_importance(config)) or 0
        self._core_s = data.core_s or 0.0
        if data.core_s is None and cluster.host.decode_mbyte_s is not None:
            self._core_s = data.row_bytes / (cluster.host.decode_mbyte_s * 1e6)
        self._fed = lru_cache(maxsize=None)(self._feed)

    @property
    def num_rows(self) -> float:
        """Rows that an epoch trains."""
        return self._data.num_rows * (1 - self.hidden_fraction)

    def fed(self, group: Group) -> Fed | None:
        """Find what a group's data asks for; None: its caches do not fit on the nodes' disks."""
        _, dp_replicate, dp_shard, cp, tp = group.sizes
        return self._fed(dp_replicate * dp_shard, cp * tp, group.batch_size)

    def epoch_s(
        self, fed: Fed, step_s: float, link_s: float = 0.0, forward_s: float = 0.0
    ) -> float:
        """Price an epoch; of lower bounds of the arguments, it is one of the epoch.

        Args:
            fed: Of the group.
            step_s: Of a step that waits for nobody.
            link_s: For which its messages keep a node's link.
            forward_s: Of a batch's way past all stages.
        """
        shared_s = share_link(step_s, link_s, fed.exchange_s)
        steps_s = fed.num_steps * max(shared_s, fed.decode_s, fed.disk_s)
        waits_s = self._windows_s(fed, steps_s) + self._refresh_s(fed, forward_s)
        return steps_s + waits_s + self._data.epoch_end_s

    def waits_s(self, fed: Fed, step_s: float, link_s: float, forward_s: float) -> dict[str, float]:
        """Split what `epoch_s` has beside steps that wait for nobody, by its causes."""
        num, shared_s = fed.num_steps, share_link(step_s, link_s, fed.exchange_s)
        fed_s = max(fed.decode_s, fed.disk_s)
        late_s = num * max(fed_s - shared_s, 0.0)
        steps_s = num * max(shared_s, fed_s)
        return {
            "exchange": num * (shared_s - step_s),
            "decoding": late_s if fed.decode_s >= fed.disk_s else 0.0,
            "node disk": late_s if fed.decode_s < fed.disk_s else 0.0,
            "windows": self._windows_s(fed, steps_s),
            "epoch end": self._data.epoch_end_s,
            "refresh": self._refresh_s(fed, forward_s),
        }

    def staging_s(self, fed: Fed, steps_s: float) -> float:
        """Price what staging adds to a run, before its first epoch or in it.

        Args:
            fed: Of the group.
            steps_s: Of an epoch.
        """
        if self._config.data.staging.when == "overlap":
            return sum(stage_beside(fed.staging_s, steps_s=steps_s))
        return fed.staging_s

    def _windows_s(self, fed: Fed, steps_s: float) -> float:
        if not fed.shares:
            return 0.0
        return wait_for_windows(fed.shares, fed.reads_s, steps_s=steps_s, counts=fed.counts)

    def _refresh_s(self, fed: Fed, forward_s: float) -> float:
        """Price the batches of hidden rows, each of which is made, and goes forward."""
        fed_s = max(fed.decode_s, fed.disk_s) / self._config.optimizer.accumulate
        return fed.scorings * max(forward_s, fed_s)

    def settings(self, fed: Fed, step_s: float) -> tuple[str, ...]:
        """List what is chosen freely: the cache's size, and threads that keep up with the steps."""
        found = [f"data.cache.quota={fed.quota}"] * bool(fed.quota)
        if fed.most_threads and fed.batch_core_s and not self._own_threads:
            enough = math.ceil(fed.batch_core_s / step_s)
            found.append(f"data.workers.threads={min(max(enough, 1), fed.most_threads)}")
        return tuple(found)

    @property
    def _own_threads(self) -> int:
        workers = self._config.data.workers
        return workers.processes or workers.threads or 0

    def _feed(self, replicas: int, inner: int, batch_size: int) -> Fed | None:
        config = replace(self._config, data=replace(self._config.data, batch_size=batch_size))
        laid = self._lay(config, range(0, replicas * inner, inner))
        if laid is None:
            return None
        rows, quota = laid
        host, storage = self._cluster.host, self._cluster.storage
        num_steps = rows.num_steps(config, hidden_fraction=self.hidden_fraction)
        step_rows = batch_size * config.optimizer.accumulate
        widest = rows.layout.widest
        cores = 0.0  # of a reader; several may share one
        if host.cores is not None:
            cores = max(host.cores - self._here, 1) / widest
            cores = min(cores, self._own_threads or cores)
        disk = storage.disk_read_gbyte_s
        windows = [] if rows.quota is None else list(
            rows.quota.runs(visible_fraction=1 - self.hidden_fraction)
        )  # fmt: skip
        hidden = self.hidden_fraction * self._data.num_rows / replicas
        return Fed(
            num_steps=num_steps,
            decode_s=step_rows * self._core_s / cores if cores else 0.0,
            disk_s=0.0 if disk is None else widest * step_rows * rows.disk_row_bytes / disk / 1e9,
            exchange_s=self._exchange_s(rows, inner) / num_steps,
            shares=tuple(share for _, share, _ in windows),
            reads_s=tuple(
                self._source.seconds(num_bytes, rows.layout.num_nodes)
                for _, _, num_bytes in windows
            ),
            counts=tuple(count for count, _, _ in windows),
            scorings=math.ceil(hidden / batch_size) / self._every if self._every else 0.0,
            staging_s=stage_s(
                storage, self._source, rows,
                limit_bytes_per_s=config.data.staging.bytes_per_s,
            ),
            quota=quota,
            batch_core_s=step_rows * self._core_s,
            most_threads=max(int(cores), 1) if cores else 0,
        )  # fmt: skip

    def _lay(self, config: Config, readers: Sequence[int]) -> tuple[RowsOnNodes, int] | None:
        """Deal rows out to nodes, and find the quota that their disks ask for."""
        disk, own = self._cluster.storage.disk_gbyte, config.data.cache.quota_bytes
        most = math.inf if disk is None else disk * 1e9
        node_of = [rank // self._here for rank in range(readers[-1] + 1)]
        try:
            rows = self._rows(config, readers, node_of)
            if own is not None:
                return (rows, 0) if own <= most else None
            arriving = 2 * rows.leaving_bytes * rows.layout.widest
            if rows.pool_bytes + arriving <= most:
                return rows, 0
            cache = replace(config.data.cache, quota=int(most))
            limited = replace(config, data=replace(config.data, cache=cache))
            rows = self._rows(limited, readers, node_of)
            return rows, int(most)
        except QuotaError:
            return None

    def _rows(self, config: Config, readers: Sequence[int], node_of: Sequence[int]) -> RowsOnNodes:
        data = self._data
        return lay_rows(
            config, data, readers=readers, node_of=node_of, own=self._own, pieces=data.pieces,
            guessed_row_bytes=data.guessed_row_bytes,
            memory_bytes=self._cluster.host.memory_bytes,
        )  # fmt: skip

    def _exchange_s(self, rows: RowsOnNodes, inner: int) -> float:
        """Price what leaves in an epoch on the busiest link."""
        replicas, spans = rows.layout.num_replicas, self._cluster.spans()
        longest_s = 0.0
        for level, span in zip(self._cluster.level[1:], spans[1:], strict=False):
            inside = min(-(-span // inner), replicas)
            if rows.leaving_bytes and inside < replicas and level.gbyte_s is not None:
                # Of rows that change node, those that leave the larger unit too
                share = (replicas - inside) / max(replicas - rows.layout.widest, 1)
                num_bytes = inside * rows.leaving_bytes * min(share, 1.0)
                longest_s = max(longest_s, num_bytes / (level.gbyte_s * 1e9))
        return longest_s
