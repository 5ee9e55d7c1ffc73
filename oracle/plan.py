"""What a step of a job takes: time, and where it goes; memory."""

from dataclasses import dataclass

from oracle.errors import OracleError
from oracle.machine import OneNode
from oracle.probe.probe import Probe, step_settings
from oracle.programs import programs
from oracle.simulate import Simulation, simulate
from oracle.trace import trace_step
from trainer.config.config import Config
from trainer.errors import ConfigError
from trainer.run.build import lay_out
from trainer.run.own import Own

STEPS = 21
"""Simulated; the first one is not counted."""
SHOWN_STEPS = 3


@dataclass(frozen=True, kw_only=True)
class StepPlan:
    """A step as it would be.

    Attributes:
        step_s: Its time: the median of `STEPS` simulated ones.
        low_s: The shortest of them.
        high_s: The longest.
        parts_s: Of a rank's mean: computing, and waiting for each kind of message.
        peak_bytes: Of tensors, of a rank at each coordinate of pp; see `oracle.Trace`. Empty if
            the step cannot be made without data.
        untraced: Why it cannot; empty if it can.
        samples_per_s: Rows of all replicas.
        simulation: The steps in full.
    """

    step_s: float
    low_s: float
    high_s: float
    parts_s: dict[str, float]
    peak_bytes: tuple[int, ...]
    untraced: str
    samples_per_s: float
    simulation: Simulation


def plan_step(config: Config, found: Probe, *, own: Own | None = None) -> StepPlan:
    """Predict a step of a job on the node that was probed for it.

    Args:
        config: The settings that the probe was made with.
        found: Of all of the job's ranks.
        own: What the caller of `trainer.train` would bring.

    Raises:
        ConfigError: If the settings do not fit the probe's world.
        OracleError: If the probe is of fewer ranks than the job has, or of other settings.
    """
    own_settings = step_settings(config)
    differ = [name for name, words in own_settings.items() if found.settings.get(name) != words]
    if differ:
        raise OracleError(
            f"the probe is of other settings: [{'], ['.join(differ)}] differ; probe with the same "
            "file and the same SECTION.KEY=VALUE"
        )
    if found.ranks != found.world_size:
        raise OracleError(
            f"the probe is of {found.ranks} ranks of a job of {found.world_size}; several nodes "
            f"are not planned yet: start the probe with all {found.world_size} ranks on one"
        )
    layout = lay_out(config, found.world_size)
    _, dp_replicate, dp_shard, _, _ = layout.sizes
    peak_bytes, untraced = _peaks(config, found, own)
    machine = OneNode(found.messages, found.slowdowns, cores=found.cores)
    simulation = simulate(programs(found, layout.sizes), machine, steps=STEPS)
    rows = config.data.batch_size * config.optimizer.accumulate * dp_replicate * dp_shard
    return StepPlan(
        step_s=simulation.step_s,
        low_s=min(simulation.steps_s),
        high_s=max(simulation.steps_s),
        parts_s=simulation.parts_s(),
        peak_bytes=peak_bytes,
        untraced=untraced,
        samples_per_s=rows / simulation.step_s,
        simulation=simulation,
    )


def _peaks(config: Config, found: Probe, own: Own | None) -> tuple[tuple[int, ...], str]:
    """Trace the ranks that were timed; a model that cannot be traced has a time all the same."""
    try:
        return tuple(
            trace_step(config, world_size=found.world_size, rank=timed.rank, own=own).peak_bytes
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
