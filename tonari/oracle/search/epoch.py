"""What an epoch of a configuration takes: a plan of its steps beside loaders, and bounds of it.

A plan is made as `tonari plan` makes it, by `tonari.oracle.epoch`, of a step that equations
estimate (see `tonari.oracle.search.price`) and of one rank that stands for all (see
`tonari.oracle.search.fold`). What it assumes beside:

- One rank of each replica reads, of the first stage, so that other nodes hold no rows; see
  `tonari.trainer.mesh.place`.
- Loaders have the node's cores but one for each rank.
- A step's messages come at its end.
- A cache takes all of a node's rows, or as much as its disk has, unless the settings have a quota.

Evaluations and checkpoints are not planned.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache, partial

from dataio.base.errors import QuotaError
from dataio.plan.policies import refresh_every
from tonari.oracle.cluster.cluster import Cluster
from tonari.oracle.epoch import STEPS, FedJob, PlannedEpoch
from tonari.oracle.feeds import RowsOnNodes, lay_rows
from tonari.oracle.probe.data import DataTimes
from tonari.oracle.search.choices import Group
from tonari.oracle.search.fold import OF_STEP, FoldedMachine, folded_program
from tonari.trainer.config.config import Config
from tonari.trainer.run.build import make_importance
from tonari.trainer.run.own import Own

ROUNDING = 1e-9
"""Share of a time by which sums differ that are added up in another order."""


@dataclass(frozen=True, kw_only=True)
class GroupEpoch:
    """What the data asks of an epoch of a group, where rows lie on nodes in one way.

    Attributes:
        words: The choice of exchange, hidden rows and quota, for people.
        job: What a plan is made of, but for the steps.
        machine: That it is simulated on, but for the steps' messages.
        num_rows: That an epoch trains.
        decode_s: Of a step's batches, with as many threads as there may be; and of reading those
            beyond the quota.
        disk_s: Of the same, read from the node's disk.
        exchange_s: For which a step's leaving rows keep the busiest link.
        scorings: Batches of hidden rows that are scored anew, of a replica, on average.
        quota: As `NodeCache` takes it; 0: all rows lie in the cache, or the settings have one.
        batch_core_s: Of a step's batches on one core.
        most_threads: Of a reader; 0: nobody counts them, or the settings have them.
    """

    words: tuple[str, ...]
    job: FedJob
    machine: FoldedMachine
    num_rows: float
    decode_s: float
    disk_s: float
    exchange_s: float
    scorings: float
    quota: int
    batch_core_s: float
    most_threads: int

    def floor_s(self, step_s: float, forward_s: float = 0.0) -> float:
        """Bound an epoch from below: of bounds of the arguments, it is one of the epoch.

        A simulated step takes no less than it takes alone, and steps in a row no less than their
        batches, or their leaving rows on the link: but for what is done before the first of them
        ends, which `tonari.oracle.simulate` does not count in a step. Arguments as of `plan`.
        """
        counted, made_s, exchange_s = STEPS - 1, max(self.decode_s, self.disk_s), self.exchange_s
        made_at_least_s = made_s - exchange_s / counted
        sent_at_least_s = (counted * exchange_s - made_s) / STEPS
        steps_s = self.job.num_steps * max(step_s, made_at_least_s, sent_at_least_s)
        steps_s += self.job.windows_s(steps_s)
        read_s = self.disk_s / self.job.config.optimizer.accumulate
        scored_s = self.scorings * max(forward_s, self.job.data.batch_s, read_s)
        return (steps_s + scored_s + self.job.data.epoch_end_s) * (1 - ROUNDING)

    def plan(
        self, step_s: float, link_s: float, forward_s: float
    ) -> tuple[PlannedEpoch, dict[str, float]]:
        """Plan an epoch.

        Args:
            step_s: Of a step that waits for nobody.
            link_s: For which its messages keep a node's link.
            forward_s: Of a batch's forward pass over all stages.

        Returns:
            The plan, and what it has beside steps that wait for nobody, by its causes.
        """
        link_s = min(link_s, step_s)
        job = replace(
            self.job,
            machine=replace(self.machine, link_s=link_s),
            steps=[folded_program(step_s, link_s=link_s)],
            evaluations=[folded_program(forward_s)],
        )
        simulation = job.simulate()
        epoch = job.plan(simulation)
        num, steps_s = epoch.steps, epoch.train_s - epoch.windows_s
        late_s = steps_s - num * step_s
        late_s *= late_s > ROUNDING * steps_s
        shared_s = num * (simulation.parts_s().get(OF_STEP, 0.0) - link_s)
        shared_s = min(max(shared_s, 0.0), late_s)
        slow_disk = self.decode_s < self.disk_s
        return epoch, {
            "exchange": shared_s + epoch.exchange_s,
            "decoding": 0.0 if slow_disk else late_s - shared_s,
            "node disk": late_s - shared_s if slow_disk else 0.0,
            "windows": epoch.windows_s,
            "epoch end": epoch.epoch_end_s,
            "refresh": epoch.refresh_s,
        }

    def settings(self, step_s: float) -> tuple[str, ...]:
        """List what is chosen freely: the cache's size, and threads that keep up with the steps."""
        found = [f"data.cache.quota={self.quota}"] * bool(self.quota)
        if self.most_threads and self.batch_core_s:
            enough = math.ceil(self.batch_core_s / step_s)
            found.append(f"data.workers.threads={min(max(enough, 1), self.most_threads)}")
        return tuple(found)


