"""The same verbs and the same failures on real ranks."""

import re
from collections.abc import Callable
from typing import Any

import pytest

pytestmark = pytest.mark.multirank
Launch = Callable[..., Any]
SIZES = [
    ("mpiexec", 1), ("mpiexec", 4), ("torchrun", 3),
    pytest.param("mpiexec", 2, marks=pytest.mark.nightly),
    pytest.param("mpiexec", 3, marks=pytest.mark.nightly),
    pytest.param("torchrun", 2, marks=pytest.mark.nightly),
]  # fmt: skip


@pytest.mark.smoke
@pytest.mark.parametrize(("launcher", "n"), SIZES)
def test_every_verb_works_on_real_ranks(launch: Launch, launcher: str, n: int) -> None:
    job = launch("world_verbs", n, launcher=launcher, TONARI_RANKS_PER_NODE="2")
    assert job.status == 0, job.stderr
    assert sorted(job.reports) == list(range(n))
    for rank, report in job.reports.items():
        assert report["world_size"] == n
        assert (report["node"], report["local_rank"]) == divmod(rank, 2)
        assert report["replicas_per_node"] == [min(2, n - first) for first in range(0, n, 2)]
        assert report["gathered"] == ["x" * source for source in range(n)]
        assert report["array"] == [[0.1 * (source + 1), -source] for source in range(n)]
        assert report["sum"] == job.reports[0]["sum"]
        assert report["max"] == [0.1 * n, 0]
        before = (rank - 1) % n
        assert report["ring"] == ([before, 0, before, 1, before, before] if n > 1 else [])
        # What is not needed is not imported.
        assert report["mpi"] == (launcher == "mpiexec" and n > 1)
        assert report["torch"] == (launcher == "torchrun")


def test_ranks_of_one_machine_are_one_node(launch: Launch) -> None:
    job = launch("world_verbs", 2, fresh=True)
    assert [report["replicas_per_node"] for report in job.reports.values()] == [[2], [2]]


@pytest.mark.parametrize(
    ("launcher", "way", "message"),
    [
        ("mpiexec", "error", "uncaught OSError: the disk of rank 1 is on fire; ending all 3 ranks"),
        ("mpiexec", "thread", "uncaught OSError: the disk of rank 1 is on fire"),
        ("mpiexec", "sys_exit", r"left by sys.exit\(3\); ending all 3 ranks"),
        ("mpiexec", "os_exit", r"left by os._exit\(0\) while MPI runs; ending all 3 ranks; "),
        ("torchrun", "error", "uncaught OSError: the disk of rank 1 is on fire"),
    ],
)
def test_one_rank_that_fails_ends_the_job(
    launch: Launch, launcher: str, way: str, message: str
) -> None:
    job = launch("world_fails", 3, way, launcher=launcher)
    assert job.status == 1, job.stderr
    assert re.search(rf"\[rank 1\] {message}", job.stderr), job.stderr
    assert job.seconds < 60, "the others would have waited 600 s"


def test_only_the_culprit_speaks_while_others_train_beside_an_exchange(launch: Launch) -> None:
    job = launch("world_fails", 4, "training")
    assert job.status == 1, job.stderr
    lines = job.stderr.splitlines()
    assert lines[0] == "[rank 1] Traceback (most recent call last):", job.stderr
    assert sum("uncaught OSError: the disk of rank 1 is on fire" in line for line in lines) == 1
    assert job.stderr.count("Traceback") == 1, job.stderr
    assert "unknown parameter type" not in job.stderr


def test_too_few_open_files_are_an_error_before_anything_else(launch: Launch) -> None:
    job = launch("world_fails", 2, "small")
    assert job.status == 1, job.stderr
    found = "open files: this process may open 40, expected 64 or more for its connections"
    assert f"WorldError: {found}" in job.stderr
    assert "run `ulimit -n 4096` before the job" in job.stderr


@pytest.mark.parametrize(
    "launcher", ["mpiexec", pytest.param("torchrun", marks=pytest.mark.nightly)]
)
def test_of_an_error_that_all_ranks_have_rank_0_alone_speaks(launch: Launch, launcher: str) -> None:
    job = launch("world_fails", 3, "all", launcher=launcher)
    assert job.status != 0
    told = re.findall(
        r"^\[rank (\d)\].*SourceError: /nowhere/train-0.tar: no such", job.stderr, re.M
    )
    assert set(told) == {"0"}, job.stderr
    assert job.seconds < 30


def test_a_traceback_names_its_rank_on_every_line(launch: Launch) -> None:
    stderr = launch("world_fails", 2, "error", fresh=True).stderr
    assert re.search(r"^\[rank 1\] Traceback", stderr, re.M)
    assert re.search(r"^\[rank 1\] OSError: the disk of rank 1 is on fire$", stderr, re.M)


def test_an_exit_that_was_caught_ends_nothing(launch: Launch) -> None:
    job = launch("world_fails", 2, "sys_exit_caught")
    assert job.status == 0, job.stderr


@pytest.mark.parametrize("launcher", ["mpiexec", "torchrun"])
def test_one_rank_that_stalls_is_named(launch: Launch, launcher: str) -> None:
    job = launch("world_fails", 3, "stall", launcher=launcher)
    assert job.status != 0
    found = re.search(r"rank 0: waited 2 s for rank 1 while waiting for everyone", job.stderr)
    assert found, job.stderr
    assert job.seconds < 30


def test_mpi_and_torch_that_disagree_are_an_error(launch: Launch) -> None:
    job = launch("world_disagree", 2)
    assert "MPI and torch disagree: MPI says rank 1 of 2, torch" in job.reports[1]
    assert "torch.distributed (rank 0 of 1)" in job.reports[0]
    assert "use one launcher" in job.reports[0]
