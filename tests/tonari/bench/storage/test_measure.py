import errno
import os
import shutil
import socket
from pathlib import Path

import pytest

from dataio.world import Topology, World, run_threads, single_world, thread_worlds
from tonari.bench.errors import BenchError
from tonari.bench.storage.patterns import target as target_file
from tonari.bench.storage.patterns.measure import measure_storage
from tonari.bench.storage.patterns.options import StorageOptions
from tonari.bench.storage.patterns.phase import choose_clients, fill
from tonari.bench.storage.patterns.together import TogetherError, agree
from tonari.bench.storage.results.results import Results
from tonari.bench.storage.site.residency import Residency

SMALL = StorageOptions(
    size_bytes=1 << 20, sample_bytes=32 << 10, patterns=("random_record", "file_per_sample"),
    threads=(2,), repeats=2, time_limit_s=120,
)  # fmt: skip


@pytest.fixture
def shared(tmp_path: Path) -> Path:
    made = tmp_path / "shared"
    made.mkdir()
    return made


@pytest.fixture
def scratch(tmp_path: Path) -> Path:
    made = tmp_path / "scratch"
    made.mkdir()
    return made


def measure(
    shared: Path, scratch: Path, options: StorageOptions = SMALL, nodes=(1, 1), say=lambda _: None
) -> Results:
    worlds = thread_worlds(nodes)
    return run_threads(worlds, lambda world: measure_storage(world, shared, scratch, options, say))[
        0
    ]


def test_phases_are_cold_and_warm_as_tried_and_nothing_is_left(shared, scratch):
    found = measure(shared, scratch)
    assert found.complete
    assert not found.problems
    points = {(phase.tier, phase.pattern, phase.clients, phase.wanted) for phase in found.phases}
    both = [(name, wanted) for name in SMALL.patterns for wanted in ("cold", "warm")]
    assert points == {
        *(("shared", name, clients, wanted) for name, wanted in both for clients in (1, 2)),
        *(("local", name, 2, wanted) for name, wanted in both),
    }
    for phase in found.phases:
        assert len(phase.repeats) == 2
        (read,) = (one for one in phase.operations if one.name == "read")
        assert read.count * (32 << 10) == sum(sum(one.bytes_of_client) for one in phase.repeats)
        assert len(read.p50_of_repeat_s) == len(phase.repeats)
        for repeat in phase.repeats:
            assert len(repeat.bytes_of_client) == len(repeat.seconds_of_client) == phase.clients
            assert repeat.seconds == max(repeat.seconds_of_client)
            if found.site.name in ("ext4", "xfs", "btrfs"):
                # Ranks are threads here, so a process's own counters are seen by both.
                assert repeat.verdict.state in (phase.wanted, "unknown")
                assert len(repeat.verdict_of_node) == phase.nodes == phase.clients
        assert {operation.name for operation in phase.operations} >= {"open", "read", "close"}
    assert [link.nodes for link in found.links] == [
        (f"{socket.gethostname()} (0)", f"{socket.gethostname()} (1)")
    ]
    assert {scaling.pattern for scaling in found.scalings} == set(SMALL.patterns)
    assert [scaling.readers for scaling in found.scalings] == [[2, 4]] * 4
    assert [*shared.iterdir()] == [*scratch.iterdir()] == []


def test_a_cold_phase_reads_every_byte_once_and_a_phase_alone_is_judged_by_its_counter(
    shared, scratch
):
    found = measure_storage(single_world(), shared, scratch, SMALL, lambda _: None)
    for phase in found.phases:
        if phase.wanted == "cold":
            share = 512 << 10 if phase.pattern == "random_record" else 256 << 10
            assert [repeat.bytes_of_client for repeat in phase.repeats] == [[share]] * 2
        if found.site.name in ("ext4", "xfs", "btrfs"):
            assert {repeat.verdict.state for repeat in phase.repeats} == {phase.wanted}
    assert found.links == []


def test_storms_bursts_and_datasets_are_measured_when_asked_for(shared, scratch, tmp_path):
    (tmp_path / "train-0.tar").write_bytes(bytes(1 << 20))
    options = StorageOptions(
        size_bytes=1 << 20, sample_bytes=32 << 10, patterns=("checkpoint_burst",), threads=(1,),
        repeats=1, metadata_storm=True, dataset=[str(tmp_path / "train-0.tar")],
    )  # fmt: skip
    found = measure(shared, scratch, options, nodes=(1,))
    names = [phase.pattern for phase in found.phases]
    assert names == ["dataset", "dataset", "checkpoint_burst", "metadata_storm"]
    assert found.phases[3].repeats[0].bytes_of_client == [0]
    assert found.phases[0].repeats[0].bytes_of_client == [1 << 20]
    assert (tmp_path / "train-0.tar").stat().st_size == 1 << 20, "the user's files stay"


def test_after_the_time_limit_nothing_is_begun_and_what_is_missing_is_said(shared, scratch):
    options = StorageOptions(
        size_bytes=1 << 20, sample_bytes=32 << 10, threads=(1,), time_limit_s=1e-9
    )
    found = measure(shared, scratch, options)
    assert not found.phases
    assert not found.complete
    assert "28 of 28 phases were not measured" in found.problems[0]
    assert [*shared.iterdir()] == [*scratch.iterdir()] == []


