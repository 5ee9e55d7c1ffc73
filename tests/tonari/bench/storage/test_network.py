from itertools import combinations

import pytest

from dataio.world import run_threads, thread_worlds
from tonari.bench.storage.patterns import network
from tonari.bench.storage.patterns.network import measure_links, pairs_of_round


@pytest.mark.parametrize("num_nodes", range(2, 10))
def test_over_the_rounds_every_node_meets_every_other_once(num_nodes):
    rounds = [pairs_of_round(number, num_nodes) for number in range(num_nodes - 1 + num_nodes % 2)]
    met = [pair for pairs in rounds for pair in pairs]
    assert sorted(met) == list(combinations(range(num_nodes), 2))
    for pairs in rounds:
        nodes = [node for pair in pairs for node in pair]
        assert len(nodes) == len(set(nodes)), "a node has one partner at a time"
        assert len(pairs) == num_nodes // 2


def test_every_pair_of_nodes_is_measured_once_with_its_repeats(monkeypatch):
    monkeypatch.setattr(network, "MESSAGE_BYTES", 1 << 16)
    worlds = thread_worlds((2, 1, 1))
    found = run_threads(worlds, lambda world: measure_links(world, ["a", "b", "c"], repeats=2))
    assert found[1:] == [[], [], []]
    assert sorted(link.nodes for link in found[0]) == [("a", "b"), ("a", "c"), ("b", "c")]
    for link in found[0]:
        assert len(link.repeats) == 2
        assert min(link.repeats) <= link.bytes_per_s <= max(link.repeats)
        assert 0 < link.round_trip_s < 5


def test_one_node_has_no_link():
    worlds = thread_worlds((2,))
    found = run_threads(worlds, lambda world: measure_links(world, ["a"], repeats=1))
    assert found == [[], []]
