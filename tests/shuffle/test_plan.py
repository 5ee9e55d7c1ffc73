"""Rows that really move, array by array, against the placement that is only computed."""

import hashlib
import tracemalloc
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from dataio.plan.layout import Layout
from shuffle.plan import (
    chunk_bounds,
    chunk_step,
    homes_before,
    leaving_slots,
    num_chunks,
    num_leaving,
    parcel_bounds,
    placement,
    trace,
    trace_homes,
)
from shuffle.ring import make_ring, partners
from shuffle.schedule import plan_legs

REPLICAS = st.one_of(
    st.sampled_from([(1,), (4,), (2, 2), (4, 3, 1), (3, 2, 2), (1, 1, 1, 1, 1), (5, 1)]),
    st.lists(st.integers(1, 4), min_size=1, max_size=5).map(tuple),
)
LAYOUTS = st.builds(
    lambda replicas, more: Layout(replicas, sum(replicas) + more), REPLICAS, st.integers(0, 300)
)
EXCHANGES = st.one_of(st.floats(0, 1), st.sampled_from([0.0, 0.1, 0.29, 1.0]))
SEEDS = st.integers(0, 2**32)
EPOCHS = st.integers(0, 12)

Pools = list[NDArray[np.int64]]


def first_pools(layout: Layout) -> Pools:
    starts = [layout.pool_start(node) for node in range(layout.num_nodes + 1)]
    return [np.arange(*bounds) for bounds in pairwise(starts)]


def moved(layout: Layout, pools: Pools, *, exchange: float, seed: int, epoch: int) -> Pools:
    """Carry out one epoch's exchange: every replica hands its leavers to its partners."""
    leaving = num_leaving(layout, exchange)
    bounds = chunk_bounds(leaving)
    after = [pool.copy() for pool in pools]
    slots = [
        leaving_slots(layout, replica=replica, num_leaving=leaving, seed=seed, epoch=epoch)
        for replica in range(layout.num_replicas)
    ]
    for replica in range(layout.num_replicas):
        for chunk in range(num_chunks(leaving)):
            dest, _ = partners(layout, seed=seed, epoch=epoch, chunk=chunk, replica=replica)
            rows = slice(bounds[chunk], bounds[chunk + 1])
            sent = pools[layout.node_of(replica)][slots[replica][rows]]
            after[layout.node_of(dest)][slots[dest][rows]] = sent
    return after


@settings(deadline=None)
@given(LAYOUTS, EXCHANGES, SEEDS, EPOCHS)
def test_every_row_that_leaves_arrives_once(
    layout: Layout, exchange: float, seed: int, epoch: int
) -> None:
    before = first_pools(layout)
    after = moved(layout, before, exchange=exchange, seed=seed, epoch=epoch)
    assert sorted(np.concatenate(after).tolist()) == list(range(layout.num_samples))
    assert [len(pool) for pool in after] == [len(pool) for pool in before]


@settings(deadline=None)
@given(LAYOUTS, EXCHANGES, SEEDS, EPOCHS)
def test_placement_is_what_moving_the_rows_gives(
    layout: Layout, exchange: float, seed: int, epochs: int
) -> None:
    pools = first_pools(layout)
    for epoch in range(epochs + 1):
        for node, pool in enumerate(pools):
            found = placement(layout, node=node, exchange=exchange, seed=seed, epoch=epoch)
            assert found.tolist() == pool.tolist(), f"node {node}, epoch {epoch}"
        pools = moved(layout, pools, exchange=exchange, seed=seed, epoch=epoch)


@pytest.mark.parametrize("num_samples", [1000, 1003])
def test_placement_of_shares_too_large_to_sort_is_what_moving_gives(num_samples: int) -> None:
    layout, pools = Layout((3, 2, 2), num_samples), first_pools(Layout((3, 2, 2), num_samples))
    for epoch in range(4):
        pools = moved(layout, pools, exchange=0.4, seed=5, epoch=epoch)
    for node, pool in enumerate(pools):
        found = placement(layout, node=node, exchange=0.4, seed=5, epoch=4)
        assert found.tolist() == pool.tolist()


