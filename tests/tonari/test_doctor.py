"""The doctor calls fine what works and broken what does not, and each cure is named."""

import json
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from dataio.base.errors import install_command
from dataio.base.filesystem import Filesystem
from dataio.rows import at_once, jpeg
from tests.multirank import Launcher, launch_command, run_job
from tonari import checks, doctor, probes
from tonari.checks import Finding
from tonari.cli import main
from tonari.doctor import merge
from tonari.errors import CommandError
from tonari.processes import run_group


def told(finding: Finding) -> tuple[str, str]:
    return finding.verdict, finding.cure


def test_an_old_python_is_broken() -> None:
    assert told(checks.check_python((3, 9, 18))) == ("broken", "use Python 3.10 or later")
    assert checks.check_python((3, 10, 0)).verdict == "fine"


def test_missing_packages_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    absent = {"matplotlib"}
    monkeypatch.setattr(checks, "_version", lambda name: None if name in absent else "1.0")
    assert told(checks.check_packages()) == (
        "look",
        f"if you need them: {install_command('report')}",
    )
    absent.add("numpy")
    assert told(checks.check_packages()) == ("broken", "numpy missing: pip install numpy")


@pytest.mark.parametrize(
    ("filesystem", "free_bytes", "verdict", "cure"),
    [
        (Filesystem("xfs", False, Path("/"), "d"), 10**12, "fine", ""),
        (Filesystem("xfs", False, Path("/"), "d"), 10**9, "look", "free some space"),
        (Filesystem("tmpfs", False, Path("/"), "d"), 10**12, "look", "it lives in memory"),
        (Filesystem("nfs4", True, Path("/"), "d"), 10**12, "look", "each node has its own"),
    ],
)
def test_the_cache_directory_is_judged(
    filesystem: Filesystem,
    free_bytes: int,
    verdict: str,
    cure: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(checks, "filesystem_of", lambda path: filesystem)
    usage = SimpleNamespace(free=free_bytes)
    monkeypatch.setattr("shutil.disk_usage", lambda path: usage)
    (finding,) = checks.check_cache(str(tmp_path))
    assert finding.verdict == verdict
    assert cure in finding.cure


def test_a_cache_that_cannot_be_made_is_broken(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    (finding,) = checks.check_cache(str(tmp_path / "file" / "a"))
    assert finding.verdict == "broken"
    assert finding.cure.startswith("make its parent writable or give another directory")


@pytest.mark.parametrize(
    ("bound", "present", "quota", "threads", "verdict", "cure"),
    [
        (8, 8, None, None, "fine", ""),
        (1, 1, None, None, "fine", ""),
        (1, 8, None, None, "look", "-bind-to none"),
        (8, 8, 2.5, None, "look", "use about 2"),
        (4, 8, None, "8", "look", "OMP_NUM_THREADS to at most 4"),
    ],
)
def test_cpu_binding_is_judged(
    bound: int,
    present: int,
    quota: float | None,
    threads: str | None,
    verdict: str,
    cure: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    if threads:
        monkeypatch.setenv("OMP_NUM_THREADS", threads)
    finding = checks.check_cpus(bound, present, quota)
    assert finding.verdict == verdict
    assert cure in finding.cure


def test_cpu_quota_reads_both_kinds_of_control_group(tmp_path: Path) -> None:
    assert checks.cpu_quota(tmp_path) is None
    (tmp_path / "cpu.max").write_text("max 100000\n")
    assert checks.cpu_quota(tmp_path) is None
    (tmp_path / "cpu.max").write_text("250000 100000\n")
    assert checks.cpu_quota(tmp_path) == 2.5
    (tmp_path / "cpu").mkdir()
    (tmp_path / "cpu" / "cpu.cfs_quota_us").write_text("150000\n")
    (tmp_path / "cpu" / "cpu.cfs_period_us").write_text("100000\n")
    assert checks.cpu_quota(tmp_path) == 1.5


def test_limits_are_judged(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert checks.check_open_files(1024, 1024).verdict == "fine"
    assert told(checks.check_open_files(256, 4096)) == (
        "look",
        "run `ulimit -n 4096` before the job",
    )
    assert "administrator" in checks.check_open_files(256, 512).cure
    assert checks.check_shm(tmp_path / "absent").verdict == "look"
    monkeypatch.setattr("shutil.disk_usage", lambda path: SimpleNamespace(free=64 * 2**20))
    assert "--shm-size=1g" in checks.check_shm(tmp_path).cure


@pytest.mark.parametrize(
    ("verdicts", "last"),
    [
        (["fine", "fine"], "Tonari works here: all is fine."),
        (["fine", "look"], "Tonari works here; look at: check 1."),
        (["broken", "look", "broken"], "mend what is broken (check 0, check 2)."),
    ],
)
def test_the_last_line_is_a_verdict(
    capsys: pytest.CaptureFixture[str], verdicts: list[Any], last: str
) -> None:
    doctor._show((Finding(f"check {n}", v, "") for n, v in enumerate(verdicts)), as_json=False)
    assert capsys.readouterr().out.splitlines()[-1].endswith(last)


def test_what_ranks_found_alike_is_said_once() -> None:
    python = Finding("Python", "fine", "3.11.7")
    cache = Finding("cache", "fine", "/tmp on xfs")
    full = Finding("cache", "look", "/tmp on tmpfs", "free some")
    assert list(merge([[python, cache], [python, full], [python, cache]])) == [
        python,
        Finding("cache (rank 0, 2)", "fine", "/tmp on xfs"),
        Finding("cache (rank 1)", "look", "/tmp on tmpfs", "free some"),
    ]


def test_a_probe_that_stalls_or_fails_is_broken(monkeypatch: pytest.MonkeyPatch) -> None:
    def probe(program: str, timeout_s: float) -> Finding:
        return probes._probe(
            "MPI", [sys.executable, "-c", program], 2, timeout_s=timeout_s, cure="fix it"
        )

    stalled = probe("import time; time.sleep(60)", 0.3)
    assert stalled.verdict == "broken"
    assert stalled.found.startswith("no answer within 0.3 s")
    assert stalled.cure == "wait longer (--timeout-s), else fix it"
    failed = probe("raise RuntimeError('no network')", 30)
    assert failed.found == "ended with 1: RuntimeError: no network"
    # Two worlds of one rank each: the launcher and mpi4py are of different MPIs.
    alone = probe("print('tonari-probe: 1 rank on 1 node exchanged bytes')", 30)
    assert (alone.verdict, alone.cure) == ("broken", "fix it")
    monkeypatch.setattr(probes, "mpiexec_command", _no_launcher)
    assert told(probes.probe_mpi(2, timeout_s=1)) == ("broken", "load one")


def _no_launcher(num_ranks: int) -> list[str]:
    raise CommandError("no mpiexec; load one")


def test_a_group_that_takes_too_long_is_ended_whole() -> None:
    program = (
        "import subprocess, sys, time\n"
        "child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)'])\n"
        "print(child.pid, flush=True); time.sleep(600)"
    )
    status, said = run_group([sys.executable, "-c", program], timeout_s=2.0)
    assert status is None
    deadline = time.monotonic() + 10
    while _runs(int(said)):
        assert time.monotonic() < deadline, "a process was left behind"


def _runs(pid: int) -> bool:
    stat = Path(f"/proc/{pid}/stat")
    return stat.exists() and stat.read_text().rpartition(") ")[2][0] != "Z"


def launch(launcher: Launcher) -> list[str]:
    try:
        return launch_command(launcher, 2)
    except CommandError as absent:
        pytest.skip(str(absent))


@pytest.mark.multirank
def test_doctor_finds_mpi_and_torch_fine(capsys: pytest.CaptureFixture[str]) -> None:
    launch("mpiexec")
    assert main(["doctor", "--json"]) == 0
    found = {f["check"]: f for f in json.loads(capsys.readouterr().out)["findings"]}
    for check in ("MPI", "torch.distributed"):
        assert found[check]["found"].startswith("2 ranks on 1 node exchanged bytes"), found[check]


@pytest.mark.multirank
@pytest.mark.parametrize(
    "launcher", ["mpiexec", pytest.param("torchrun", marks=pytest.mark.nightly)]
)
def test_doctor_speaks_once_for_all_ranks_of_a_job(launcher: Launcher, tmp_path: Path) -> None:
    arguments = ["-m", "tonari", "doctor", "--cache", str(tmp_path / "cache")]
    status, said = run_job([*launch(launcher), *arguments], env=None, timeout_s=120)
    assert status == 0, said
    assert said.count("fine     Python: ") == 1, said
    assert "fine     ranks: 2 ranks on 1 node exchanged bytes" in said


@pytest.mark.multirank
def test_doctor_exits_1_when_a_rank_finds_something_broken(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    arguments = ["-m", "tonari", "doctor", "--cache", str(tmp_path / "file" / "a")]
    status, said = run_job([*launch("mpiexec"), *arguments], env=None, timeout_s=120)
    assert status == 1, said
    assert "broken   cache: " in said


@pytest.mark.multirank
def test_ranks_that_left_the_group_are_ended_by_their_launcher() -> None:
    program = "import os, time; print('pid', os.getpid(), flush=True); time.sleep(600)"
    status, said = run_group([*launch("mpiexec"), "-c", program], timeout_s=5.0)
    pids = [int(line.split()[1]) for line in said.splitlines() if line.startswith("pid ")]
    assert status is None
    assert len(pids) == 2, said
    assert not any(_runs(pid) for pid in pids)


def test_pictures_are_decoded_by_what_is_there(monkeypatch):
    monkeypatch.setattr(jpeg, "_candidates", lambda: [])
    jpeg.turbojpeg.cache_clear()
    assert told(checks.check_pictures()) == (
        "look",
        f"for quicker random crops: {install_command('images')}, or libjpeg-turbo 3",
    )
    monkeypatch.undo()
    jpeg.turbojpeg.cache_clear()
    if jpeg.turbojpeg() is None:
        return
    if at_once.library() is not None:
        assert told(checks.check_pictures()) == ("fine", "")
    monkeypatch.setattr(at_once, "library", lambda: None)
    verdict, cure = told(checks.check_pictures())
    assert verdict == "look"
    assert "C compiler" in cure