class Epochs:
    """Plans epochs of one choice of exchange, hidden rows and quota.

    Args:
        config: The settings, with that choice.
        cluster: The machine.
        data: To train on, of which no evaluation is planned.
        world_size: Ranks.
        hidden_fraction: Of the rows, that an epoch leaves out.
        core_s: That a core takes to decode and transform a row; None: by the machine's file.
        words: The choice, for people.
        own: What the caller of `trainer.train` would bring.
    """

    def __init__(
        self, config: Config, cluster: Cluster, data: DataTimes, *, world_size: int,
        hidden_fraction: float = 0.0, core_s: float | None = None, words: tuple[str, ...] = (),
        own: Own | None = None,
    ) -> None:  # fmt: skip
        self.words, self.hidden_fraction = words, hidden_fraction
        self._config, self._cluster, self._own = config, cluster, own
        self._data = replace(data, readers=1, evaluated_rows=0)
        self._here = min(cluster.ranks_per_node, world_size)
        self._every = refresh_every(make_importance(config)) or 0
        self._core_s = core_s or 0.0
        if core_s is None and cluster.host.decode_mbyte_s is not None:
            self._core_s = data.row_bytes / (cluster.host.decode_mbyte_s * 1e6)
        self._of = lru_cache(maxsize=None)(self._find)

    def of(self, group: Group) -> GroupEpoch | None:
        """Find what a group's data asks for; None: its caches do not fit on the nodes' disks."""
        _, dp_replicate, dp_shard, cp, tp = group.sizes
        return self._of(dp_replicate * dp_shard, cp * tp, group.batch_size)

    def _find(self, replicas: int, inner: int, batch_size: int) -> GroupEpoch | None:
        config = replace(self._config, data=replace(self._config.data, batch_size=batch_size))
        laid = self._lay(config, range(0, replicas * inner, inner))
        if laid is None:
            return None
        rows, quota = laid
        host, storage = self._cluster.host, self._cluster.storage
        num_steps = rows.num_steps(config, hidden_fraction=self.hidden_fraction)
        step_rows = batch_size * config.optimizer.accumulate
        widest = rows.layout.widest
        workers, cores = config.data.workers, 0.0  # of a reader; several may share one
        own_threads = workers.processes or workers.threads or 0
        if host.cores is not None:
            cores = max(host.cores - self._here, 1) / widest
            cores = min(cores, own_threads or cores)
        disk = storage.disk_read_gbyte_s
        reading_s = 0.0
        if rows.quota is not None:
            reading_s = rows.quota.reading_s(visible_fraction=1 - self.hidden_fraction)
        hidden = self.hidden_fraction * self._data.num_rows / replicas
        exchange_s = self._exchange_s(rows, inner)
        exchange_byte_s = exchange_s / widest / rows.leaving_bytes if exchange_s else 0.0
        machine = FoldedMachine(
            readers=widest,
            ranks=self._here,
            cores_of_node=math.inf if host.cores is None else max(host.cores, self._here + 1),
            exchange_byte_s=exchange_byte_s,
        )
        batch_s = batch_size * self._core_s / cores if cores else 0.0
        job = FedJob(
            config=config,
            data=replace(self._data, batch_s=batch_s, batch_cores=cores),
            # One of them stands for all
            rows=replace(rows, readers=rows.readers[:1]),
            machine=machine,
            storage=storage,
            steps=(),
            evaluations=(),
            hidden_fraction=self.hidden_fraction,
        )
        return GroupEpoch(
            words=self.words,
            job=job,
            machine=machine,
            num_rows=self._data.num_rows * (1 - self.hidden_fraction),
            decode_s=batch_s * config.optimizer.accumulate + reading_s / num_steps,
            disk_s=0.0 if disk is None else widest * step_rows * rows.disk_row_bytes / disk / 1e9,
            exchange_s=widest * round(rows.leaving_bytes / num_steps) * exchange_byte_s,
            scorings=math.ceil(hidden / batch_size) / self._every if self._every else 0.0,
            quota=quota,
            batch_core_s=step_rows * self._core_s,
            most_threads=max(int(cores), 1) if cores and not own_threads else 0,
        )

    def _lay(self, config: Config, readers: Sequence[int]) -> tuple[RowsOnNodes, int] | None:
        """Deal rows out to nodes, and find the quota that their disks ask for."""
        disk, own = self._cluster.storage.disk_gbyte, config.data.cache.quota_bytes
        most = math.inf if disk is None else disk * 1e9
        lay = partial(
            lay_rows, data=self._data, readers=readers, own=self._own,
            node_of=[rank // self._here for rank in range(readers[-1] + 1)],
            memory_bytes=self._cluster.host.memory_bytes,
        )  # fmt: skip
        try:
            rows = lay(config)
            if own is not None:
                return (rows, 0) if own <= most else None
            arriving = 2 * rows.arriving_bytes * rows.layout.widest
            if rows.pool_bytes + arriving <= most:
                return rows, 0
            if config.data.cache.copies > 1:
                return None
            cache = replace(config.data.cache, quota=int(most))
            limited = replace(config, data=replace(config.data, cache=cache))
            return lay(limited), int(most)
        except QuotaError:
            return None

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
