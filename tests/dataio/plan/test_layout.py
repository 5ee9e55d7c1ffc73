from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dataio.plan.layout import Layout


@st.composite
def layouts(draw):
    replicas = tuple(draw(st.lists(st.integers(1, 4), min_size=1, max_size=6)))
    return Layout(replicas, draw(st.integers(sum(replicas), 500)))


@given(layouts())
def test_pools_cut_the_dataset_without_gap_or_overlap(layout):
    bounds = [layout.pool_start(node) for node in range(layout.num_nodes + 1)]
    assert bounds[0] == 0
    assert bounds[-1] == layout.num_samples
    assert [layout.pool_rows(node) for node in range(layout.num_nodes)] == np.diff(bounds).tolist()
    assert layout.pool_sizes.tolist() == np.diff(bounds).tolist()


@given(layouts())
def test_shares_cut_each_pool_and_differ_by_one_row_at_most(layout):
    for node in range(layout.num_nodes):
        first, stop = layout.first_replica[node : node + 2]
        slots = [layout.share_slots(replica) for replica in range(first, stop)]
        assert slots[0][0] == 0
        assert slots[-1][1] == layout.pool_rows(node)
        assert all(a[1] == b[0] for a, b in pairwise(slots))
    rows = [layout.share_rows(replica) for replica in range(layout.num_replicas)]
    assert max(rows) - min(rows) <= 1
    assert sum(rows) == layout.num_samples


@given(layouts())
def test_a_replica_stands_on_the_node_that_counts_it(layout):
    nodes = [layout.node_of(replica) for replica in range(layout.num_replicas)]
    assert nodes == np.repeat(range(layout.num_nodes), layout.replicas).tolist()


def test_fewer_samples_than_replicas_is_refused():
    with pytest.raises(ValueError, match=r"3 samples.*4 replicas.*start fewer ranks"):
        Layout((2, 2), 3)
