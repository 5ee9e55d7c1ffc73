"""What a job takes: a step, where its time goes, memory; an epoch, and what comes before."""

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, replace
from operator import mul

from dataio.plan.policies import refresh_every
from tonari.oracle.cluster.cluster import Cluster, StorageRates
from tonari.oracle.cluster.machine import Nodes
from tonari.oracle.cluster.probed import cluster_of
from tonari.oracle.costs import Machine
from tonari.oracle.errors import OracleError
from tonari.oracle.feeds import (
    RowsOnNodes,
    SourceRates,
    find_source,
    lay_rows,
    make_feeds,
    stage_beside,
    stage_s,
)
from tonari.oracle.machine import OneNode
from tonari.oracle.probe.data import DataTimes
from tonari.oracle.probe.probe import Probe, step_settings
from tonari.oracle.programs import programs
from tonari.oracle.simulate import Simulation, simulate
from tonari.oracle.trace import Trace, trace_step
from tonari.oracle.windows import wait_for_windows
from tonari.trainer.config.config import Config
from tonari.trainer.errors import ConfigError
from tonari.trainer.run.build import RunLayout, build_place, lay_out, make_importance
from tonari.trainer.run.own import Own
from tonari.trainer.watch.plan import PARTS

STEPS = 21
"""Simulated; the first one is not counted."""
SHOWN_STEPS = 3
MOVING = ("train_s", "refresh_s", "evaluation_s")
"""Parts of an epoch that are longer where steps are."""


@dataclass(frozen=True, kw_only=True)
class StepPlan:
    """A step as it would be.

    Attributes:
        step_s: Its time: the median of `STEPS` simulated ones.
        low_s: The shortest of them.
        high_s: The longest.
        parts_s: Of a rank's mean: computing, waiting for data, and for each kind of message.
        peak_bytes: Of tensors, of a rank at each coordinate of pp; see `oracle.Trace`. Empty if
            the step cannot be made without data.
        untraced: Why it cannot; empty if it can.
        samples_per_s: Rows of all replicas.
        simulation: The steps in full.
        epoch: None: the probe did not time the loader.
    """

    step_s: float
    low_s: float
    high_s: float
    parts_s: dict[str, float]
    peak_bytes: tuple[int, ...]
    untraced: str
    samples_per_s: float
    simulation: Simulation
    epoch: "PlannedEpoch | None"


@dataclass(frozen=True, kw_only=True)
class PlannedEpoch:
    """An epoch as it would be, and what comes before the first.

    Attributes:
        steps: Of the optimizer.
        train_s: Of these, the first batch and the waits for windows included.
        windows_s: Of these, for which steps wait for rows that a quota leaves no room for.
        read_bytes: That the node with most rows reads from the source in an epoch.
        exchange_s: For which the end of the epoch waits for rows that are still on their way.
        epoch_end_s: To the next epoch.
        refresh_s: Of scoring hidden rows anew; on average over epochs.
        refresh_every: Epochs from one such to the next; 0: there is none.
        evaluation_s: Of the test data.
        checkpoint_s: Of writing one, for which training waits; on average over epochs.
        checkpoint_every: Epochs from one to the next; 0: none is written.
        spread: Of steps that were timed: the tenth and the ninetieth of a hundred, over the median.
        staging_s: Before the first epoch.
        late_rows_s: For which the first epoch waits for rows that are staged beside it.
        unstaged_s: What the steps would take, were no row staged and each read from the source in
            every epoch; 0: none is staged.
        link_bytes: That leave the busiest node in an epoch with the exchange.
        hidden_fraction: Of the rows.
        num_nodes: Nodes.
    """

    steps: int
    train_s: float
    windows_s: float = 0.0
    read_bytes: float = 0.0
    exchange_s: float
    epoch_end_s: float
    refresh_s: float
    refresh_every: int
    evaluation_s: float
    checkpoint_s: float
    checkpoint_every: int
    spread: tuple[float, float]
    staging_s: float
    late_rows_s: float = 0.0
    unstaged_s: float
    link_bytes: float
    hidden_fraction: float
    num_nodes: int

    @property
    def parts_s(self) -> dict[str, float]:
        """The parts of an epoch."""
        return {words: getattr(self, name) for name, words in PARTS.items()}

    @property
    def epoch_s(self) -> float:
        """Seconds from one epoch to the next."""
        return sum(self.parts_s.values())

    @property
    def range_s(self) -> tuple[float, float]:
        """The same, were all steps as the fast or as the slow ones that were timed."""
        low, high = self.spread
        moving_s = sum(getattr(self, name) for name in MOVING)
        return self.epoch_s + (low - 1) * moving_s, self.epoch_s + (high - 1) * moving_s

    @property
    def pays_after(self) -> int | None:
        """Epochs after which staging has cost less than reading from the source; None: never."""
        saved_s = self.unstaged_s - self.train_s - self.exchange_s - self.epoch_end_s
        return math.ceil((self.staging_s + self.late_rows_s) / saved_s) if saved_s > 0 else None

    def run_s(self, epochs: int) -> float:
        """Seconds of a run, staging included."""
        return self.staging_s + self.late_rows_s + epochs * self.epoch_s


