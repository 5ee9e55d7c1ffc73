"""Between nodes the doctor measures every pair once, and names what is slow, late or unused."""

from itertools import combinations
from pathlib import Path

import pytest

from dataio.base.filesystem import Filesystem
from dataio.world import run_threads, thread_worlds
from tonari import checks, doctor, fabric, pairs
from tonari.checks import Finding
from tonari.pairs import Pair, clock_offsets, judge_clocks, judge_pairs, measure_pairs, rounds

UP = {"mlx5_0:1": "ACTIVE 200 Gb/sec (4X HDR)"}


@pytest.mark.parametrize("num_places", range(1, pairs.ALL_PAIRS_OF + 1))
def test_every_pair_meets_once_and_nobody_twice_in_a_round(num_places: int) -> None:
    met = list(rounds(num_places))
    assert sorted(pair for pairs in met for pair in pairs) == list(
        combinations(range(num_places), 2)
    )
    for one_round in met:
        places = [place for pair in one_round for place in pair]
        assert len(set(places)) == len(places)


def test_of_many_nodes_each_meets_a_few() -> None:
    met = [pair for one_round in rounds(300) for pair in one_round]
    assert len(set(met)) == len(met) < 300 * 9 / 2
    assert {place for pair in met for place in pair} == set(range(300))


@pytest.mark.parametrize("layout", [[1, 1, 1], [2, 2], [1]])
def test_pairs_of_nodes_are_measured_by_their_first_ranks(layout: list[int]) -> None:
    worlds = thread_worlds(layout)
    places = [ranks[0] for ranks in worlds[0].topology.ranks_of_node]
    names = [f"node{node}" for node in range(len(layout))]
    found = run_threads(worlds, lambda world: measure_pairs(world, places, names))
    assert all(found[0] == other for other in found)
    assert {pair.names for pair in found[0]} == set(combinations(names, 2))
    assert all(pair.bytes_per_s > 0 and pair.latency_s > 0 for pair in found[0])
    offsets = run_threads(worlds, lambda world: clock_offsets(world, places))
    assert len(offsets[0]) == len(layout)
    assert all(abs(offset) < 1 for offset in offsets[0])


def test_doctor_compares_nodes_of_a_job_on_rank_0() -> None:
    found = run_threads(thread_worlds([2, 1]), lambda world: list(doctor._between(world)))
    assert [finding.check for finding in found[0]] == ["pairs of nodes", "clocks"]


def test_a_slow_pair_is_named() -> None:
    quick = [Pair(("a", "b"), 1e10, 1e-6), Pair(("a", "c"), 1.1e10, 1e-6)]
    assert judge_pairs(quick, across_nodes=True).verdict == "fine"
    finding = judge_pairs([*quick, Pair(("b", "c"), 1e9, 9e-5)], across_nodes=True)
    assert finding.verdict == "look"
    assert "slowest b - c 1,000 MB/s; latest b - c 90 us" in finding.found
    assert finding.cure.startswith("b - c is far slower than the others: leave one of them out")
    assert judge_pairs([], across_nodes=False).verdict == "fine"


def test_a_clock_that_differs_is_named() -> None:
    assert judge_clocks([0.0, 0.2], ["a", "b"]) == Finding(
        "clocks", "fine", "at most 200.0 ms apart"
    )
    finding = judge_clocks([0.0, 0.2, -90.0], ["a", "b", "c"])
    assert finding.verdict == "look"
    assert finding.cure.startswith("c is -90.0 s from a")
    assert "chrony" in finding.cure


