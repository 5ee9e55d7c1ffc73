"""A simulation follows rows as training does, and what it calls random is random."""

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dataio.base.seeding import key
from dataio.plan.layout import Layout
from shuffle.mixing import (
    MAX_BATCHES,
    Labels,
    choose_look,
    correlation,
    count_visits,
    distance,
    full_batches,
    given_labels,
    labels_by_epoch,
    mix,
    mix_globally,
    random_distance,
    random_labels,
    random_visits,
    sorted_labels,
)
from shuffle.plan import placement
from shuffle.traffic import count_traffic, plan_replica

LAYOUTS = st.builds(
    lambda replicas, more: Layout(tuple(replicas), 3 * sum(replicas) + more),
    st.lists(st.integers(1, 4), min_size=1, max_size=5),
    st.integers(0, 200),
)


def every_sample_its_own_class(num_samples: int) -> Labels:
    return given_labels(np.arange(num_samples))


@settings(deadline=None)
@given(LAYOUTS, st.sampled_from([0.0, 0.1, 0.4, 1.0]), st.integers(0, 5))
def test_labels_of_homes_are_those_of_the_rows_that_training_puts_there(
    layout: Layout, exchange: float, seed: int
) -> None:
    homes = np.arange(layout.num_samples)
    labels = every_sample_its_own_class(layout.num_samples)
    found = labels_by_epoch(layout, homes, labels, exchange=exchange, seed=seed, num_epochs=6)
    for epoch, samples in enumerate(found):
        pools = [
            placement(layout, node=node, exchange=exchange, seed=seed, epoch=epoch)
            for node in range(layout.num_nodes)
        ]
        assert samples.tolist() == np.concatenate(pools).tolist()
    assert epoch == 5


@settings(deadline=None)
@given(LAYOUTS, st.sampled_from([0.0, 0.1, 0.4, 1.0]), st.integers(0, 5))
def test_visits_are_those_of_the_placements(layout: Layout, exchange: float, seed: int) -> None:
    seen: list[set[int]] = [set() for _ in range(layout.num_samples)]
    visits = count_visits(
        layout, exchange=exchange, seed=seed, num_epochs=5, num_samples=layout.num_samples
    )
    for epoch in range(5):
        for node in range(layout.num_nodes):
            pool = placement(layout, node=node, exchange=exchange, seed=seed, epoch=epoch)
            for sample in pool.tolist():
                seen[sample].add(node)
        assert visits.mean[epoch] == pytest.approx(np.mean([len(nodes) for nodes in seen]))
    assert visits.error.tolist() == [0] * 5, "all samples were followed"


def test_visits_of_some_samples_lie_within_their_error() -> None:
    layout = Layout((2,) * 20, 20_000)
    every = count_visits(layout, exchange=0.3, seed=1, num_epochs=8, num_samples=20_000)
    some = count_visits(layout, exchange=0.3, seed=1, num_epochs=8, num_samples=2_000)
    assert (some.error[1:] > 0).all()
    assert (np.abs(some.mean - every.mean) <= 4 * some.error).all()


def test_random_visits_are_those_of_samples_put_on_replicas_at_random() -> None:
    layout = Layout((3, 1, 2), 600)
    draws = np.random.default_rng(0).choice(3, p=[0.5, 1 / 6, 1 / 3], size=(20_000, 4))
    for epoch, expected in enumerate(random_visits(layout, 4).tolist()):
        found = np.mean([len(set(row)) for row in draws[:, : epoch + 1].tolist()])
        assert found == pytest.approx(expected, abs=0.02)


@pytest.mark.parametrize(
    ("sizes", "rows"),
    [((50, 30, 20), 10), ((50, 30, 20), 100), ((5,) * 40, 70), ((97, 2, 1), 60), ((100,), 7)],
)
def test_random_distance_is_the_mean_of_random_draws(sizes: tuple[int, ...], rows: int) -> None:
    pool, rng = np.repeat(np.arange(len(sizes)), sizes), np.random.default_rng(1)
    fractions = np.array(sizes) / sum(sizes)
    found = [distance(rng.permutation(pool)[:rows], fractions) for _ in range(4000)]
    expected = random_distance(np.array(sizes), rows)
    assert np.mean(found) == pytest.approx(expected, rel=0.02, abs=1e-12)


