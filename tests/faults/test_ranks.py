"""A loader on real ranks: uneven shards, changing numbers, scarce memory, ranks that fall."""

import contextlib
import json
import os
import re
import shutil
import signal
import time
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.dataio.source.shards import numbered, write_tar
from tests.multirank import ROOT, ends, launch_command, read_reports, run_job

pytestmark = pytest.mark.multirank

SHARD_ROWS = (31, 7, 40, 1, 33, 20, 19)
NUM_SAMPLES = sum(SHARD_ROWS)
EPOCHS = 3
MIB = 1 << 20


def write_shards(directory: Path, rows: tuple[int, ...], num_bytes: int) -> str:
    directory.mkdir()
    first = 0
    for number, count in enumerate(rows):
        path = directory / f"{number}.tar"
        write_tar(path, numbered(count, first=first, num_bytes=num_bytes))
        first += count
    return str(directory / f"{{0..{len(rows) - 1}}}.tar")


@pytest.fixture
def shards(tmp_path):
    """Seven shards of very unequal sizes."""
    return write_shards(tmp_path / "shards", SHARD_ROWS, 200)


def trained_by_epoch(reports) -> list[Counter[int]]:
    counted: list[Counter[int]] = [Counter() for _ in range(EPOCHS)]
    for report in reports:
        for epoch, sample_id in report["trained"]:
            counted[epoch][sample_id] += 1
    return counted


ONCE = Counter(range(NUM_SAMPLES))


@pytest.mark.parametrize(
    ("ranks_per_node", "stage"),
    [
        ("1", "overlap"),
        pytest.param("3", "before", marks=pytest.mark.nightly),
        pytest.param("1", "before", marks=pytest.mark.nightly),
        pytest.param("3", "overlap", marks=pytest.mark.nightly),
    ],
)
def test_seven_shards_on_three_ranks_give_equal_steps_and_lose_nothing(
    run_ranks, shards, tmp_path, stage, ranks_per_node
):
    # Rank 0 has 51 rows, the others 50: without care it alone would have an eleventh batch.
    options = {"source": shards, "cache": str(tmp_path / "cache"), "stage": stage, "batch_size": 5}
    environment = {"TONARI_RANKS_PER_NODE": ranks_per_node}
    ended = run_ranks("loader_job", 3, json.dumps(options), env=environment, fresh=True)
    assert [report["steps"] for report in ended.reports] == [ended.reports[0]["steps"]] * 3
    assert ended.reports[0]["steps"] == [[0, 11, 11], [1, 11, 11], [2, 11, 11]]
    assert trained_by_epoch(ended.reports) == [ONCE] * EPOCHS
    assert sum(report["wrong"] for report in ended.reports) == 0


@dataclass(frozen=True)
class Leg:
    """A job of the chain: the last one runs to the end."""

    ranks: int
    ranks_per_node: int
    batch_size: int
    num_threads: int
    stop: int | None


LEGS = (
    Leg(4, 2, 4, 0, 8),
    Leg(3, 3, 5, 4, 2),
    Leg(1, 1, 7, 2, 20),
    Leg(4, 2, 3, 1, 3),
    Leg(4, 1, 6, 4, None),
)


@pytest.mark.parametrize("by_save", [True, pytest.param(False, marks=pytest.mark.nightly)])
def test_four_three_one_and_four_ranks_train_every_sample_of_each_epoch_once(
    run_ranks, shards, tmp_path, by_save
):
    reports, at = [], None
    for number, leg in enumerate(LEGS):
        save = str(tmp_path / f"saved{number}") if by_save else ""
        options = {
            "source": shards, "cache": str(tmp_path / "cache"), "at": at, "save": save,
            "batch_size": leg.batch_size, "num_threads": leg.num_threads, "stop": leg.stop,
        }  # fmt: skip
        environment = {"TONARI_RANKS_PER_NODE": str(leg.ranks_per_node)}
        ended = run_ranks("loader_job", leg.ranks, json.dumps(options), env=environment)
        assert len({json.dumps(report["steps"]) for report in ended.reports}) == 1
        assert len({json.dumps(report["state"]) for report in ended.reports}) == 1
        reports += ended.reports
        at = save or ended.reports[0]["state"]
    assert trained_by_epoch(reports) == [ONCE] * EPOCHS


POOL_ROWS = (256,) * 8
ROW_BYTES = 32 << 10


@pytest.mark.parametrize("ranks_per_node", [pytest.param("4", marks=pytest.mark.nightly), "2"])
def test_four_ranks_hold_the_cache_in_memory_once_and_stay_flat(
    run_ranks, tmp_path, ranks_per_node
):
    """On one node as well as on two that exchange: together they hold the dataset once."""
    pool_bytes = sum(POOL_ROWS) * ROW_BYTES
    options = {
        "source": write_shards(tmp_path / "shards", POOL_ROWS, ROW_BYTES),
        "cache": str(tmp_path / "cache"), "batch_size": 16, "epochs": 20, "exchange": 0.1,
        "hides": True, "memory": True,
    }  # fmt: skip
    environment = {"TONARI_RANKS_PER_NODE": ranks_per_node}
    reports = run_ranks("loader_job", 4, json.dumps(options), env=environment, fresh=True).reports
    mapped = sum(report["files"][-1] - report["files_before"] for report in reports)
    assert 0.7 * pool_bytes < mapped < 1.5 * pool_bytes, "four would be one a rank"
    for report in reports:
        assert report["private"][-1] < report["private"][2] + 6 * MIB, report["private"]


