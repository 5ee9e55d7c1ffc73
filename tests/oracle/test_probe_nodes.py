"""A probe of several nodes: what joins them is timed, and no file describes it."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from dataio.world import Topology
from tests.multirank import RunRanks
from tests.oracle.test_trace import GPT, load
from tonari.cli import main
from tonari.oracle.cluster.cluster import Cluster, Level
from tonari.oracle.cluster.machine import Nodes
from tonari.oracle.cluster.probed import cluster_of, measure_link
from tonari.oracle.errors import OracleError
from tonari.oracle.probe.messages import EXCHANGE, KINDS, MessageTimes
from tonari.oracle.probe.probe import Probe, count_ranks, load_probe, probe, save_probe

GBYTE_S, BURST_BYTES, WAIT_S = 0.05, 200_000, 1e-4
SIZES = (256, 1 << 20, 4 << 20)


def between(kind: str, *, ranks: int = 2, times: float = 1.0) -> MessageTimes:
    """Times of two nodes whose link carries `GBYTE_S`, but what a buffer holds passes at once."""
    seconds = [
        WAIT_S + times * max(ranks // 2 * size - BURST_BYTES, 0) / (GBYTE_S * 1e9) for size in SIZES
    ]
    return MessageTimes(
        kind=kind, ranks=ranks, nodes=2, num_bytes=SIZES, seconds=tuple(seconds), cores=(0.5,) * 3,
        spread=(1.0,) * 3,
    )  # fmt: skip


def of_nodes(directory: Path, *messages: MessageTimes, world_size: int = 4) -> Probe:
    """A probe of two nodes of two ranks, with these messages between them."""
    found = probe(load(directory), world_size=world_size, steps=1, sizes=())
    return replace(found, ranks=2, nodes=2, messages=messages)


def test_the_rate_of_a_link_is_that_of_a_whole_node_whatever_buffers_hold():
    slow_alone = between("send", times=3.0)
    of_all = between("send", ranks=4)
    gbyte_s, latency_us = measure_link([slow_alone, of_all])
    assert gbyte_s == pytest.approx(GBYTE_S)
    assert latency_us == pytest.approx(WAIT_S * 1e6)
    # Of two rounds
    assert measure_link([of_all, between("all_reduce")]) == pytest.approx((gbyte_s, latency_us / 2))
    noisy = replace(of_all, seconds=(1e-4, 2.0, 1.0))
    assert measure_link([noisy])[0] == pytest.approx(2 * SIZES[-1] / 1.0 / 1e9)


def test_a_group_that_lies_as_one_that_was_timed_takes_what_was_timed(tmp_path):
    timed = between("all_reduce", ranks=4, times=7.0)
    found = of_nodes(tmp_path, between("send"), timed)
    machine = cluster_of(found, None)
    assert machine is not None
    nodes = Nodes(machine, None)
    assert nodes.message("all_reduce", (0, 1, 2, 3), 4 << 20).seconds == pytest.approx(
        timed.seconds[-1]
    )
    # Of one rank on each node none was timed: by the link, as of a file that has the same
    from_file = Cluster(name="file", level=machine.level)
    ranks = (0, 2)
    assert nodes.message("all_reduce", ranks, 4 << 20) == Nodes(from_file, None).message(
        "all_reduce", ranks, 4 << 20
    )
    assert nodes.message(EXCHANGE, ranks, 1 << 20) == nodes.message("send", ranks, 1 << 20)
    faster = replace(found, messages=(*found.messages, between(EXCHANGE, times=0.5)))
    machine = cluster_of(faster, None)
    assert machine is not None
    rows_s = Nodes(machine, None).message(EXCHANGE, ranks, 4 << 20).seconds
    assert rows_s < nodes.message("send", ranks, 4 << 20).seconds


def test_a_job_of_more_nodes_or_other_ranks_has_the_links_that_were_probed(tmp_path):
    network = of_nodes(tmp_path, between("send"))
    more = replace(network, world_size=16)
    wider = cluster_of(more, None)
    assert wider is not None
    assert [level.units for level in wider.level] == [2, 8]
    job = replace(network, ranks=4, nodes=1, world_size=8, messages=())
    machine = cluster_of(job, network)
    assert machine is not None
    assert [level.units for level in machine.level] == [4, 2]
    assert machine.level[1].gbyte_s == pytest.approx(GBYTE_S)
    file = Cluster(name="file", level=(Level(name="node", units=4),))
    assert cluster_of(job, file) is file
    assert cluster_of(job, None) is None
    with pytest.raises(OracleError, match=r"a probe of one node.*; start tonari probe on two"):
        cluster_of(network, job)


def test_ranks_that_lie_unevenly_or_round_the_nodes_are_refused():
    assert count_ranks(Topology.from_layout((2, 2))) == 2
    with pytest.raises(
        OracleError, match=r"2 nodes have 2, 1 ranks, expected as many .*; start it .* -ppn 2"
    ):
        count_ranks(Topology.from_layout((2, 1)))
    with pytest.raises(OracleError, match=r"lie on nodes 0, 1, 0, 1, expected .*; start it with"):
        count_ranks(Topology((0, 1, 0, 1)))


def test_nodes_that_were_asked_for_and_are_not_there_are_an_error(tmp_path, capsys):
    path = tmp_path / "run.toml"
    path.write_text(GPT)
    out = ["--out", str(tmp_path / "probe.json")]
    assert main(["probe", str(path), "--nodes", "2", *out]) == 1
    assert "--nodes 2: 1 ranks were started on 1 node; start them by a launcher" in (
        capsys.readouterr().err
    )
    kept = tmp_path / "one.json"
    save_probe(probe(load(tmp_path), world_size=1, steps=1, sizes=()), kept)
    plan = ["plan", str(path), "--cluster", str(kept)]
    assert main([*plan, "--probe", str(kept)]) == 1
    assert "--cluster is a probe of one node" in capsys.readouterr().err
    assert main(["search", *plan[1:], "--world", "2"]) == 2
    assert "by the [device] of a machine's file" in capsys.readouterr().err


@pytest.mark.multirank
@pytest.mark.parametrize(
    "ranks",
    [pytest.param(1, marks=pytest.mark.nightly), pytest.param(2, marks=pytest.mark.thorough)],
)
def test_two_nodes_are_probed_and_planned_without_a_file_whatever_their_clocks(
    run_ranks: RunRanks, tmp_path, capsys, ranks
):
    path, kept = tmp_path / "run.toml", tmp_path / "probe.json"
    path.write_text(GPT)
    ended = run_ranks(
        "probe_nodes", 2 * ranks, str(path), str(kept), env={"TONARI_RANKS_PER_NODE": str(ranks)}
    )  # fmt: skip
    assert [(each["nodes"], each["ranks"]) for each in ended.reports] == [(2, ranks)] * 2 * ranks
    ahead_s = [each["ahead_s"] for each in ended.reports]
    assert ahead_s == pytest.approx([0.0] * ranks + [1000.0] * ranks, abs=1.0)
    found = load_probe(kept)
    assert {(each.kind, each.ranks) for each in found.between} == {
        *((kind, 2 * width) for kind in KINDS for width in (1, ranks)), (EXCHANGE, 2)
    }  # fmt: skip
    assert {each.ranks for each in found.inside} == {1, ranks}
    assert [count for count, _ in found.slowdowns] == [*range(1, ranks + 1)]
    assert all(0 < seconds < 30 for each in found.between for seconds in each.seconds)
    assert main(["plan", str(path), "--probe", str(kept), "--json", "--explain"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["parts_s"]["all_reduce"] > 0
    # Another number of ranks on the same nodes: what joins them is that of the probe
    # Several steps: one that the machine held up would hide what is sent behind its computation.
    alone = probe(load(tmp_path), world_size=2, steps=9, sizes=())
    save_probe(alone, tmp_path / "alone.json")
    plan = ["plan", str(path), "--probe", str(tmp_path / "alone.json")]
    assert main([*plan, "--cluster", str(kept), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["parts_s"]["all_reduce"] > 0
