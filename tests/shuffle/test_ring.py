"""Every chunk pairs the replicas so that each sends and receives once, and away from its node."""

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from numpy.typing import NDArray

from dataio.plan.layout import Layout
from shuffle.ring import crossing_fraction, make_ring, partners

REPLICAS = [(2, 2), (4, 3, 1), (3, 2, 2), (1, 1, 1, 1, 1), (5, 1)]
LAYOUTS = st.one_of(
    st.sampled_from(REPLICAS), st.lists(st.integers(1, 5), min_size=2, max_size=6).map(tuple)
).map(lambda replicas: Layout(replicas, 100))
SEEDS = st.integers(0, 2**32)
EPOCHS = st.integers(0, 1000)
CHUNKS = st.integers(0, 15)


def ring_positions(layout: Layout, *, seed: int, epoch: int) -> NDArray[np.int64]:
    """int64[num_replicas]: The replica that stands at each position of an epoch's ring."""
    ring = make_ring(layout, seed=seed, epoch=epoch)
    return ring.replica_at(np.arange(layout.num_replicas))


def destinations(layout: Layout, seed: int, epoch: int, chunk: int) -> list[int]:
    return [
        partners(layout, seed=seed, epoch=epoch, chunk=chunk, replica=replica)[0]
        for replica in range(layout.num_replicas)
    ]


def nodes_of(layout: Layout, replicas: list[int]) -> list[int]:
    return [layout.node_of(replica) for replica in replicas]


@given(LAYOUTS, SEEDS, EPOCHS)
def test_every_replica_stands_at_one_position(layout: Layout, seed: int, epoch: int) -> None:
    standing = ring_positions(layout, seed=seed, epoch=epoch)
    ring = make_ring(layout, seed=seed, epoch=epoch)
    assert sorted(standing.tolist()) == list(range(layout.num_replicas))
    assert ring.position_of(standing).tolist() == list(range(layout.num_replicas))


@given(LAYOUTS, SEEDS, EPOCHS)
def test_replicas_of_a_node_stand_side_by_side(layout: Layout, seed: int, epoch: int) -> None:
    nodes = nodes_of(layout, ring_positions(layout, seed=seed, epoch=epoch).tolist())
    assert np.count_nonzero(np.diff(nodes)) == layout.num_nodes - 1


@given(LAYOUTS, SEEDS, EPOCHS, CHUNKS)
def test_every_replica_receives_from_one_other(
    layout: Layout, seed: int, epoch: int, chunk: int
) -> None:
    found = destinations(layout, seed, epoch, chunk)
    assert sorted(found) == list(range(layout.num_replicas))
    assert all(dest != replica for replica, dest in enumerate(found))


@given(LAYOUTS, SEEDS, EPOCHS, CHUNKS)
def test_the_receiver_expects_the_sender(layout: Layout, seed: int, epoch: int, chunk: int) -> None:
    for replica, dest in enumerate(destinations(layout, seed, epoch, chunk)):
        expected = partners(layout, seed=seed, epoch=epoch, chunk=chunk, replica=dest)[1]
        assert expected == replica


@example(Layout((2, 2), 100), 0, 0, 0)
@example(Layout((3, 2, 1), 100), 0, 0, 0)
@given(LAYOUTS, SEEDS, EPOCHS, CHUNKS)
def test_nothing_is_sent_inside_a_node_unless_it_holds_more_than_half(
    layout: Layout, seed: int, epoch: int, chunk: int
) -> None:
    if 2 * max(layout.replicas) > layout.num_replicas:
        return
    found = destinations(layout, seed, epoch, chunk)
    for replica, node in enumerate(nodes_of(layout, found)):
        assert node != layout.node_of(replica)


@pytest.mark.parametrize("replicas", [(5, 1), (2, 1), (4, 3), (6, 2, 1), *REPLICAS])
def test_crossing_fraction_is_what_crosses_on_average(replicas: tuple[int, ...]) -> None:
    layout = Layout(replicas, 100)
    ring = make_ring(layout, seed=1, epoch=0)
    everyone = np.arange(layout.num_replicas)
    home = np.array(nodes_of(layout, everyone.tolist()))
    shifts = {ring.shift(chunk) for chunk in range(300)}
    crossed = [
        home[ring.destinations(everyone, np.array(shift))] != home for shift in sorted(shifts)
    ]
    assert crossing_fraction(layout) == pytest.approx(np.mean(crossed))


def test_crossing_fraction_is_zero_on_one_node_and_one_on_equal_nodes() -> None:
    assert crossing_fraction(Layout((4,), 100)) == 0
    assert crossing_fraction(Layout((2, 2), 100)) == 1
    assert 0 < crossing_fraction(Layout((5, 1), 100)) < 1


@pytest.mark.parametrize("replicas", [(4, 3, 1), (3, 2, 2), (1,) * 5, (5, 1)])
def test_every_allowed_shift_is_drawn_about_equally_often(replicas: tuple[int, ...]) -> None:
    layout = Layout(replicas, 100)
    widest, num_replicas = max(replicas), layout.num_replicas
    low = widest if 2 * widest <= num_replicas else 1
    drawn = np.concatenate(
        [make_ring(layout, seed=3, epoch=epoch).shifts(16) for epoch in range(60)]
    )
    times = np.bincount(drawn, minlength=num_replicas)
    assert set(np.flatnonzero(times)) == set(range(low, num_replicas - low + 1))
    assert times[low : num_replicas - low + 1].min() > 0.6 * times.max()


def test_ring_and_shifts_vary_over_epochs_and_seeds() -> None:
    layout = Layout((3, 2, 2, 1, 4), 100)
    streams = [(seed, epoch) for seed in range(6) for epoch in range(6)]
    rings = {tuple(ring_positions(layout, seed=s, epoch=e).tolist()) for s, e in streams}
    shifts = {tuple(make_ring(layout, seed=s, epoch=e).shifts(16).tolist()) for s, e in streams}
    assert len(rings) > 15
    assert len(shifts) == len(streams)


def test_one_node_has_no_partners() -> None:
    with pytest.raises(ValueError, match=r"all 4 replicas stand on one node.*num_leaving"):
        partners(Layout((4,), 100), seed=0, epoch=0, chunk=0, replica=0)