def test_distance_is_the_share_that_would_have_to_change_its_class() -> None:
    fractions = np.array([0.5, 0.25, 0.25])
    assert distance(np.array([0, 0, 1, 2]), fractions) == 0
    assert distance(np.array([1, 1, 1, 1]), fractions) == 0.75


@given(st.integers(1, 40), st.integers(1, 300))
def test_classes_are_of_one_size_and_sorted_or_not(num_classes: int, num_samples: int) -> None:
    samples = np.arange(num_samples)
    for labels in (
        sorted_labels(num_samples, num_classes),
        random_labels(num_samples, num_classes, key(0, "test")),
    ):
        times = np.bincount(labels.of(samples), minlength=num_classes)
        assert times.tolist() == labels.sizes.tolist()
        assert np.ptp(times) <= 1
    assert (np.diff(sorted_labels(num_samples, num_classes).of(samples)) >= 0).all()


def test_correlation_is_one_of_like_batches_and_none_of_random_ones() -> None:
    fractions, rng = np.full(10, 0.1), np.random.default_rng(0)
    batches = rng.integers(0, 10, (4000, 8))
    assert correlation(batches, batches[:, ::-1], fractions) == pytest.approx(1)
    assert abs(correlation(batches[:2000], batches[2000:], fractions)) < 0.03
    lower, upper = np.zeros((1, 8), int), np.full((1, 8), 5)
    assert correlation(lower, upper, np.array([0.5, 0, 0, 0, 0, 0.5])) == pytest.approx(-1)


def test_correlation_is_that_of_vectors_of_class_shares() -> None:
    rng, fractions = np.random.default_rng(2), np.array([0.4, 0.3, 0.2, 0.1])
    one, other = rng.integers(0, 4, (9, 6)), rng.integers(0, 3, (9, 6))
    d, e = (
        np.array([np.bincount(batch, minlength=4) / 6 - fractions for batch in batches])
        for batches in (one, other)
    )
    expected = (d * e).sum() / ((d * d).sum() + (e * e).sum()) * 2
    assert correlation(one, other, fractions) == pytest.approx(expected)


def test_correlation_of_no_pairs_or_of_one_class_is_none() -> None:
    assert math.isnan(correlation(np.empty((0, 4), int), np.empty((0, 4), int), np.ones(1)))
    assert math.isnan(correlation(np.zeros((3, 4), int), np.zeros((3, 4), int), np.ones(1)))


def test_full_batches_are_the_first_rows_that_the_replicas_of_a_node_train() -> None:
    layout = Layout((3, 1), 403)
    batches = [
        full_batches(layout, replica=r, holds_all=False, seed=0, epoch=2, batch_size=10)
        for r in range(3)
    ]
    assert [found.shape for found in batches] == [(10, 10)] * 3
    assert len(np.unique(np.concatenate(batches))) == 300
    alone = full_batches(layout, replica=3, holds_all=False, seed=0, epoch=2, batch_size=101)
    assert alone.shape == (0, 101), "the replica with the fewest rows does not fill it"
    many = full_batches(layout, replica=0, holds_all=True, seed=0, epoch=2, batch_size=1)
    assert many.shape == (MAX_BATCHES, 1)


