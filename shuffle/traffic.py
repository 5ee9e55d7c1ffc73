"""What an exchange costs at any scale, from the plan of one replica: no row is moved."""

from dataclasses import dataclass

from dataio.plan.epoch import Counts, find_sampling_groups, plan_epoch
from dataio.plan.layout import Layout
from dataio.plan.policies import Selection
from shuffle.plan import leaving_slots, num_leaving
from shuffle.ring import crossing_fraction
from shuffle.schedule import Leg, plan_legs

BLOCK_STEPS = 256


@dataclass(frozen=True)
class ReplicaPlan:
    """One replica's epoch, as it would be trained and exchanged.

    Attributes:
        num_leaving: Rows that it gives, and takes.
        steps: Batches.
        legs: Messages that it sends, and as many receives.
    """

    num_leaving: int
    steps: int
    legs: list[Leg]


def plan_replica(
    layout: Layout,
    *,
    replica: int,
    exchange: float,
    seed: int,
    epoch: int,
    batch_size: int,
    mean_row_bytes: int,
) -> ReplicaPlan:
    """Decide all that a replica decides in an epoch: every batch, every leaving row, every message.

    Raises:
        ExchangeError: If its rows make more messages than an exchange can have.
    """
    sampling = find_sampling_groups(layout, replica=replica, holds_all=False)
    order = plan_epoch(
        sampling,
        Selection(),
        Counts(sampling.sizes, sampling.sizes),
        stream=sampling.stream(seed, "order", epoch=epoch),
        batch_size=batch_size,
    ).order
    leaving, legs = num_leaving(layout, exchange), list[Leg]()
    if leaving:
        legs = plan_legs(
            layout,
            replica=replica,
            num_leaving=leaving,
            seed=seed,
            epoch=epoch,
            steps=range(order.steps),
            mean_row_bytes=mean_row_bytes,
            first_tag=0,
        )
        leaving_slots(layout, replica=replica, num_leaving=leaving, seed=seed, epoch=epoch)
    for step in range(0, order.steps, BLOCK_STEPS):
        order.block(step, min(BLOCK_STEPS, order.steps - step))
    return ReplicaPlan(leaving, order.steps, legs)


@dataclass(frozen=True)
class ExchangeTraffic:
    """What an epoch's exchange costs, for rows of one size.

    Attributes:
        num_leaving: Rows that every rank gives and takes.
        crossing_fraction: Share of them that changes node, in [0, 1].
        steps: Steps of the epoch.
        rank_bytes: Sent by every rank, and received.
        node_bytes: That leave the node with the most ranks over its link, and as many come in.
        num_messages: Sent by every rank, and received.
        message_bytes: The largest of them.
        storage_bytes: On the node with the most rows, with room for arrivals: (1 + 2Q) of its pool.
    """

    num_leaving: int
    crossing_fraction: float
    steps: int
    rank_bytes: int
    node_bytes: int
    num_messages: int
    message_bytes: int
    storage_bytes: int


def count_traffic(layout: Layout, plan: ReplicaPlan, *, row_bytes: int) -> ExchangeTraffic:
    """Count what a plan moves; it is the same on every replica.

    Args:
        layout: Replicas and samples.
        plan: Of any replica.
        row_bytes: Size of a row.
    """
    crossing = crossing_fraction(layout)
    # The room that a node's cache has for arrivals: of this epoch, and of the one before
    spare = 2 * plan.num_leaving * layout.widest
    return ExchangeTraffic(
        num_leaving=plan.num_leaving,
        crossing_fraction=crossing,
        steps=plan.steps,
        rank_bytes=plan.num_leaving * row_bytes,
        node_bytes=round(plan.num_leaving * layout.widest * crossing * row_bytes),
        num_messages=len(plan.legs),
        message_bytes=max((leg.stop - leg.start for leg in plan.legs), default=0) * row_bytes,
        storage_bytes=(int(layout.pool_sizes.max()) + spare) * row_bytes,
    )
