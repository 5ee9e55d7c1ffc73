"""What MPICH left in shared memory goes when its job is dead, and nothing else does."""

import mmap
import os
import signal
import subprocess
import time
from pathlib import Path

import pytest

from dataio.world.abandoned import OLD_S, abandoned_files, remove_abandoned
from tests.multirank import job_environ, launch_command


def left(directory: Path, name: str, *, age_s: float = 2 * OLD_S) -> Path:
    path = directory / name
    path.write_bytes(bytes(mmap.PAGESIZE))
    os.utime(path, (time.time() - age_s,) * 2)
    return path


def test_only_old_files_of_mpich_that_no_process_maps_are_removed(tmp_path):
    dead, live = left(tmp_path, "mpich_shm_1a2b_0"), left(tmp_path, "mpich_shm_3c4d_0")
    starting = left(tmp_path, "mpich_shm_5e6f_0", age_s=1)
    others = [left(tmp_path, name) for name in ("sem.mp-1", "mpich_shm_x_0", "mpich_shm_1_0.txt")]
    link = tmp_path / "mpich_shm_7a_0"
    link.symlink_to(others[0])
    with live.open("r+b") as file, mmap.mmap(file.fileno(), 0):
        assert abandoned_files(tmp_path) == [dead]
        remove_abandoned(tmp_path)
    assert not dead.exists()
    assert all(path.exists() for path in (live, starting, link, *others))


def test_files_of_another_user_stay(tmp_path, monkeypatch):
    left(tmp_path, "mpich_shm_1a2b_0")
    monkeypatch.setattr(os, "getuid", lambda: 12345)
    assert not abandoned_files(tmp_path)


def test_a_file_that_goes_away_meanwhile_is_passed_over(tmp_path, monkeypatch):
    dead, gone = left(tmp_path, "mpich_shm_1a2b_0"), tmp_path / "mpich_shm_9_0"
    monkeypatch.setattr(Path, "iterdir", lambda directory: iter([gone, dead]))
    assert abandoned_files(tmp_path) == [dead]


@pytest.mark.multirank
def test_the_next_job_removes_what_a_killed_one_left(tmp_path):
    before = set(Path("/dev/shm").glob("mpich_shm_*"))
    program = tmp_path / "waits.py"
    program.write_text(
        "import sys\nfrom dataio.world import discover_world\nworld = discover_world()\n"
        "print(open('/proc/self/maps').read(), flush=True)\nworld.barrier(doing='begin')\n"
        "sys.stdin.read() if sys.argv[1:] else None\n"
    )
    command = [*launch_command("mpiexec", 2), str(program)]
    with subprocess.Popen(
        [*command, "wait"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=job_environ(),
        start_new_session=True, text=True,
    ) as job:  # fmt: skip
        assert job.stdout is not None
        mine = next(line.split()[-1] for line in job.stdout if "/dev/shm/mpich_shm_" in line)
        file = Path(mine)
        assert file not in before
        os.utime(file, (time.time() - 2 * OLD_S,) * 2)
        subprocess.run([*command], env=job_environ(), timeout=60, check=True, capture_output=True)
        assert file.exists(), "its job lives"
        os.killpg(job.pid, signal.SIGKILL)
        job.stdout.read()
    assert file.exists(), "nobody was left to remove it"
    subprocess.run([*command], env=job_environ(), timeout=60, check=True, capture_output=True)
    assert not file.exists()