@settings(deadline=None)
@given(LAYOUTS, EXCHANGES, SEEDS, EPOCHS, st.data())
def test_trace_of_some_slots_is_a_part_of_the_placement(
    layout: Layout, exchange: float, seed: int, epoch: int, data: st.DataObject
) -> None:
    node = data.draw(st.integers(0, layout.num_nodes - 1))
    slots = data.draw(st.lists(st.integers(0, layout.pool_rows(node) - 1), max_size=8))
    whole = placement(layout, node=node, exchange=exchange, seed=seed, epoch=epoch)
    part = trace(layout, node=node, slots=slots, exchange=exchange, seed=seed, epoch=epoch)
    assert part.tolist() == whole[np.array(slots, np.int64)].tolist()


@given(LAYOUTS, EXCHANGES, SEEDS, EPOCHS)
def test_leaving_slots_are_distinct_and_of_the_replicas_share(
    layout: Layout, exchange: float, seed: int, epoch: int
) -> None:
    leaving = num_leaving(layout, exchange)
    for replica in range(layout.num_replicas):
        slots = leaving_slots(layout, replica=replica, num_leaving=leaving, seed=seed, epoch=epoch)
        start, stop = layout.share_slots(replica)
        assert len(set(slots.tolist())) == leaving
        assert all(start <= slot < stop for slot in slots)


@pytest.mark.parametrize("share_rows", [5, 40, 100])
def test_every_slot_leaves_about_equally_often(share_rows: int) -> None:
    layout, leaving, epochs = Layout((2, 1), 3 * share_rows), share_rows // 5, 600
    times = np.zeros(share_rows)
    for epoch in range(epochs):
        slots = leaving_slots(layout, replica=1, num_leaving=leaving, seed=0, epoch=epoch)
        times[slots - share_rows] += 1
    # Binomial with mean 120 and deviation below 10: five deviations either way
    assert np.abs(times - 120).max() < 50


@pytest.mark.parametrize("share_rows", [5, 40, 100])
def test_two_replicas_choose_slots_independently(share_rows: int) -> None:
    layout, leaving, epochs = Layout((1, 1), 2 * share_rows), share_rows // 5, 600
    both = 0
    for epoch in range(epochs):
        one, other = (
            leaving_slots(layout, replica=replica, num_leaving=leaving, seed=0, epoch=epoch)
            for replica in range(2)
        )
        both += len(np.intersect1d(one, other))
    # A fifth of a fifth of the slots, were the choices independent
    assert both / epochs == pytest.approx(share_rows / 25, rel=0.25)


@pytest.mark.parametrize("share_rows", [40, 100])
def test_rows_that_left_together_once_are_not_bound_to_each_other(share_rows: int) -> None:
    layout, epochs = Layout((1, 1), 2 * share_rows), 50
    gaps = set()
    for epoch in range(epochs):
        slots = leaving_slots(layout, replica=0, num_leaving=8, seed=0, epoch=epoch)
        gaps.add(tuple((slots - slots[0]) % share_rows))
    assert len(gaps) == epochs, "the same rows leave together, only turned around the share"


@pytest.mark.parametrize("replicas", [(2, 2), (4, 3, 1), (1, 1, 1, 1, 1), (3, 2, 2), (5, 1)])
def test_every_node_comes_to_hold_rows_of_every_other(replicas: tuple[int, ...]) -> None:
    layout = Layout(replicas, 100 * sum(replicas) + 1)
    first = np.searchsorted(
        [layout.pool_start(node) for node in range(1, layout.num_nodes)],
        np.arange(layout.num_samples),
        side="right",
    )
    expected = np.bincount(first) / layout.num_samples
    for node in range(layout.num_nodes):
        rows = placement(layout, node=node, exchange=0.3, seed=0, epoch=30)
        found = np.bincount(first[rows], minlength=layout.num_nodes) / len(rows)
        # Origins as in the dataset: 5 deviations of a sample of this size
        assert np.abs(found - expected).max() < 5 * (0.25 / len(rows)) ** 0.5