@pytest.mark.parametrize("num_processes", [pytest.param(0, marks=pytest.mark.nightly), 2])
def test_little_shared_memory_and_few_descriptors_are_enough_and_workers_have_no_mpi(
    shards, tmp_path, monkeypatch, num_processes
):
    if os.getuid() != 0 or shutil.which("unshare") is None:
        pytest.skip("only root may mount a small /dev/shm")
    options = {
        "source": shards, "cache": str(tmp_path / "cache"), "num_descriptors": 256,
        "num_processes": num_processes, "num_threads": 0 if num_processes else 2,
    }  # fmt: skip
    # Named here, not in the ranks: the private mount must cover their children too.
    small = 'mount -t tmpfs -o size=64m tmpfs /dev/shm && exec "$@"'
    script = str(ROOT / "tests/ranks/loader_job.py")
    begin = ["unshare", "-m", "sh", "-c", small, "sh", *launch_command("mpiexec", 4)]
    status, said = run_job(
        [*begin, script, str(tmp_path), json.dumps(options)],
        env={"TONARI_RANKS_PER_NODE": "2"},
        timeout_s=120,
    )
    if "unshare:" in said or "mount:" in said:
        pytest.skip(f"no mount namespace here: {said}")
    assert status == 0, said
    reports = read_reports(tmp_path, 4)
    assert trained_by_epoch(reports) == [ONCE] * EPOCHS
    assert sum(report["with_mpi"] for report in reports) == 0, "workers have no MPI"


def end_process(path: Path) -> None:
    with contextlib.suppress(ProcessLookupError, FileNotFoundError):
        os.kill(int(path.read_text()), signal.SIGKILL)


@pytest.mark.parametrize("ranks_per_node", [pytest.param("4", marks=pytest.mark.nightly), "2"])
def test_a_rank_that_stops_is_named_and_every_other_ends_within_the_deadline(
    shards, tmp_path, ranks_per_node
):
    options = {
        "source": shards, "cache": str(tmp_path / "cache"), "frozen": 2, "timeout_s": 3.0,
    }  # fmt: skip
    script = str(ROOT / "tests/ranks/loader_job.py")
    started = time.monotonic()
    try:
        status, said = run_job(
            [*launch_command("mpiexec", 4), script, str(tmp_path), json.dumps(options)],
            env={"TONARI_RANKS_PER_NODE": ranks_per_node},
            timeout_s=60,
        )
    finally:
        end_process(tmp_path / "2.pid")
    assert status != 0
    assert time.monotonic() - started < 45
    assert re.search(r"waited 3 s for rank 2 while .*look at its last log lines", said), said
    assert not re.search(r"for rank [013]", said), "who waits for a rank that waits is no cause"
    assert not read_reports(tmp_path, 4)
    for path in tmp_path.glob("*.pid"):
        assert ends(int(path.read_text())), f"rank {path.stem} is still there"


@pytest.mark.parametrize(
    ("stage", "fall_epoch"), [pytest.param("before", 0, marks=pytest.mark.nightly), ("overlap", 1)]
)
def test_of_a_rank_with_a_named_error_the_job_says_that_and_nothing_else(
    run_ranks, shards, tmp_path, stage, fall_epoch
):
    options = {
        "source": shards, "cache": str(tmp_path / "cache"), "failed": 1, "hides": True,
        "stage": stage, "fall_epoch": fall_epoch,
    }  # fmt: skip
    environment = {"TONARI_RANKS_PER_NODE": "2"}
    ended = run_ranks("loader_job", 4, json.dumps(options), env=environment, check=False)
    lines = ended.output.splitlines()
    assert ended.returncode == 1, ended.output
    assert lines[0] == "[rank 1] Traceback (most recent call last):", ended.output
    assert sum("uncaught SourceError: train-7.tar: is damaged" in line for line in lines) == 1
    assert ended.output.count("Traceback") == 1, ended.output
    assert not re.search("signal 11|unknown parameter type", ended.output), ended.output


@pytest.mark.parametrize(
    ("stage", "fall_epoch"), [pytest.param("before", 1, marks=pytest.mark.nightly), ("overlap", 0)]
)
def test_a_killed_job_starts_again_at_once_and_leaves_no_litter(
    run_ranks, shards, tmp_path, stage, fall_epoch
):
    options = {
        "source": shards, "cache": str(tmp_path / "cache"), "killed": 1, "timeout_s": 5.0,
        "hides": True, "stage": stage, "fall_epoch": fall_epoch,
    }  # fmt: skip
    environment = {"TONARI_RANKS_PER_NODE": "2"}
    killed = run_ranks("loader_job", 4, json.dumps(options), env=environment, check=False)
    assert killed.returncode != 0
    options |= {"killed": -1, "hides": False}
    ended = run_ranks("loader_job", 4, json.dumps(options), env=environment)
    assert trained_by_epoch(ended.reports) == [ONCE] * EPOCHS
    left = sorted(tmp_path.joinpath("cache").rglob("*"))
    assert not [path for path in left if path.suffix == ".partial" or "scores" in path.name]
