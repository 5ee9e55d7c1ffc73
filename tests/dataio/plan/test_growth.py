"""Placements of a dataset that grew: each sample in one slot, and old rows where they lay."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import shuffle
from dataio.plan.layout import Layout
from dataio.plan.placement import samples_in
from dataio.plan.policies import Local

SHUFFLES = {
    "local": Local(),
    "partial": shuffle.Partial(0.4),
    "moves": shuffle.Global(moves=True),
}


@st.composite
def grown_layouts(draw):
    """A layout that grew up to three times, and the epoch in which it last did."""
    replicas = tuple(draw(st.lists(st.integers(1, 3), min_size=1, max_size=4)))
    count, epoch, history = draw(st.integers(sum(replicas), 60)), 0, []
    for _ in range(draw(st.integers(0, 3))):
        history.append((epoch, count))
        count, epoch = count + draw(st.integers(1, 40)), epoch + draw(st.integers(1, 3))
    return Layout(replicas, count, tuple(history)), epoch


def placement(policy, layout, epoch, first_epoch):
    return [
        samples_in(policy, layout, node=node, epoch=epoch, seed=3, first_epoch=first_epoch)
        for node in range(layout.num_nodes)
    ]


@pytest.mark.parametrize("name", SHUFFLES)
@given(grown=grown_layouts(), later=st.integers(0, 3))
def test_every_sample_is_in_one_slot(name, grown, later):
    layout, first_epoch = grown
    pools = placement(SHUFFLES[name], layout, first_epoch + later, first_epoch)
    assert [len(pool) for pool in pools] == layout.pool_sizes.tolist()
    assert sorted(np.concatenate(pools).tolist()) == list(range(layout.num_samples))


@pytest.mark.parametrize("name", SHUFFLES)
@given(grown=grown_layouts())
def test_a_growth_leaves_every_row_in_its_slot(name, grown):
    layout, first_epoch = grown
    if not layout.earlier:
        return
    older, began = layout.before_growth()
    before = placement(SHUFFLES[name], older, first_epoch, began)
    after = placement(SHUFFLES[name], layout, first_epoch, first_epoch)
    for old, new in zip(before, after, strict=True):
        np.testing.assert_array_equal(new[: len(old)], old)
        assert (new[len(old) :] >= older.num_samples).all()