def test_rows_that_began_together_part() -> None:
    layout = Layout((1,) * 8, 8 * 64)
    rows = [placement(layout, node=node, exchange=0.3, seed=0, epoch=30) for node in range(8)]
    shares = np.array([np.bincount(row // 64, minlength=8) for row in rows])
    assert shares.max() < 25, "8 of each share's 64 rows are expected on each node"


@given(LAYOUTS, EXCHANGES)
def test_num_leaving_never_exceeds_the_smallest_share(layout: Layout, exchange: float) -> None:
    leaving = num_leaving(layout, exchange)
    assert 0 <= leaving <= layout.num_samples // layout.num_replicas
    if layout.num_nodes == 1:
        assert leaving == 0


@pytest.mark.parametrize(
    ("exchange", "expected"), [(0, 0), (0.29, 29), (0.1, 10), (0.999, 99), (1, 100)]
)
def test_num_leaving_reads_the_fraction_as_a_decimal(exchange: float, expected: int) -> None:
    assert num_leaving(Layout((1, 1), 201), exchange) == expected


@pytest.mark.parametrize("exchange", [-0.1, 1.1, float("nan")])
def test_an_exchange_outside_its_range_is_refused(exchange: float) -> None:
    with pytest.raises(ValueError, match=r"exchange is .*, expected a share in \[0, 1\]; 0.1"):
        num_leaving(Layout((1, 1), 10), exchange)


def test_more_leaving_rows_than_the_share_has_are_refused() -> None:
    with pytest.raises(ValueError, match=r"replica 1: num_leaving is 6, its share has 5 rows"):
        leaving_slots(Layout((1, 1), 10), replica=1, num_leaving=6, seed=0, epoch=0)


@pytest.mark.parametrize("slots", [[-1], [5]])
def test_a_slot_outside_the_pool_is_refused(slots: list[int]) -> None:
    with pytest.raises(ValueError, match=r"node 1: a slot lies outside its pool \[0, 5\)"):
        trace(Layout((1, 1), 10), node=1, slots=slots, exchange=0.5, seed=0, epoch=0)


def assert_even(bounds: NDArray[np.int64], num_rows: int) -> None:
    sizes = np.diff(bounds)
    assert bounds[[0, -1]].tolist() == [0, num_rows]
    assert sizes.size == 0 or (sizes.min() >= 1 and sizes.max() - sizes.min() <= 1)


@given(st.integers(0, 10_000))
def test_chunks_cut_the_leaving_rows_evenly(leaving: int) -> None:
    assert_even(chunk_bounds(leaving), leaving)
    assert num_chunks(leaving) == len(chunk_bounds(leaving)) - 1 <= 16
    assert (num_chunks(leaving) == 0) == (leaving == 0)


@given(st.integers(0, 1000), st.integers(1, 500), st.integers(1, 5000))
def test_parcels_are_as_few_as_the_bound_allows(
    num_rows: int, mean_row_bytes: int, max_parcel_bytes: int
) -> None:
    bounds = parcel_bounds(
        num_rows, mean_row_bytes=mean_row_bytes, max_parcel_bytes=max_parcel_bytes
    )
    assert_even(bounds, num_rows)
    largest = np.diff(bounds).max(initial=1)
    assert largest == 1 or largest * mean_row_bytes <= max_parcel_bytes
    if len(bounds) > 2:
        rows_of_one_less = -(-num_rows // (len(bounds) - 2))
        assert rows_of_one_less * mean_row_bytes > max_parcel_bytes


@given(st.integers(1, 16), st.integers(0, 50), st.integers(1, 100))
def test_chunks_are_spread_over_the_steps_that_remain(
    chunks: int, first: int, num_steps: int
) -> None:
    steps = range(first, first + num_steps)
    found = [chunk_step(chunk, chunks, steps) for chunk in range(chunks)]
    assert found == sorted(found)
    assert found[0] == first
    assert set(found) <= set(steps)
    per_step = np.bincount(np.array(found) - first, minlength=num_steps)
    assert per_step.max() <= -(-chunks // num_steps)


def test_without_a_step_left_chunks_are_sent_at_once() -> None:
    assert [chunk_step(chunk, 3, range(7, 7)) for chunk in range(3)] == [7, 7, 7]


@settings(deadline=None)
@given(LAYOUTS, EXCHANGES, SEEDS, EPOCHS)
def test_many_homes_are_followed_like_each_by_itself(
    layout: Layout, exchange: float, seed: int, epoch: int
) -> None:
    leaving = num_leaving(layout, exchange)
    if leaving == 0:
        return
    homes = np.resize(np.arange(layout.num_samples), 2 * max(leaving, layout.num_samples))
    many = homes_before(layout, homes, num_leaving=leaving, seed=seed, epoch=epoch)
    for home in range(0, layout.num_samples, 1 + layout.num_samples // 5):
        one = np.array([home])
        alone = homes_before(layout, one, num_leaving=leaving, seed=seed, epoch=epoch)
        assert many[home] == many[home + layout.num_samples] == alone[0]


@settings(deadline=None)
@given(LAYOUTS, EXCHANGES, SEEDS, EPOCHS)
def test_many_rows_are_traced_back_like_each_by_itself(
    layout: Layout, exchange: float, seed: int, epoch: int
) -> None:
    homes = np.resize(np.arange(layout.num_samples), 3 * layout.num_samples + 1)
    many = trace_homes(layout, homes, exchange=exchange, seed=seed, epoch=epoch)
    leaving = num_leaving(layout, exchange)
    few = np.arange(0, layout.num_samples, 1 + layout.num_samples // 5)
    alone = [np.array([home]) for home in few.tolist()]
    for past in reversed(range(epoch if leaving else 0)):
        alone = [
            homes_before(layout, one, num_leaving=leaving, seed=seed, epoch=past) for one in alone
        ]
    assert np.array_equal(many[few], np.concatenate(alone))
    assert np.array_equal(many[few + layout.num_samples], np.concatenate(alone))


# As laid out node by node, before points of a ring were looked up
@pytest.mark.parametrize(
    ("layout", "exchange", "expected"),
    [
        (Layout((4,) * 100, 100_003), 0.25, "173282687e0a2fd2b9d99de9e8721d83"),
        (Layout((3, 1) * 40, 50_007), 0.25, "9bcda34df678d481e8c9a330f81a0a92"),
        (Layout((1,) * 70, 70), 1.0, "e062a1ca54284b1fe55744d82434d941"),
    ],
)
def test_pools_of_many_nodes_are_those_of_this_order_version(
    layout: Layout, exchange: float, expected: str
) -> None:
    pools = [
        placement(layout, node=node, exchange=exchange, seed=1, epoch=5)
        for node in range(layout.num_nodes)
    ]
    found = hashlib.sha256(np.concatenate(pools).astype("<i8").tobytes()).hexdigest()
    assert found[:32] == expected


def test_nothing_grows_with_a_ring_of_equal_nodes() -> None:
    layout = Layout((4,) * 250_000, 10**9)
    leaving = num_leaving(layout, 0.1)
    assert len(layout.first_replica) == 250_001, "what the layout itself keeps, once a run"
    assert layout.is_even
    tracemalloc.start()
    try:
        legs = plan_legs(
            layout, replica=777_777, num_leaving=leaving, seed=0, epoch=3, steps=range(100),
            mean_row_bytes=1000, first_tag=0,
        )  # fmt: skip
        leaving_slots(layout, replica=777_777, num_leaving=leaving, seed=0, epoch=3)
        trace(layout, node=99_999, slots=np.arange(4000), exchange=0.1, seed=0, epoch=3)
        _, peak_bytes = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert len(legs) == 16
    assert peak_bytes < 1_000_000, "an array of all nodes would be 2 MB"


@pytest.mark.parametrize("replicas", [(2, 2), (4, 3, 1), (3,) * 70, (1, 2) * 40])
def test_destinations_of_many_are_those_of_each(replicas: tuple[int, ...]) -> None:
    ring = make_ring(Layout(replicas, 1000), seed=4, epoch=2)
    everyone = np.resize(np.arange(sum(replicas)), 3 * sum(replicas))
    shifts = np.arange(len(everyone)) - sum(replicas)
    alone = [
        int(ring.destinations(np.array([r]), np.array([s]))[0])
        for r, s in zip(everyone.tolist(), shifts.tolist(), strict=True)
    ]
    assert ring.destinations(everyone, shifts).tolist() == alone
