import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from dataio.base.seeding import key
from dataio.plan.order import Order, deal, deal_all, num_steps, stage_groups, top_up, valid_rows


@st.composite
def sampling_groups(draw):
    num_replicas = draw(st.integers(1, 4))
    num_rows = draw(st.integers(num_replicas, 120))
    visible = np.flatnonzero(draw(st.lists(st.booleans(), min_size=num_rows, max_size=num_rows)))
    return visible, num_replicas, draw(st.integers(1, 17)), draw(st.integers(0, 5))


def orders(visible, num_replicas, batch_size, epoch):
    dealt = deal(len(visible), num_replicas)
    steps = num_steps(dealt, batch_size)
    stream = key(0, "order", epoch=epoch)
    return [Order(visible, stream, dealt, turn, batch_size, steps) for turn in range(num_replicas)]


@given(sampling_groups())
def test_every_visible_row_is_trained_once_an_epoch_and_no_other(sampling_group):
    visible, num_replicas, batch_size, epoch = sampling_group
    trained = []
    for order in orders(visible, num_replicas, batch_size, epoch):
        for step in range(order.steps):
            batch = order.batch(step)
            assert len(batch.slots) == batch_size
            trained += batch.slots[: batch.num_valid].tolist()
    assert sorted(trained) == visible.tolist()


@given(sampling_groups())
def test_padding_repeats_rows_of_the_same_replica(sampling_group):
    visible, num_replicas, batch_size, epoch = sampling_group
    for order in orders(visible, num_replicas, batch_size, epoch):
        own = set(order.slots_at(np.arange(order.num_rows)).tolist())
        for step in range(order.steps):
            batch = order.batch(step)
            if order.num_rows:
                assert set(batch.slots.tolist()) <= own


@given(sampling_groups())
def test_valid_rows_counts_what_all_replicas_train_in_a_step(sampling_group):
    visible, num_replicas, batch_size, epoch = sampling_group
    dealt = deal(len(visible), num_replicas)
    everyone = orders(visible, num_replicas, batch_size, epoch)
    for step in range(everyone[0].steps):
        counted = sum(order.batch(step).num_valid for order in everyone)
        assert valid_rows(dealt, step, batch_size) == counted


def test_epochs_differ_and_repeat_by_their_key():
    visible = np.arange(500)
    first, again, second = (orders(visible, 1, 500, epoch)[0].batch(0).slots for epoch in (0, 0, 1))
    assert np.array_equal(first, again)
    assert not np.array_equal(first, second)


@given(
    st.lists(
        st.tuples(st.integers(1, 4), st.integers(0, 60), st.integers(0, 40)), min_size=1, max_size=5
    ),
    st.integers(1, 16),
)
def test_topping_up_fills_the_steps_that_someone_needs_and_adds_none(nodes, batch_size):
    replicas = [width for width, _, _ in nodes]
    visible = np.array([shown for _, shown, _ in nodes])
    owned = visible + np.array([hidden for _, _, hidden in nodes])
    shown = top_up(visible, owned, replicas, batch_size=batch_size)
    assert (shown >= visible).all()
    assert (shown <= owned).all()

    def steps(rows):
        return max(
            num_steps(deal(n, w), batch_size) for n, w in zip(rows.tolist(), replicas, strict=True)
        )

    assert steps(shown) == steps(visible)
    for rows, own, width in zip(shown.tolist(), owned.tolist(), replicas, strict=True):
        assert rows >= min(own, steps(visible) * batch_size * width)


@given(st.lists(st.tuples(st.integers(0, 60), st.integers(1, 5)), min_size=1, max_size=6))
def test_dealing_all_decks_is_dealing_each(sampling_groups):
    rows, replicas = (
        np.array([n for n, _ in sampling_groups]),
        [width for _, width in sampling_groups],
    )
    each = [deal(n, width) for n, width in sampling_groups]
    assert deal_all(rows, replicas).tolist() == np.concatenate(each).tolist()


@given(sampling_groups())
def test_grouped_rows_are_trained_group_after_group_each_once(sampling_group):
    visible, num_replicas, batch_size, epoch = sampling_group
    groups = stage_groups(int(visible.max(initial=0)) + 1, key(0, "stage", epoch=epoch), most=4)
    dealt = deal(len(visible), num_replicas)
    steps = num_steps(dealt, batch_size)
    replicas = [
        Order(visible, None, dealt, turn, batch_size, steps, groups) for turn in range(num_replicas)
    ]
    trained = [order.slots_at(np.arange(order.num_rows)).tolist() for order in replicas]
    assert sorted(slot for rows in trained for slot in rows) == visible.tolist()
    place = np.empty(groups.bounds.max(), np.int64)
    for number, (start, stop) in enumerate(groups.bounds.tolist()):
        place[start:stop] = number
    for rows in trained:
        came = place[rows].tolist()
        assert came == sorted(came), "no row before those of the groups staged earlier"


def test_groups_are_shuffled_each_in_its_own_way():
    groups = stage_groups(400, key(0, "stage"), most=2)
    order = Order(range(400), None, np.array([400]), 0, 400, 1, groups)
    first, second = order.batch(0).slots.reshape(2, 200) % 200
    assert sorted(first) == sorted(second) == list(range(200))
    assert (first != second).sum() > 150
    starts = stage_groups(400, key(0, "stage"), most=16).bounds[:, 0].tolist()
    assert sorted(starts) == list(range(0, 400, 25)) != starts
