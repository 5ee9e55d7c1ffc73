"""What a job needs of the system is asked for, or refused by name, before it starts."""

import os
import resource
import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest

from dataio.base.errors import WorldError
from dataio.world.limits import check_shared_memory, claim_open_files
from tests.multirank import ROOT, launch_command, run_job

MIB = 1 << 20


@pytest.fixture
def limits(monkeypatch):
    """This process's limits of open files, as a list that tests may look at."""
    found = [100, 5000]
    monkeypatch.setattr(resource, "getrlimit", lambda _: tuple(found))
    monkeypatch.setattr(
        resource, "setrlimit", lambda _, new: found.__setitem__(slice(None), list(new))
    )
    return found


def test_the_limit_of_open_files_is_raised_as_far_as_it_goes(limits):
    claim_open_files()
    assert limits == [5000, 5000]
    limits[:] = [1024, resource.RLIM_INFINITY]
    claim_open_files()
    assert limits == [1 << 16, resource.RLIM_INFINITY]
    limits[:] = [resource.RLIM_INFINITY] * 2
    claim_open_files()
    assert limits == [resource.RLIM_INFINITY] * 2


def test_too_few_open_files_are_refused(limits):
    with pytest.raises(WorldError, match=r"may open 5000, expected 6000 or more.*ulimit -n 4096"):
        claim_open_files(6000)


@pytest.mark.parametrize(
    ("total", "free", "num_local", "fits"),
    [
        (64, 64, 4, True),
        (64, 47, 4, True),  # three others were faster
        (64, 64, 9, True),
        (64, 64, 10, False),
        (16, 16, 1, False),
        (24, 24, 4, False),
        (1024, 9, 1, False),  # full of what others left
    ],
)
def test_too_little_shared_memory_is_refused(monkeypatch, tmp_path, total, free, num_local, fits):
    found = SimpleNamespace(f_frsize=MIB, f_blocks=total, f_bavail=free)
    monkeypatch.setattr(os, "statvfs", lambda _: found)
    if fits:
        check_shared_memory(num_local, tmp_path)
        return
    with pytest.raises(WorldError, match=r"are free, expected .* for \d+ ranks .*--shm-size=1g"):
        check_shared_memory(num_local, tmp_path)


def test_where_there_is_no_shared_memory_nothing_is_refused(tmp_path):
    check_shared_memory(4, tmp_path / "none")


@pytest.mark.multirank
def test_a_job_under_16_mib_of_shared_memory_says_so(tmp_path: Path):
    if os.getuid() != 0 or shutil.which("unshare") is None:
        pytest.skip("only root may mount a small /dev/shm")
    small = 'mount -t tmpfs -o size=16m tmpfs /dev/shm && exec "$@"'
    begin = ["unshare", "-m", "sh", "-c", small, "sh", *launch_command("mpiexec", 2)]
    script = str(ROOT / "tests/ranks/world_verbs.py")
    status, said = run_job([*begin, script, str(tmp_path)], env=None, timeout_s=60)
    if "unshare:" in said or "mount:" in said:
        pytest.skip(f"no mount namespace here: {said}")
    assert status == 1, said
    assert "WorldError: /dev/shm: 16.8 MB of 16.8 MB are free, expected" in said
    assert "Segmentation fault" not in said