def test_ranks_that_see_other_directories_are_told_by_content(shared, scratch, monkeypatch):
    monkeypatch.setattr(target_file, "VISIBLE_S", 0.0)
    other = shared.with_name("other")
    other.mkdir()

    def run(world: World) -> None:
        with pytest.raises(TogetherError, match=r"does not hold what rank 1 .node 1. has written"):
            measure_storage(
                world, shared if world.rank == 0 else other, scratch, SMALL, lambda _: None
            )

    run_threads(thread_worlds((1, 1)), run)
    assert [*shared.iterdir()] == [*other.iterdir()] == [*scratch.iterdir()] == []


@pytest.mark.parametrize(
    ("number", "message"),
    [
        (errno.EDQUOT, "expected room within your quota .* smaller --size"),
        (errno.ENOSPC, "expected room .* smaller --size"),
        (errno.EROFS, "mounted read-only: name another"),
    ],
)
def test_what_the_filesystem_refuses_one_rank_ends_all_with_one_message(
    shared, scratch, monkeypatch, number, message
):
    write = os.write

    def refuse(descriptor, data):
        path = str(Path(f"/proc/self/fd/{descriptor}").readlink())
        if path.endswith("samples-1/000003") and str(shared) in path:
            raise OSError(number, os.strerror(number))
        return write(descriptor, data)

    monkeypatch.setattr(os, "write", refuse)

    def run(world: World) -> str:
        with pytest.raises(TogetherError, match=message) as caught:
            measure_storage(world, shared, scratch, SMALL, lambda _: None)
        return str(caught.value)

    said = run_threads(thread_worlds((1, 1)), run)
    assert said[0] == said[1]
    assert "samples-1/000003" in said[0]
    assert said[0].endswith("(rank 1)")
    assert [*shared.iterdir()] == [*scratch.iterdir()] == []


def test_a_file_that_vanishes_in_the_middle_is_named_and_the_rest_is_removed(shared, scratch):
    def say(words: str) -> None:
        if ": random_record" in words:
            for folder in shared.glob("*/samples-1"):
                shutil.rmtree(folder)

    def run(world: World) -> str:
        with pytest.raises(TogetherError, match=r"samples-1/.*No such file.*expected") as caught:
            measure_storage(world, shared, scratch, SMALL, say)
        return str(caught.value)

    said = run_threads(thread_worlds((1, 1)), run)
    assert said[0] == said[1]
    assert [*shared.iterdir()] == [*scratch.iterdir()] == []


def test_an_error_of_our_own_leaves_nothing_behind(shared, scratch):
    def say(words: str) -> None:
        if ": random_record" in words:
            raise ZeroDivisionError("planted")

    with pytest.raises(ZeroDivisionError):
        measure(shared, scratch, say=say)
    assert [*shared.iterdir()] == [*scratch.iterdir()] == []


def test_more_than_the_space_that_is_free_is_refused_before_anything_is_written(shared, scratch):
    options = StorageOptions(size_bytes=1 << 50, patterns=("random_record",))
    with pytest.raises(BenchError, match=r"no space: .* MiB are free, .* smaller --size"):
        measure(shared, scratch, options, nodes=(1,))
    assert [*shared.iterdir()] == []


def test_more_clients_than_ranks_are_refused(shared, scratch):
    options = StorageOptions(clients=(3,))
    with pytest.raises(BenchError, match="3 clients: found 2 ranks"):
        measure(shared, scratch, options)


def test_what_a_killed_run_left_is_told_and_not_touched(shared, scratch):
    old = shared / ".tonari-bench-io-0123"
    old.mkdir()
    options = StorageOptions(size_bytes=1 << 20, sample_bytes=32 << 10, time_limit_s=1e-9)
    found = measure(shared, scratch, options, nodes=(1,))
    assert str(old) in found.problems[0]
    assert old.exists()


@pytest.mark.parametrize(
    ("held", "reads"),
    [([40, 70, 95, 100], 4), ([40, 70, 70], 3), ([100], 1), ([None], 1), (range(100), 8)],
)
def test_files_are_read_until_no_more_of_them_comes_into_memory(held, reads, tmp_path, monkeypatch):
    path, looks, calls = tmp_path / "file", iter(held), []
    path.write_bytes(bytes(100))

    def resident(paths):
        return Residency(bytes_in_files=100, bytes_resident=next(looks), said_by="mincore")

    def read(_, *, paths):
        calls.append(paths)
        return iter([100])

    monkeypatch.setattr("tonari.bench.storage.patterns.phase.resident_bytes", resident)
    monkeypatch.setattr("tonari.bench.storage.patterns.phase.read_files", read)
    fill([path])
    assert calls == [[path]] * reads


def test_clients_are_spread_over_nodes_before_a_node_has_two():
    topology = Topology.from_layout((2, 2, 1))
    assert choose_clients(topology, 3) == [0, 2, 4]
    assert choose_clients(topology, 4) == [0, 1, 2, 4]


def test_an_error_of_one_rank_is_raised_by_all_with_its_number():
    def work(world: World) -> None:
        def fail() -> None:
            if world.rank == 1:
                raise BenchError("broken; mend it")

        with pytest.raises(TogetherError, match=r"broken; mend it \(rank 1\)"):
            agree(world, fail, doing="working")

    run_threads(thread_worlds((1, 1, 1)), work)


@pytest.mark.parametrize(
    "wrong",
    [
        {"patterns": ("backwards",)}, {"threads": (0,)}, {"repeats": 0}, {"time_limit_s": 0},
        {"sample_bytes": 1000}, {"clients": (0,)},
    ],
)  # fmt: skip
def test_wrong_options_are_refused(wrong):
    with pytest.raises(ValueError, match=r"must be|expected"):
        StorageOptions(**wrong)