def plan_step(
    config: Config, found: Probe, *, cluster: Cluster | Probe | None = None,
    hidden_fraction: float = 0.0, own: Own | None = None, cores_of: tuple[int, ...] = (),
) -> StepPlan:  # fmt: skip
    """Predict a job on the node or nodes that were probed for it, or on many such nodes.

    Args:
        config: The settings that the probe was made with; what does not change a step's computation
            may differ, such as the exchange.
        found: Of as many ranks as the job has on a node.
        cluster: The nodes, or a probe of several that are joined as those of the job; None: those
            that were probed.
        hidden_fraction: Of the rows, that an epoch leaves out.
        own: What the caller of `trainer.train` would bring.
        cores_of: See `Nodes`.

    Raises:
        ConfigError: If the settings do not fit the probe's world.
        OracleError: If the probe is of fewer ranks than the job has on a node, or of other
            settings, or the job does not fit the cluster.
    """
    own_settings = step_settings(config)
    differ = [name for name, words in own_settings.items() if found.settings.get(name) != words]
    if differ:
        raise OracleError(
            f"the probe is of other settings: [{'], ['.join(differ)}] differ; probe with the same "
            "file and the same SECTION.KEY=VALUE"
        )
    layout = lay_out(config, found.world_size)
    cluster = cluster_of(found, cluster)
    machine, node_of = _place_on(found, cluster, cores_of)
    steps = programs(found.steps, found.world_size, layout.sizes)
    feeds, rows, source = {}, None, None
    if found.data is not None:
        ranks = range(found.world_size)
        readers = [rank for rank in ranks if build_place(config, layout, rank).reads]
        rows = lay_rows(
            config, found.data, readers=readers, node_of=node_of, own=own,
            pieces=found.data.pieces, guessed_row_bytes=found.data.guessed_row_bytes,
            memory_bytes=None if cluster is None else cluster.host.memory_bytes,
        )  # fmt: skip
        source = find_source(_storage(cluster), probed_bytes_per_s=found.data.staging_bytes_per_s)
        feeds = make_feeds(
            config, found.data, rows, machine, source=source, hidden_fraction=hidden_fraction,
            disk_bytes_per_s=_disk_bytes_per_s(cluster),
        )  # fmt: skip
    simulation = simulate(steps, machine, feeds=feeds, steps=STEPS)
    traces, untraced = _trace(config, found, own)
    _, dp_replicate, dp_shard, _, _ = layout.sizes
    num_rows = config.data.batch_size * config.optimizer.accumulate * dp_replicate * dp_shard
    epoch = None
    if found.data is not None and rows is not None and source is not None:
        epoch = _Epoch(config, found, found.data, layout, machine, rows, cluster, source).plan(
            simulation, traces, hidden_fraction
        )
    return StepPlan(
        step_s=simulation.step_s,
        low_s=min(simulation.steps_s),
        high_s=max(simulation.steps_s),
        parts_s=simulation.parts_s(),
        peak_bytes=tuple(trace.peak_bytes for trace in traces),
        untraced=untraced,
        samples_per_s=num_rows / simulation.step_s,
        simulation=simulation,
        epoch=epoch,
    )


