"""Numbering of nodes, replicas and local ranks."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dataio.world import Topology

NAMES = st.lists(st.sampled_from("abcde"), min_size=1, max_size=20)


@given(NAMES)
def test_every_rank_is_one_replica(names: list[str]) -> None:
    topology = Topology.from_names(names)
    assert sorted(topology.rank_of_replica) == list(range(len(names)))
    for rank, replica in enumerate(topology.replica_of_rank):
        assert topology.rank_of_replica[replica] == rank


@given(NAMES)
def test_equal_names_are_one_node(names: list[str]) -> None:
    topology = Topology.from_names(names)
    assert len(set(zip(names, topology.node_of_rank, strict=True))) == len(set(names))
    assert topology.num_nodes == len(set(names))


@given(NAMES)
def test_replicas_stand_node_by_node_and_by_rank_within(names: list[str]) -> None:
    topology = Topology.from_names(names)
    places = [(topology.node_of_rank[rank], rank) for rank in topology.rank_of_replica]
    assert places == sorted(places)
    assert sum(topology.layout) == len(names)


@given(NAMES)
def test_node_and_local_rank_tell_ranks_apart(names: list[str]) -> None:
    topology = Topology.from_names(names)
    seats = [(topology.node_of_rank[r], topology.local_rank(r)) for r in range(len(names))]
    assert len(set(seats)) == len(names)
    assert all(seat < topology.layout[node] for node, seat in seats)


def test_interleaved_ranks() -> None:
    topology = Topology.from_names(["b", "a", "b"])
    assert topology.node_of_rank == (0, 1, 0)
    assert topology.layout == (2, 1)
    assert topology.rank_of_replica == (0, 2, 1)
    assert topology.replica_of_rank == (0, 2, 1)
    assert topology.local_rank(2) == 1


@pytest.mark.parametrize("nodes", [(), (1,), (0, 2), (0, 2, 1)])
def test_nodes_not_numbered_by_appearance_are_refused(nodes: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match=r"numbered from 0 .* Topology.from_names"):
        Topology(nodes)


def test_layout_fills_node_after_node() -> None:
    assert Topology.from_layout((2, 1, 2)).node_of_rank == (0, 0, 1, 2, 2)
    assert Topology.from_layout((2, 1, 2)).layout == (2, 1, 2)
