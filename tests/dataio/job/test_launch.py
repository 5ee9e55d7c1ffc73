"""Which CUDA device and cores a rank takes, and what a job that cannot be joined says."""

import os
import threading
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from dataio.base.errors import WorldError
from dataio.job.launch import choose_device, join, share_cores
from dataio.world import World, run_threads, thread_worlds
from tests.multirank import Launcher, launch_command, run_job

TWO_NODES = (2, 2)


@pytest.mark.parametrize(
    ("seen", "expected"),
    [
        ([["a", "b"], ["a", "b"], ["c", "d"], ["c", "d"]], [0, 1, 0, 1]),
        # As srun --gpus-per-task shows them: each its own, which it counts from 0.
        ([["a"], ["b"], ["c"], ["d"]], [0, 0, 0, 0]),
        ([["a"], ["b"], ["c", "d"], ["c", "d"]], [0, 0, 0, 1]),
    ],
)
def test_each_rank_of_a_node_takes_a_device_of_its_own(
    seen: list[list[str]], expected: list[int]
) -> None:
    def choose(world: World) -> int:
        return choose_device(world, seen[world.rank])

    assert run_threads(thread_worlds(TWO_NODES), choose) == expected


def test_fewer_devices_than_ranks_are_refused() -> None:
    def choose(world: World) -> str:
        try:
            return str(choose_device(world, ["a"] if world.rank < 2 else ["c", "d"]))
        except WorldError as error:
            return str(error)

    told = run_threads(thread_worlds(TWO_NODES), choose)
    assert [told[0], *told[2:]] == ["0", "0", "1"]
    assert told[1].startswith("rank 1: local rank 1, but it sees 1 CUDA devices; start at most 1")


@pytest.mark.parametrize(
    ("cores", "given"),
    [
        ([{0, 1, 2, 3}] * 4, [1, 1, 1, 1]),
        # As srun binds ranks: each has its own, or those of a socket has each rank there.
        ([{0, 1}, {2, 3}, {4, 5}, {6, 7}], [2, 2, 2, 2]),
        ([{0, 1, 2, 3}] * 2 + [{4, 5}] * 2, [2, 2, 1, 1]),
    ],
)
def test_ranks_share_the_cores_that_they_have_in_common(monkeypatch, cores, given) -> None:
    def share(world: World) -> int:
        now.rank = world.rank
        share_cores(world)
        return chosen[world.rank]

    now, chosen = threading.local(), dict[int, int]()
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: cores[now.rank])
    monkeypatch.setattr(torch, "set_num_threads", lambda count: chosen.update({now.rank: count}))
    assert run_threads(thread_worlds((4,)), share) == given


def test_an_error_of_a_process_alone_leaves_no_group_to_the_next_job():
    with pytest.raises(OSError, match="the disk is full"), join(device="cpu"):
        raise OSError("the disk is full")
    assert not dist.is_initialized()


@pytest.mark.multirank
@pytest.mark.parametrize(
    "launcher", ["mpiexec", pytest.param("torchrun", marks=pytest.mark.nightly)]
)
def test_too_few_open_files_are_refused_before_any_group_is_made(
    tmp_path: Path, launcher: Launcher
) -> None:
    program = tmp_path / "joins.py"
    program.write_text("from dataio import join\n\nwith join(device='cpu'):\n    pass\n")
    command = [*launch_command(launcher, 2), str(program)]
    status, said = run_job(
        ["sh", "-c", 'ulimit -n 100 && exec "$@"', "sh", *command], env=None, timeout_s=60
    )
    assert status == 1, said
    assert "WorldError: open files: this process may open 100, expected 120 or more" in said


@pytest.mark.multirank
def test_a_process_of_torchrun_joins_as_often_as_it_likes(tmp_path: Path) -> None:
    program = tmp_path / "joins.py"
    program.write_text(
        "from dataio import join\n\nfor number in range(3):\n"
        "    with join(device='cpu', timeout_s=30) as job:\n"
        "        print('joined', number, job.world.rank, flush=True)\n"
    )
    command = [*launch_command("torchrun", 2), str(program)]
    status, said = run_job(command, env=None, timeout_s=100)
    assert (status, said.count("joined")) == (0, 6), said
