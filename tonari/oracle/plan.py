"""What a job takes: a step, where its time goes, memory; an epoch, and what comes before."""

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from tonari.oracle.cluster.cluster import Cluster, StorageRates
from tonari.oracle.cluster.machine import Nodes
from tonari.oracle.cluster.probed import cluster_of
from tonari.oracle.costs import Machine
from tonari.oracle.epoch import STEPS, FedJob, PlannedEpoch
from tonari.oracle.errors import OracleError
from tonari.oracle.feeds import lay_rows
from tonari.oracle.gradients import GradientPlan, plan_gradients
from tonari.oracle.machine import OneNode
from tonari.oracle.probe.data import reads
from tonari.oracle.probe.probe import Probe, step_settings
from tonari.oracle.programs import programs
from tonari.oracle.record import Message
from tonari.oracle.simulate import Simulation, simulate
from tonari.oracle.trace import Trace, trace_step
from tonari.oracle.traffic import axes_of
from tonari.trainer.config.config import Config
from tonari.trainer.errors import ConfigError
from tonari.trainer.run.build import RunLayout, lay_out, make_without_data
from tonari.trainer.run.own import Own, own_of

SHOWN_STEPS = 3


@dataclass(frozen=True, kw_only=True)
class StepPlan:
    """A step as it would be.

    Attributes:
        step_s: Its time: the median of `STEPS` simulated ones.
        low_s: The shortest of them.
        high_s: The longest.
        parts_s: Of a rank's mean: computing, waiting for data, and for each kind of message.
        peak_bytes: Of tensors, of the ranks that were timed, by coordinate of pp and tile; see
            `oracle.Trace`. Empty if the step cannot be made without data.
        untraced: Why it cannot; empty if it can.
        samples_per_s: Rows of all replicas.
        simulation: The steps in full.
        epoch: None: the probe did not time the loader.
        tiles: What the same ranks exchange between tiles of their samples; empty: there are none.
        gradients: Ways to average gradients over replicas on several nodes; empty: there are none,
            or none but one goes with the settings.
    """

    step_s: float
    low_s: float
    high_s: float
    parts_s: dict[str, float]
    peak_bytes: tuple[int, ...]
    untraced: str
    samples_per_s: float
    simulation: Simulation
    epoch: PlannedEpoch | None
    tiles: tuple["TilePlan", ...] = ()
    gradients: tuple[GradientPlan, ...] = ()


