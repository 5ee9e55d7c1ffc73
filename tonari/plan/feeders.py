"""`tonari plan --feeders`: whether nodes that decode for those that train pay."""

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from tonari.oracle.errors import OracleError
from tonari.report.tables import Table
from tonari.sizes import format_bytes

if TYPE_CHECKING:
    from tonari.oracle.cluster.cluster import Cluster
    from tonari.oracle.probe.probe import Probe
    from tonari.plan.choice import Choice

OF_STEP = "the step"
SMALL = 0.02
"""Of a step: a wait for data that is not worth a node."""


@dataclass(frozen=True, kw_only=True)
class WithFeeders:
    """A job's step with some feeders.

    Attributes:
        feeders: Nodes.
        step_s: The step.
        batch_s: A batch of a reading rank, where nobody trains.
        fraction: Of the rows, what feeders make.
        sent_bytes_per_s: To feeders, by a node that trains.
        received_bytes_per_s: From them.
        bottleneck: What batches wait for, ``threads``, ``feeders`` or ``link``; or ``the step``.
    """

    feeders: int
    step_s: float
    batch_s: float
    fraction: float
    sent_bytes_per_s: float
    received_bytes_per_s: float
    bottleneck: str


def plan_feeders(
    choice: "Choice", *, most: int, cores: int | None, cluster: "Cluster | Probe | None",
    hidden_fraction: float,
) -> list[WithFeeders]:  # fmt: skip
    """Plan a job with 0 to ``most`` feeders.

    Args:
        choice: The job.
        most: Feeders.
        cores: Of each; None: as many as the ranks of a node may use.
        cluster: As of `tonari.oracle.plan.plan_step`.
        hidden_fraction: Of the rows, that an epoch leaves out.

    Raises:
        OracleError: If the probe did not time what feeders cost.
    """
    from tonari.oracle.cluster.probed import cluster_of
    from tonari.oracle.feeders import fed_batch
    from tonari.oracle.plan import plan_step

    data, config = choice.probe.data, choice.config
    if data is None or data.trade_row_s is None or data.made_row_bytes is None:
        raise OracleError(
            "--feeders: the probe did not time what it costs to send rows, expected one of this "
            "version, with data; run tonari probe again"
        )
    joined = cluster_of(choice.probe, cluster)
    level = joined.level[1] if joined is not None and len(joined.level) > 1 else None
    link = 1e9 * (level.gbyte_s or float("inf")) if level is not None else float("inf")
    num_nodes = max(choice.probe.world_size // choice.probe.ranks, 1)
    rows, accumulate = config.data.batch_size, config.optimizer.accumulate
    found: list[WithFeeders] = []
    for feeders in range(most + 1):
        fed = fed_batch(
            rows, make_s=data.core_s(batch_size=rows), trade_s=data.trade_row_s,
            threads=data.batch_cores,
            cores=feeders * (cores or choice.probe.cores) / (num_nodes * data.readers),
            sent_bytes=data.row_bytes, received_bytes=data.made_row_bytes,
            link_bytes_per_s=link / data.readers,
        )  # fmt: skip
        probe = replace(choice.probe, data=replace(data, batch_s=fed.batch_s))
        plan = plan_step(config, probe, cluster=cluster, hidden_fraction=hidden_fraction)
        if found and found[0].bottleneck == OF_STEP:
            fed = replace(fed, batch_s=found[0].batch_s, fraction=0.0)  # none is sent
        fed_rows = fed.fraction * rows * accumulate * data.readers / plan.step_s
        waits = plan.parts_s.get("data", 0.0) > SMALL * plan.step_s
        found.append(WithFeeders(
            feeders=feeders, step_s=plan.step_s, batch_s=fed.batch_s, fraction=fed.fraction,
            sent_bytes_per_s=fed_rows * data.row_bytes,
            received_bytes_per_s=fed_rows * data.made_row_bytes,
            bottleneck=fed.bottleneck if waits else OF_STEP,
        ))  # fmt: skip
    return found


def feeder_words(found: list[WithFeeders]) -> list[str]:
    """Describe them in lines."""
    table = Table(
        ("feeders", "a step", "a batch", "of its rows", "sent a second", "received", "waits for"),
        [
            (
                str(each.feeders), f"{each.step_s:.3f} s", f"{each.batch_s:.3f} s",
                f"{each.fraction:.0%}", format_bytes(round(each.sent_bytes_per_s)),
                format_bytes(round(each.received_bytes_per_s)), each.bottleneck,
            )
            for each in found
        ],
        title="With feeders; bytes are those of a node that trains",
    )  # fmt: skip
    best = min(found, key=lambda each: (round(each.step_s / found[0].step_s, 2), each.feeders))
    words = f"{best.feeders} of them make a step {1 - best.step_s / found[0].step_s:.0%} shorter"
    return ["", *table.text(), "", words if best.feeders else "feeders do not pay for this job"]
