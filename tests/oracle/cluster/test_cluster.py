"""A machine's file, and what its links make of a message."""

from pathlib import Path

import pytest

from tests.multirank import ROOT
from tonari.oracle.cluster.cluster import Cluster, Level, load_cluster
from tonari.oracle.cluster.links import lay_route
from tonari.oracle.cluster.machine import Nodes
from tonari.oracle.errors import OracleError
from tonari.oracle.machine import OneNode

EXAMPLES = sorted((ROOT / "examples" / "clusters").glob("*.toml"))
MIB = 1 << 20


def three_levels(**of_nodes: float) -> Cluster:
    """Two ranks a node, two nodes a rack, two racks, whose link is as fast as that of one node."""
    node = Level(name="node", units=2, gbyte_s=100.0, **of_nodes)
    rack = Level(name="rack", units=2, gbyte_s=10.0)
    return Cluster(name="three", level=(node, rack, Level(name="hall", units=2, gbyte_s=10.0)))


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_the_examples_are_read(path):
    assert load_cluster(path).world_size > 1


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("name = 3", "cannot|Expected `str`"),
        ('name = "a"', "missing required field `level`"),
        ('name = "a"\n[[level]]\nname = "node"\nunits = 0', r"`int` >= 1 - at `\$\.level\[0\]"),
        ('name = "a"\nspeed = 1\n[[level]]\nname = "node"\nunits = 2', "unknown field `speed`"),
        (
            'name = "a"\n[[level]]\nname = "node"\nunits = 2\n[[level]]\nname = "rack"\nunits = 2',
            'level "rack" has no gbyte_s; give what the link of each node into it carries',
        ),
        (
            'name = "a"\n[[level]]\nname = "rack"\nunits = 2\n'
            '[[level]]\nname = "rack"\nunits = 2\ngbyte_s = 1',
            'level "rack" has a name that is taken.* give each level a name of its own',
        ),
        (
            'name = "a"\n[[level]]\nname = "cores"\nunits = 2',
            'level "cores" has a name that is taken.* other than cores',
        ),
        ("name =", "cannot be read as TOML"),
    ],
)
def test_a_file_that_is_wrong_is_refused_by_the_place_and_the_cure(tmp_path: Path, text, words):
    path = tmp_path / "cluster.toml"
    path.write_text(text)
    with pytest.raises(OracleError, match=words) as raised:
        load_cluster(path)
    assert str(path) in str(raised.value)


def test_ranks_that_do_not_fit_are_refused():
    assert [three_levels().num_nodes(ranks) for ranks in (1, 2, 4, 8)] == [1, 1, 2, 4]
    with pytest.raises(OracleError, match="has 8 ranks, fewer than the 16"):
        three_levels().num_nodes(16)
    with pytest.raises(OracleError, match="3 ranks do not fill nodes of 2"):
        three_levels().num_nodes(3)


@pytest.mark.parametrize(
    ("kind", "ranks", "gbyte"),
    [
        # Per byte of the message, over the busiest of 10 GB/s, or inside a node of 100
        ("all_reduce", (0, 2), 1 / 10),
        ("all_reduce", (0, 1), 1 / 100),
        ("all_reduce", (0, 1, 2, 3), 2 * 3 / 4 / 10),
        ("all_gather", (0, 2, 4, 6), 3 / 4 / 10),
        ("reduce_scatter", tuple(range(8)), 7 / 8 / 10),
        # A rack sends four parts of its 4 ranks to each of 4: 16 of 64 parts
        ("all_to_all", tuple(range(8)), 16 / 64 / 10),
        ("broadcast", (0, 4), 1 / 10),
        ("send", (5, 4), 1 / 100),
        ("send", (5, 0), 1 / 10),
        ("all_reduce", (3,), 0),
    ],
)
def test_the_busiest_link_decides(kind, ranks, gbyte):
    route = lay_route(three_levels(), kind, ranks)
    assert route.seconds(1 << 30) == pytest.approx(gbyte * 2**30 / 1e9)


def test_a_small_message_takes_latency_alone_and_many_ranks_use_a_tree():
    cluster = Cluster(
        name="wide", level=(Level(name="node", units=1024, gbyte_s=10.0, latency_us=5.0),)
    )
    tree = lay_route(cluster, "all_reduce", range(1024))
    assert tree.seconds(8) == pytest.approx(20 * 5e-6, rel=0.01)
    ring_s = 2 * 1023 * 5e-6 + 2 * 1023 / 1024 * 2**30 / 1e10
    assert tree.seconds(1 << 30) == pytest.approx(ring_s)


def test_links_without_a_limit_leave_what_the_node_takes():
    cluster = Cluster(name="node", level=(Level(name="node", units=4),))
    assert Nodes(cluster, None).message("all_reduce", (0, 1, 2, 3), MIB).seconds == 0.0


def test_two_messages_share_a_node_s_link_and_two_nodes_do_not():
    nodes = Nodes(three_levels(), None)
    first = nodes.message("send", (0, 2), MIB)
    second = nodes.message("send", (1, 3), MIB)
    other = nodes.message("send", (4, 6), MIB)

    def demand(cost, link):
        return dict(cost.demands).get(link, 0.0)

    out = ("rack", "out", "0")
    total = demand(first, out) + demand(second, out)
    assert nodes.slowdown(out, total) == pytest.approx(2.0)
    assert not {link for link, _ in first.demands} & {link for link, _ in other.demands}


def test_processors_and_links_overlap():
    from tests.oracle.test_machine import times

    node = OneNode([times(cores=2.0)], [(1, 1.0)])
    cluster = Cluster(
        name="slow", level=(Level(name="node", units=1), Level(name="net", units=2, gbyte_s=25e-9))
    )
    # 100 bytes over 25 bytes/s take 4 s; the ranks work 1 s of it with two cores together
    cost = Nodes(cluster, node).message("all_reduce", (0, 1), 100)
    assert cost.seconds == pytest.approx(4.0)
    assert dict(cost.demands)["cores", "0"] == pytest.approx(2 * 1 / 4 / 2)