@dataclass(frozen=True, kw_only=True)
class TilePlan:
    """What the layers of a rank exchange with those of the other tiles of its samples, in a step.

    Attributes:
        rank: Which.
        messages: That it sends: halos, and their gradients.
        sent_bytes: Of these.
        sending_s: That they take on their links, one after another and beside nothing else.
        sums: Over all tiles, such as those of norms and losses.
        summed_bytes: Of these.
        kept_row_bytes: Of its tile of a sample, in the cache; 0: the probe did not time the loader.
        read_row_bytes: Read from the source for that.
    """

    rank: int
    messages: int
    sent_bytes: int
    sending_s: float
    sums: int
    summed_bytes: int
    kept_row_bytes: float
    read_row_bytes: float


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
            settings or another device, or the job does not fit the cluster.
    """
    own_settings = step_settings(config)
    differ = [name for name, words in own_settings.items() if found.settings.get(name) != words]
    if differ:
        raise OracleError(
            f"the probe is of other settings: [{'], ['.join(differ)}] differ; probe with the same "
            "file and the same SECTION.KEY=VALUE"
        )
    if config.run.device != "auto" and (config.run.device == "cuda") != bool(found.gpu):
        raise OracleError(
            f'run.device is "{config.run.device}", and the probe is of steps on '
            f"{found.gpu or 'the host'}; probe with the same run.device, where there is such a one"
        )
    layout = lay_out(config, found.world_size)
    cluster = cluster_of(found, cluster)
    machine, node_of = _place_on(found, cluster, cores_of)
    steps = programs(found.steps, found.world_size, layout.sizes)
    storage = StorageRates() if cluster is None else cluster.storage
    job = None
    if found.data is not None:
        ranks = range(found.world_size)
        readers = [rank for rank in ranks if reads(config, layout, rank, own)]
        rows = lay_rows(
            config, found.data, readers=readers, node_of=node_of, own=own,
            memory_bytes=None if cluster is None else cluster.host.memory_bytes,
        )  # fmt: skip
        job = FedJob(
            config=config, data=found.data, rows=rows, machine=machine, storage=storage,
            steps=steps, evaluations=programs(found.evaluations, found.world_size, layout.sizes),
            hidden_fraction=hidden_fraction,
        )  # fmt: skip
    simulation = job.simulate() if job else simulate(steps, machine, steps=STEPS)
    traces, untraced = _trace(config, found, own)
    epoch = None
    if job:
        timed = max(found.steps, key=lambda each: each.computing_s).step_s
        epoch = job.plan(
            simulation, checkpoint_s=_checkpoint_s(job, layout.sizes, traces),
            unstaged_s=job.unstaged_s(), spread=_spread(timed),
        )  # fmt: skip
    _, dp_replicate, dp_shard, _, _ = layout.sizes
    num_rows = config.data.batch_size * config.optimizer.accumulate * dp_replicate * dp_shard
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
        tiles=_plan_tiles(found, machine, layout.sizes) if config.mesh.tiles else (),
        gradients=_plan_gradients(config, machine, layout, own) if len(set(node_of)) > 1 else (),
    )


def _plan_gradients(
    config: Config, machine: Machine, layout: RunLayout, own: Own | None
) -> tuple[GradientPlan, ...]:
    others = layout.sizes[0] * layout.sizes[3] * layout.sizes[4]
    if layout.sizes[1] == 1 or others > 1 or config.mesh.offload or config.run.live:
        return ()
    try:
        model = make_without_data(config, layout, own_of(config, own))
    except ConfigError:
        return ()
    return plan_gradients(model, config.optimizer, machine, layout.sizes)


def _plan_tiles(found: Probe, machine: Machine, sizes: Sequence[int]) -> tuple[TilePlan, ...]:
    data = found.data
    plans = []
    for timed in found.steps:
        between = [
            event
            for event in timed.events
            if isinstance(event, Message) and axes_of(event.ranks, sizes) == ("cp",)
        ]
        sends = [each for each in between if each.kind == "send"]
        sums = [each for each in between if each.kind == "all_reduce"]
        plans.append(TilePlan(
            rank=timed.rank,
            messages=len(sends),
            sent_bytes=sum(each.num_bytes for each in sends),
            sending_s=sum(
                machine.message("send", (timed.rank, each.peer or 0), each.num_bytes).seconds
                for each in sends
            ),
            sums=len(sums),
            summed_bytes=sum(each.num_bytes for each in sums),
            kept_row_bytes=data.row_bytes if data else 0.0,
            read_row_bytes=data.source_row_bytes if data else 0.0,
        ))  # fmt: skip
    return tuple(plans)


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


def _checkpoint_s(job: FedJob, sizes: Sequence[int], traces: Sequence[Trace]) -> float:
    """Price the checkpoints of an epoch for which training waits, on average."""
    run, rate = job.config.run, job.data.write_bytes_per_s
    if job.storage.write_gbyte_s is not None:
        rate = job.storage.write_gbyte_s * 1e9
    if not (run.checkpoint_epochs and traces and rate) or run.checkpoint_async:
        return 0.0
    # Copies of a part are written once; of several tiles' ranks, each was traced
    of_stage = math.prod(sizes[2:]) * sizes[0] / len(traces)
    return sum(trace.kept_bytes for trace in traces) * of_stage / rate / run.checkpoint_epochs


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