def _place_on(
    found: Probe, cluster: Cluster | None, cores_of: tuple[int, ...]
) -> tuple[Machine, list[int]]:
    """Find the machine of a job, and the node of each of its ranks."""
    node = OneNode(found.inside, found.slowdowns, cores=found.cores)
    ranks = range(found.world_size)
    if cluster is None:
        if found.ranks != found.world_size:
            raise OracleError(
                f"the probe is of {found.ranks} ranks of a job of {found.world_size}; give "
                "--cluster FILE, which says how nodes are joined, start the probe on two nodes, or "
                f"with all {found.world_size} ranks on one"
            )
        return node, [0 for _ in ranks]
    cluster.num_nodes(found.world_size)
    here = min(cluster.ranks_per_node, found.world_size)
    if found.ranks < here:
        raise OracleError(
            f'the probe is of {found.ranks} ranks on a node, and a node of "{cluster.name}" has '
            f"{here}; start the probe with {here} on one"
        )
    return Nodes(cluster, node, cores_of=cores_of), [rank // here for rank in ranks]


@dataclass(frozen=True)
class _Epoch:
    """What an epoch is planned from; see `plan_step`."""

    config: Config
    found: Probe
    data: DataTimes
    layout: RunLayout
    machine: Machine
    rows: RowsOnNodes
    cluster: Cluster | None
    source: SourceRates

    def plan(
        self, simulation: Simulation, traces: Sequence[Trace], hidden_fraction: float
    ) -> PlannedEpoch:
        steps = self.rows.num_steps(self.config, hidden_fraction=hidden_fraction)
        first_s = simulation.step_ends_s[0] - simulation.step_s
        behind_s = simulation.behind_s / len(simulation.step_ends_s)
        evaluated = self.data.evaluated_rows * (2 if self.config.optimizer.ema else 1)
        hidden_rows = hidden_fraction * self.data.num_rows
        every = refresh_every(make_importance(self.config)) or 0
        timed = max(self.found.steps, key=lambda each: each.computing_s).step_s
        steps_s = steps * statistics.mean(simulation.steps_s) + max(first_s, 0.0)
        windows_s, read_bytes = self._windows(steps_s, hidden_fraction)
        staging_s, late_rows_s = self._staging_s(), 0.0
        if self.config.data.staging.when == "overlap":
            staging_s, late_rows_s = stage_beside(staging_s, steps_s=steps_s)
        return PlannedEpoch(
            steps=steps,
            train_s=steps_s + windows_s,
            windows_s=windows_s,
            read_bytes=read_bytes,
            exchange_s=steps * behind_s,
            epoch_end_s=self.data.epoch_end_s,
            refresh_s=self._scoring_s(hidden_rows) / every if every else 0.0,
            refresh_every=every,
            evaluation_s=self._scoring_s(evaluated),
            checkpoint_s=self._checkpoint_s(traces),
            checkpoint_every=self.config.run.checkpoint_epochs,
            spread=_spread(timed),
            staging_s=staging_s,
            late_rows_s=late_rows_s,
            unstaged_s=steps * self._unstaged_step_s() if self.rows.staged_bytes else 0.0,
            link_bytes=self.rows.leaving_bytes * self.rows.layout.widest,
            hidden_fraction=hidden_fraction,
            num_nodes=self.rows.layout.num_nodes,
        )

    def _scoring_s(self, num_rows: float) -> float:
        """Say how long it takes to pass rows forward, dealt out to all replicas."""
        if not num_rows:
            return 0.0
        share = num_rows / self.rows.layout.num_replicas
        batches = math.ceil(share / self.config.data.batch_size)
        one_by_one = replace(self.config, optimizer=replace(self.config.optimizer, accumulate=1))
        feeds = make_feeds(
            one_by_one, self.data, self.rows, self.machine, source=self.source, exchanges=False,
            disk_bytes_per_s=_disk_bytes_per_s(self.cluster),
        )  # fmt: skip
        steps = programs(self.found.evaluations, self.found.world_size, self.layout.sizes)
        shown = min(batches, STEPS)
        passes = simulate(steps, self.machine, feeds=feeds, steps=shown)
        return passes.step_ends_s[-1] + (batches - shown) * passes.step_s

    def _windows(self, steps_s: float, hidden_fraction: float) -> tuple[float, float]:
        """Price the rows beyond the quota: seconds that steps wait, and bytes of a node."""
        quota = self.rows.quota
        if quota is None or not quota.missing_rows:
            return 0.0, 0.0
        runs = list(quota.runs(visible_fraction=1 - hidden_fraction))
        num_nodes = self.rows.layout.num_nodes
        counts, shares, num_bytes = zip(*runs, strict=True) if runs else ((), (), ())
        reads_s = [self.source.seconds(one, num_nodes) for one in num_bytes]
        waits_s = wait_for_windows(shares, reads_s, steps_s=steps_s, counts=counts)
        return waits_s, sum(map(mul, counts, num_bytes))

    def _staging_s(self) -> float:
        return stage_s(
            _storage(self.cluster), self.source, self.rows,
            limit_bytes_per_s=self.config.data.staging.bytes_per_s,
        )  # fmt: skip

    def _unstaged_step_s(self) -> float:
        """Price a step of which every row is read from the source."""
        feeds = make_feeds(
            self.config, self.data, self.rows, self.machine, source=self.source, exchanges=False,
            staged=False,
        )  # fmt: skip
        steps = programs(self.found.steps, self.found.world_size, self.layout.sizes)
        return statistics.mean(simulate(steps, self.machine, feeds=feeds, steps=STEPS).steps_s)

    def _checkpoint_s(self, traces: Sequence[Trace]) -> float:
        run = self.config.run
        rate = self.data.write_bytes_per_s
        if self.cluster is not None and self.cluster.storage.write_gbyte_s is not None:
            rate = self.cluster.storage.write_gbyte_s * 1e9
        if not (run.checkpoint_epochs and traces and rate) or run.checkpoint_async:
            return 0.0
        # Copies of a part are written once
        pp, dp_replicate, *_ = self.layout.sizes
        of_stage = self.found.world_size // pp // dp_replicate
        return sum(trace.kept_bytes for trace in traces) * of_stage / rate / run.checkpoint_epochs


def _storage(cluster: Cluster | None) -> StorageRates:
    return StorageRates() if cluster is None else cluster.storage


def _disk_bytes_per_s(cluster: Cluster | None) -> float | None:
    rate = _storage(cluster).disk_read_gbyte_s
    return None if rate is None else rate * 1e9


def _spread(steps_s: Sequence[float]) -> tuple[float, float]:
    if len(steps_s) < 2:
        return 1.0, 1.0
    ends = statistics.quantiles(steps_s, n=10, method="inclusive")
    median = statistics.median(steps_s)
    return min(ends[0] / median, 1.0), max(ends[-1] / median, 1.0)


def _trace(config: Config, found: Probe, own: Own | None) -> tuple[tuple[Trace, ...], str]:
    """Trace the ranks that were timed; a model that cannot be traced has a time all the same."""
    try:
        return tuple(
            trace_step(config, world_size=found.world_size, rank=timed.rank, own=own)
            for timed in found.steps
        ), ""
    except ConfigError as error:
        return (), str(error)


def timeline(simulation: Simulation) -> dict[str, object]:
    """Lay the first steps out in Chrome's trace event format, which Perfetto opens.

    A row for each rank.
    """
    end_s = simulation.step_ends_s[:SHOWN_STEPS][-1]
    events = [
        {
            "name": span.name, "ph": "X", "pid": 0, "tid": span.rank, "ts": span.start_s * 1e6,
            "dur": (span.end_s - span.start_s) * 1e6,
            "cat": "compute" if span.name == "compute" else "wait",
        }
        for span in simulation.spans
        if span.end_s <= end_s
    ]  # fmt: skip
    names = [
        {"name": "thread_name", "ph": "M", "pid": 0, "tid": rank, "args": {"name": f"rank {rank}"}}
        for rank in sorted({span.rank for span in simulation.spans})
    ]
    return {"traceEvents": [*names, *events], "displayTimeUnit": "ms"}