def test_ports_of_a_fabric_are_listed(tmp_path: Path) -> None:
    for number, state in ((1, "4: ACTIVE"), (2, "1: DOWN")):
        port = tmp_path / f"infiniband/mlx5_0/ports/{number}"
        port.mkdir(parents=True)
        (port / "state").write_text(f"{state}\n")
        (port / "rate").write_text("200 Gb/sec (4X HDR)\n")
    (tmp_path / "cxi/cxi0").mkdir(parents=True)
    ports = fabric.fabric_ports(tmp_path)
    assert ports == {
        "mlx5_0:1": "ACTIVE 200 Gb/sec (4X HDR)",
        "mlx5_0:2": "DOWN 200 Gb/sec (4X HDR)",
        "cxi0": "ACTIVE",
    }
    assert fabric.check_fabric(ports).verdict == "fine"
    down = fabric.check_fabric({"mlx5_0:2": "DOWN"})
    assert (down.verdict, down.cure[:14]) == ("look", "no port is up:")
    assert fabric.check_fabric(fabric.fabric_ports(tmp_path / "absent")).verdict == "fine"


def test_a_fabric_needs_locked_memory() -> None:
    assert fabric.check_memory_lock(8 << 20, {}).verdict == "fine"
    assert fabric.check_memory_lock(-1, UP).verdict == "fine"
    finding = fabric.check_memory_lock(8 << 20, UP)
    assert finding.verdict == "look"
    assert "ulimit -l unlimited" in finding.cure


@pytest.mark.parametrize(
    ("loaded", "ports", "verdict"),
    [
        ([], {}, "fine"),
        (["libucp", "libuct_ib"], UP, "fine"),
        (["libfabric"], UP, "look"),
        (["libfabric", "libibverbs"], {"cxi0": "ACTIVE"}, "look"),
        (["libfabric", "libcxi"], {"cxi0": "ACTIVE"}, "fine"),
        (["libfabric"], {"mlx5_0:1": "DOWN"}, "fine"),
    ],
)
def test_a_fabric_that_mpi_does_not_use_is_named(
    loaded: list[str], ports: dict[str, str], verdict: str
) -> None:
    finding = fabric.check_transport("MPICH 5.0.2, ch4:ofi", loaded, ports)
    assert finding.verdict == verdict
    assert ("site's MPI module" in finding.cure) == (verdict == "look")
    assert fabric.check_transport("torch.distributed, gloo", loaded, ports).verdict == "fine"


def test_libraries_are_named_without_what_wheels_add(tmp_path: Path) -> None:
    maps = tmp_path / "maps"
    maps.write_text(
        "7f00-7f01 r-xp 0 08:01 1  /usr/lib/libuct_ib-1234abcd.so.0\n"
        "7f02-7f03 r-xp 0 08:01 2  /usr/lib/libc.so.6\n7f04-7f05 rw-p 0 00:00 0 \n"
    )
    assert fabric.loaded_libraries(maps) == ["libuct_ib"]


def test_python_on_a_shared_filesystem_is_named_with_its_cure() -> None:
    local = Filesystem("ext4", False, Path("/"), "d")
    shared = Filesystem("lustre", True, Path("/"), "d")
    assert fabric.check_python_home(local, 2.0).verdict == "fine"
    assert fabric.check_python_home(local, 60.0).verdict == "look"
    finding = fabric.check_python_home(shared, 2.0)
    assert finding.verdict == "look"
    assert "on lustre, import torch 2.0 s" in finding.found
    assert "squashfs" in finding.cure


def test_directories_that_a_cache_does_not_take_are_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("TONARI_CACHE", raising=False)
    monkeypatch.setenv("SLURM_TMPDIR", str(tmp_path / "absent"))
    monkeypatch.setenv("PBS_LOCALDIR", str(tmp_path))
    (finding,) = checks.check_cache(None)
    assert finding.found.startswith(f"{tmp_path}/tonari-")
    assert finding.found.endswith(f"; not SLURM_TMPDIR={tmp_path}/absent: it is not there")


def test_launcher_and_pmi_are_named_and_no_secret(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PMI_SHARED_SECRET", "123")
    monkeypatch.setenv("PMI_CONTROL_PORT", "20000")
    monkeypatch.setenv("PALS_RANKID", "0")
    monkeypatch.delenv("SLURM_STEP_ID", raising=False)
    found = checks.check_launcher().found
    assert found.startswith("PALS mpiexec, Cray's PMI: ")
    assert "123" not in found