def test_sorted_classes_mix_as_rows_are_exchanged_and_never_without() -> None:
    layout, labels = Layout((2,) * 20, 20_000), sorted_labels(20_000, 20)
    look = choose_look(layout, num_nodes=20, num_rows=10**6, seed=0)
    expected = random_distance(labels.sizes, 1000)
    last = {}
    for exchange in (0.0, 0.1, 1.0):
        *_, last[exchange] = mix(
            layout, look, labels, exchange=exchange, seed=0, num_epochs=10, batch_size=20
        )
    *_, globally = mix_globally(layout, look, labels, seed=0, num_epochs=3, batch_size=20)
    assert last[0.0].distances.tolist() == pytest.approx([0.95] * 20)
    assert last[0.0].step_correlation == pytest.approx(1, abs=0.01)
    assert last[0.0].epoch_correlation == pytest.approx(1, abs=0.01)
    assert expected * 2 < last[0.1].distances.mean() < 0.6
    assert 0.1 < last[0.1].step_correlation < 0.95
    assert last[1.0].distances.mean() == pytest.approx(expected, rel=0.1)
    assert abs(last[1.0].step_correlation) < 0.05
    assert globally.distances.tolist() == pytest.approx([expected] * 20)
    assert abs(globally.step_correlation) < 0.05
    assert abs(globally.epoch_correlation) < 0.05


def test_some_nodes_speak_for_all_within_their_error() -> None:
    layout, labels = Layout((2,) * 60, 60_000), sorted_labels(60_000, 30)
    looks = [choose_look(layout, num_nodes=n, num_rows=10**6, seed=3) for n in (60, 10)]
    every, some = (
        list(mix(layout, look, labels, exchange=0.2, seed=3, num_epochs=8, batch_size=20))
        for look in looks
    )
    assert len(set(looks[1].nodes.tolist())) == 10
    for one, other in zip(every, some, strict=True):
        error = other.distances.std(ddof=1) / math.sqrt(10) + 1e-9
        assert abs(one.distances.mean() - other.distances.mean()) < 4 * error


def test_a_pool_too_large_to_follow_is_sampled_without_repeats() -> None:
    layout = Layout((1, 1, 1), 3000)
    look = choose_look(layout, num_nodes=8, num_rows=300, seed=0)
    assert look.nodes.tolist() == [0, 1, 2]
    for node, homes in enumerate(look.homes):
        assert len(set(homes.tolist())) == 100
        assert (homes // 1000 == node).all()
        assert 300 < homes.mean() - 1000 * node < 700, "from all over the pool"


@pytest.mark.parametrize("replicas", [(2, 2), (3, 1, 2), (5, 1), (4,)])
@pytest.mark.parametrize("exchange", [0.0, 0.3, 1.0])
def test_traffic_is_what_the_plans_of_all_replicas_move(
    replicas: tuple[int, ...], exchange: float
) -> None:
    layout = Layout(replicas, 100 * sum(replicas) + 1)
    plans = [
        plan_replica(
            layout, replica=r, exchange=exchange, seed=0, epoch=1, batch_size=8,
            mean_row_bytes=10**6,
        )
        for r in range(layout.num_replicas)
    ]  # fmt: skip
    counted = [count_traffic(layout, plan, row_bytes=10**6) for plan in plans]
    assert all(found == counted[0] for found in counted)
    traffic = counted[0]
    leaving = 0 if len(replicas) == 1 else int(100 * exchange)
    assert traffic.num_leaving == leaving
    assert traffic.rank_bytes == leaving * 10**6
    assert traffic.num_messages == len(plans[0].legs)
    sizes = [leg.stop - leg.start for leg in plans[0].legs]
    assert sum(sizes) == leaving
    assert traffic.message_bytes == max(sizes, default=0) * 10**6
    rows = int(layout.pool_sizes.max())
    assert rows * 10**6 <= traffic.storage_bytes <= (1 + 2 * exchange) * rows * 10**6
    if len(replicas) > 1 and 2 * max(replicas) <= sum(replicas):
        widest = replicas.index(max(replicas))
        sent = sum(
            leg.stop - leg.start
            for replica, plan in enumerate(plans)
            for leg in plan.legs
            if layout.node_of(replica) == widest != layout.node_of(leg.dest)
        )
        assert traffic.node_bytes == sent * 10**6
    assert traffic.steps == -(-layout.share_rows(0) // 8) or len(replicas) > 1
