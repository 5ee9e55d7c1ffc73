"""Groups that leave a node without need are named, with what would lie within one."""

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.trainer.run.test_dry_run import GPT
from tonari.train.command import main
from tonari.trainer.run.crossings import crossings


def found(sizes: tuple[int, ...], num_nodes: int) -> list[tuple[str, int, int]]:
    return [
        (each.axis, each.nodes, each.ranks_within) for each in crossings(sizes, num_nodes=num_nodes)
    ]


@pytest.mark.parametrize(
    ("sizes", "num_nodes", "expected"),
    [
        # pp, dp_replicate, dp_shard, cp, tp
        ((1, 1, 1, 1, 16), 2, [("tp", 2, 8)]),
        ((1, 1, 1, 1, 16), 4, [("tp", 4, 4)]),
        ((1, 2, 1, 4, 4), 4, [("cp", 2, 2)]),
        ((1, 1, 16, 1, 2), 4, [("dp_shard", 4, 4)]),
        # Three ranks of four: a group begins on one node and ends on the next
        ((1, 4, 1, 1, 3), 3, [("tp", 2, 2)]),
        ((1, 1, 4, 1, 6), 6, [("tp", 2, 4)]),
    ],
)
def test_a_group_that_crosses_is_found(sizes, num_nodes, expected):
    assert found(sizes, num_nodes) == expected


@pytest.mark.parametrize(
    ("sizes", "num_nodes"),
    [
        ((1, 1, 1, 1, 16), 1),
        ((1, 2, 1, 1, 8), 2),
        ((2, 4, 4, 1, 2), 8),
        # Copies and stages are meant to lie on different nodes
        ((4, 8, 1, 1, 1), 16),
        # tp fills the node: nothing else can lie in it
        ((1, 1, 8, 1, 4), 8),
        # A node of one rank
        ((1, 1, 2, 2, 2), 8),
    ],
)
def test_a_group_that_stays_or_has_to_leave_is_not(sizes, num_nodes):
    assert found(sizes, num_nodes) == []


@given(st.tuples(*[st.integers(1, 6)] * 5), st.data())
def test_what_is_proposed_lies_within_a_node(sizes, data):
    world_size = 1
    for size in sizes:
        world_size *= size
    divisors = [count for count in range(1, world_size + 1) if world_size % count == 0]
    num_nodes = data.draw(st.sampled_from(divisors))
    per_node = world_size // num_nodes
    axes = ("pp", "dp_replicate", "dp_shard", "cp", "tp")
    for each in crossings(sizes, num_nodes=num_nodes):
        smaller = list(sizes)
        smaller[axes.index(each.axis)] = each.ranks_within
        inner = 1
        for size in smaller[axes.index(each.axis) :]:
            inner *= size
        # Groups of so many neighbours begin where a node begins, or within it
        assert 1 < each.ranks_within < each.ranks
        assert per_node % inner == 0
        assert each.nodes > 1


def test_a_dry_run_names_axis_nodes_and_cure(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    path = tmp_path / "run.toml"
    path.write_text(GPT)
    asked = [str(path), "--dry-run", "--world", "8", "--nodes", "4"]
    assert main([*asked, "mesh.tp=4", "mesh.dp_replicate=2"]) == 0
    shown = capsys.readouterr().out
    assert "a group of mesh.tp=4 spans 2 nodes" in shown
    assert "mesh.tp=2 lies within one" in shown
    assert main([*asked, "mesh.dp_shard=8"]) == 0
    shown = capsys.readouterr().out
    assert "a group of mesh.dp_shard=8 spans 4 nodes" in shown
    assert "mesh.dp_shard=2 lies within one, with mesh.dp_replicate" in shown
    assert main([*asked, "mesh.tp=2"]) == 0
    assert "spans" not in capsys.readouterr().out
