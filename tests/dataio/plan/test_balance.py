"""Rows that cost differently: steps and replicas cost alike, and every row comes once."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from dataio.base.seeding import key
from dataio.plan.order import Groups, Order, deal, num_steps, stage_groups
from dataio.plan.replay import trained_slots
from dataio.source.wrap.packing import Packing, attention_costs, pack

Ints = NDArray[np.int64]

LINEAR = 574.0
"""What the products of a layer of width 768 cost, where attention to 4096 tokens costs 255."""


def deal_out(
    visible: Ints | range, costs: NDArray[np.uint8] | None, *, replicas: int, batch_size: int,
    groups: Groups | None = None, epoch: int = 0,
) -> list[Order]:  # fmt: skip
    dealt = deal(len(visible), replicas)
    steps, stream = num_steps(dealt, batch_size), key(0, "order", epoch=epoch)
    return [
        Order(visible, stream, dealt, place, batch_size, steps, groups, costs)
        for place in range(replicas)
    ]


def step_rows(orders: list[Order], step: int) -> Ints:
    """Find the slots that all replicas train in a step."""
    batches = [order.batch(step) for order in orders]
    return np.concatenate([batch.slots[: batch.num_valid] for batch in batches])


@st.composite
def unequal(draw):
    num_rows = draw(st.integers(1, 200))
    visible = np.flatnonzero(draw(st.lists(st.booleans(), min_size=num_rows, max_size=num_rows)))
    # Few values, so that many rows cost alike.
    most = draw(st.sampled_from([0, 3, 255]))
    rng = np.random.default_rng(draw(st.integers(0, 99)))
    costs = rng.integers(0, most + 1, num_rows).astype(np.uint8)
    return visible, costs, draw(st.integers(1, 4)), draw(st.integers(1, 9))


@given(unequal(), st.booleans())
def test_every_row_comes_once_and_a_step_has_one_of_each_level(case, is_grouped):
    visible, costs, replicas, batch_size = case
    groups = stage_groups(len(costs), key(0, "stage"), most=3) if is_grouped else None
    orders = deal_out(
        visible, costs[visible], replicas=replicas, batch_size=batch_size, groups=groups
    )
    trained = [step_rows(orders, step) for step in range(orders[0].steps)]
    assert sorted(np.concatenate([np.empty(0, np.int64), *trained]).tolist()) == visible.tolist()
    for steps in range(orders[0].steps + 1):
        before = np.concatenate([np.empty(0, np.int64), *trained[:steps]])
        assert sorted(trained_slots(orders[0], steps)) == sorted(before)
    whole = len(visible) // (replicas * batch_size)
    if is_grouped or not whole:
        return
    # int64[whole, levels]: each step's costs, ascending.
    ranked = np.array([np.sort(costs[rows]) for rows in trained[:whole]]).reshape(whole, -1)
    highest, lowest = ranked.max(axis=0), ranked.min(axis=0)
    assert (highest[:-1] <= lowest[1:]).all(), "no row of a level costs more than one of the next"


@given(unequal())
def test_a_step_trains_the_same_rows_however_many_replicas_share_them(case):
    visible, costs, _, batch_size = case
    one = deal_out(visible, costs[visible], replicas=1, batch_size=batch_size * 6)
    for replicas in (2, 3, 6):
        many = deal_out(
            visible, costs[visible], replicas=replicas, batch_size=batch_size * 6 // replicas
        )
        for step in range(one[0].steps):
            assert sorted(step_rows(many, step)) == sorted(step_rows(one, step))


@given(unequal())
def test_rows_of_a_group_that_is_staged_later_come_later(case):
    visible, costs, replicas, batch_size = case
    groups = stage_groups(len(costs), key(0, "stage"), most=4)
    orders = deal_out(
        visible, costs[visible], replicas=replicas, batch_size=batch_size, groups=groups
    )
    number = np.empty(len(costs), np.int64)
    for place, (start, stop) in enumerate(groups.bounds.tolist()):
        number[start:stop] = place
    for order in orders:
        came = number[order.slots_at(np.arange(order.num_rows))]
        assert (np.diff(came) >= 0).all()


@pytest.mark.parametrize("nodes", [[1] * 8, [8], [2] * 4, [4, 4]])
@pytest.mark.parametrize("packing", ["best_fit", "concatenated"])
def test_replicas_cost_alike_in_every_step(nodes: list[int], packing: Packing):
    rng = np.random.default_rng(1)
    lengths = np.maximum(rng.lognormal(6, 1.2, 40_000), 1).astype(np.int64)
    pieces = pack(lengths, length=4096, packing=packing)
    costs = rng.permutation(attention_costs(pieces, length=4096))
    batch_size, steps, first = 8, len(costs) // 64, 0
    each: dict[bool, list[NDArray[np.float64]]] = {False: [], True: []}
    for node, replicas in enumerate(nodes):
        own = costs[first : (first := first + replicas * steps * batch_size)]
        for is_balanced in each:
            orders = deal_out(
                range(len(own)), own if is_balanced else None, replicas=replicas,
                batch_size=batch_size, epoch=node,
            )  # fmt: skip
            trained = [own[order.block(0, steps)[0]] for order in orders]
            each[is_balanced] += [(LINEAR + cost).sum(axis=1) for cost in trained]
    balanced, shuffled = np.array(each[True]), np.array(each[False])

    def excess(of: NDArray[np.float64]) -> float:
        """How much more the dearest replica of a step costs than the mean, on average."""
        return float((of.max(axis=0) / of.mean(axis=0)).mean()) - 1

    assert excess(shuffled) > 0.04
    assert excess(balanced) < 0.01
    # Also in the epoch, and a step beside the others.
    assert excess(balanced.sum(axis=1, keepdims=True)) < 0.005
    assert np.std(balanced.mean(axis=0)) < np.std(shuffled.mean(axis=0)) / 3


def test_epochs_differ_and_a_row_comes_anywhere():
    costs = np.arange(240).astype(np.uint8)
    came = [
        np.argsort(
            deal_out(range(240), costs, replicas=2, batch_size=3, epoch=epoch)[0].slots_in_run(
                np.arange(240)
            )
        )
        // 6
        for epoch in range(300)
    ]
    # int64[epochs, rows]: the step in which each row came, of 40.
    counts = np.array([np.bincount(steps, minlength=40) for steps in np.array(came).T])
    expected = 300 / 40
    chi = ((counts - expected) ** 2 / expected).sum(axis=1)
    # 39 degrees of freedom: of 240 rows none is far from uniform, and the mean is near 39.
    assert chi.max() < 90
    assert abs(chi.mean() - 39) < 3


def test_no_replica_always_gets_the_dearest_row_of_a_step():
    costs = np.random.default_rng(2).integers(0, 256, 400).astype(np.uint8)
    first, second = (
        costs[order.block(0, 200)[0]][:, 0]
        for order in deal_out(range(400), costs, replicas=2, batch_size=1)
    )
    assert 80 < (first > second).sum() < 120
