"""A forked process is as good as one that has begun anew."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from tests.forked.interpreter import Refused
from tests.forked.python import ForkedPython, wait_together
from tests.multirank import Launcher, RunRanks, ends, job_environ, launch_command, run_job

PROGRAMS = {
    "says": "import sys; print('out'); print('error', file=sys.stderr); print(sys.argv[1:])",
    "exits": "import sys; sys.exit(3)",
    "exits with words": "import sys; sys.exit('no more')",
    "raises": "def fail():\n    raise ValueError('on fire')\nfail()",
    "raises in a thread": "import threading; t = threading.Thread(target=lambda: 1 / 0); t.start()",
    "is killed": "import os; os.kill(os.getpid(), 9)",
    "aborts": "import os; os.abort()",
    "ends at once": "import os; print('lost'); os._exit(4)",
    "at exit": "import atexit; atexit.register(print, 'at exit'); print('first')",
    "hook": "import sys; sys.excepthook = lambda *a: print('hooked', a[0]); 1 / 0",
    "main": "import __main__, sys; a = 1; print(__name__, __main__.a, sys.modules['__main__'].a)",
    "path": "import os, sys; print(sys.path, os.getcwd(), __file__ if len(sys.argv) > 9 else '')",
    "limits": "import os, resource as r; print(r.getrlimit(r.RLIMIT_NOFILE), os.umask(0))",
    "cores": "import os; print(os.sched_getaffinity(0), os.nice(0))",
    "variables": "import os; print([item for item in os.environ.items() if 'TONARI_' in item[0]])",
    "input": "import sys; print(sys.stdin.read())",
}  # fmt: skip


@pytest.fixture(autouse=True)
def _only_where_ranks_are_forked(request: pytest.FixtureRequest) -> None:
    if not request.config.getoption("forked"):
        pytest.skip("ranks are forked by `pytest --forked` alone")


def run(command: list[str], directory: Path, **options: Any) -> tuple[int, bytes, bytes]:
    ended = subprocess.run(
        command, capture_output=True, timeout=60, check=False, cwd=directory,
        env=job_environ(options.pop("env", {})), **options,
    )  # fmt: skip
    return ended.returncode, ended.stdout, ended.stderr


def on_one_core() -> None:
    os.nice(1)
    os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})


def command_of(how: str, program: str, directory: Path) -> list[str]:
    (directory / "program.py").write_text(program)
    return {
        "script": ["program.py", "a", "-u"],
        "module": ["-m", "program", "a", "-m"],
        "code": ["-c", program, "a", "-c"],
    }[how]


@pytest.mark.parametrize("how", ["script", "module", "code"])
def test_it_ends_and_writes_as_a_new_one(forked_python: ForkedPython, tmp_path: Path, how: str):
    for name, program in PROGRAMS.items():
        command = command_of(how, program, tmp_path)
        options: dict[str, Any] = {
            "input": b"given", "env": {"TONARI_MARK": name}, "preexec_fn": on_one_core,
        }  # fmt: skip
        new = run([sys.executable, *command], tmp_path, **dict(options))
        forked = run([*forked_python.command, *command], tmp_path, **dict(options))
        assert _plain(forked) == _plain(new), name


def _plain(ended: tuple[int, bytes, bytes]) -> tuple[int, bytes, list[bytes]]:
    """Leave out of a crash's stack what differs between processes, and who ran the program."""
    status, out, error = ended
    others = (b"0x", b"Extension modules", b"forked/zygote.py", b"<frozen runpy>")
    lines = [line for line in error.splitlines() if line]
    return status, out, [line for line in lines if not any(other in line for other in others)]


def test_what_a_forked_process_starts_is_forked_too(forked_python: ForkedPython, tmp_path: Path):
    program = "import sys; print('torch' in sys.modules)"
    starts = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {program!r}])"
    assert run([*forked_python.command, "-c", starts], tmp_path) == (0, b"True\n", b"")


def test_nothing_of_one_is_seen_by_the_next(forked_python: ForkedPython, tmp_path: Path):
    leave = (
        "import dataio, os, sys, numpy\ndataio.left = 1\nos.environ['TONARI_LEFT'] = '1'\n"
        "sys.path.append('/left')\nos.chdir('/')\nprint(numpy.random.rand())"
    )
    look = (
        "import dataio, os, sys, numpy\nassert not hasattr(dataio, 'left')\n"
        "assert 'TONARI_LEFT' not in os.environ and 'TONARI_MINE' not in os.environ\n"
        "assert '/left' not in sys.path and os.getcwd() != '/'\nprint(numpy.random.rand())"
    )
    begin = [*forked_python.command, "-c"]
    left = run([*begin, leave], tmp_path, env={"TONARI_MINE": "1"})
    looked = run([*begin, look], tmp_path)
    assert (left[0], looked[0]) == (0, 0), looked
    assert left[1] != looked[1], "drawn numbers are not those of the process that was forked from"


def test_ranks_side_by_side_do_not_hash_alike(forked_python: ForkedPython, tmp_path: Path):
    """What depends on a set's order would else be the same on all ranks."""
    program = "print(hash('a'))"
    said = [
        run([*forked_python.command, "-c", program], tmp_path, env={"RANK": str(rank)})[1]
        for rank in range(4)
    ]
    assert said[0] == said[2] != said[1] == said[3]


def test_open_files_are_passed_on_and_closed_here(forked_python: ForkedPython, tmp_path: Path):
    reading, writing = os.pipe()
    program = (
        f"import os, time; os.write({writing}, b'to you'); os.close({writing}); time.sleep(60)"
    )
    command = [*forked_python.command, "-c", program]
    process = subprocess.Popen(command, env=job_environ(), pass_fds=[writing])
    os.close(writing)
    with open(reading, "rb") as given:
        assert given.read() == b"to you", "ends with the forked process's own"
    process.kill()
    process.wait()


IN_PLACES = ("trainer/resume", "train_epochs")
"""Programs that are given a directory first."""
SLEEP = "import os, time; print(os.getpid(), flush=True); time.sleep(600)"


@pytest.mark.usefixtures("heard_interrupts")
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT])
def test_a_signal_to_the_command_ends_the_process(forked_python: ForkedPython, number: int):
    command = [*forked_python.command, "-c", SLEEP]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, env=job_environ(), stdout=pipe, stderr=pipe) as process:
        assert process.stdout is not None
        pid = int(process.stdout.readline())
        assert pid != process.pid
        process.send_signal(number)
        assert ends(pid)
        assert process.wait(20) == -number


def test_a_signal_is_the_programs_own_to_handle(forked_python: ForkedPython, tmp_path: Path):
    program = (
        "import signal, sys, time\nsignal.signal(signal.SIGUSR1, lambda *_: sys.exit(7))\n"
        "print('ready', flush=True)\ntime.sleep(600)"
    )
    command = [*forked_python.command, "-c", program]
    with subprocess.Popen(command, env=job_environ(), stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        process.stdout.readline()
        process.send_signal(signal.SIGUSR1)
        assert process.wait(20) == 7


def test_a_job_that_takes_too_long_is_ended_with_the_stacks_of_its_ranks(tmp_path: Path):
    program = "def hangs_here():\n    import time; print('begun', flush=True); time.sleep(600)\n"
    (tmp_path / "hangs.py").write_text(f"{program}hangs_here()")
    command = launch_command("mpiexec", 2)
    run_job([*command, "-c", ""], env=None, timeout_s=60)  # All has been imported after this.
    with pytest.raises(TimeoutError) as error:
        run_job([*command, str(tmp_path / "hangs.py")], env=None, timeout_s=5)
    assert str(error.value).count("begun") == 2
    assert str(error.value).count("in hangs_here") == 2


@pytest.mark.parametrize(
    ("variable", "value"), [("PYTHONHASHSEED", "5"), ("LD_PRELOAD", ""), ("ANY_OTHER", "1")]
)
def test_what_imports_may_have_read_begins_anew(
    forked_python: ForkedPython, tmp_path: Path, variable: str, value: str
):
    environ, files = {**job_environ(), variable: value}, {0: 0, 1: 1, 2: 2}
    with pytest.raises(Refused, match=variable):
        forked_python.fork(["-c", ""], environ=environ, files=files)
    program = "import sys; print('torch' in sys.modules)"
    command = [*forked_python.command, "-c", program]
    assert run(command, tmp_path, env={variable: value}) == (0, b"False\n", b"")


@pytest.mark.multirank
@pytest.mark.parametrize("launcher", ["mpiexec", "torchrun"])
def test_what_a_launcher_starts_is_forked(launcher: Launcher):
    """None of the variables that launchers set makes it begin anew."""
    command = launch_command(launcher, 2)
    program = "import sys; print('with torch' if 'torch' in sys.modules else 'without')"
    status, said = run_job([*command, "-c", program], env=None, timeout_s=60)
    assert (status, said.count("with torch")) == (0, 2), said


def test_ranks_that_wait_for_one_that_failed_are_ended(forked_python: ForkedPython):
    files = {number: os.open(os.devnull, os.O_RDWR) for number in range(3)}
    programs = ["import time; time.sleep(600)", "raise SystemExit(5)"]
    ranks = [
        forked_python.fork(["-c", program], environ=job_environ(), files=files)
        for program in programs
    ]
    began = time.monotonic()
    assert wait_together(ranks, limit_s=60) == ([-signal.SIGKILL, 5], False)
    hangs = [forked_python.fork(["-c", programs[0]], environ=job_environ(), files=files)]
    assert wait_together(hangs, limit_s=0.5) == ([-signal.SIGKILL], True)
    assert time.monotonic() - began < 50
    for held in (*ranks, *hangs):
        held.close()
    for file in files.values():
        os.close(file)


@pytest.mark.multirank
@pytest.mark.thorough
@pytest.mark.parametrize(
    ("program", "n", "arguments"),
    [
        ("trainer/gradients", 2, ["1"]),
        pytest.param("trainer/resume", 3, ["1", "4"], marks=pytest.mark.nightly),
        pytest.param("train_epochs", 3, ["83", "3", "[0.3, 1.0]"], marks=pytest.mark.nightly),
        pytest.param("trainer/deliver_job", 4, [], marks=pytest.mark.nightly),
    ],
)
def test_forked_ranks_report_what_new_ones_report(
    run_ranks: RunRanks, tmp_path: Path, program: str, n: int, arguments: list[str]
):
    reports = []
    for fresh in (True, False):
        given = [str(tmp_path / str(fresh)), *arguments] if program in IN_PLACES else arguments
        reports.append(_untimed(run_ranks(program, n, *given, fresh=fresh).reports))
    assert reports[0] == reports[1]


def _untimed(report: Any) -> Any:
    """Leave out how long something took."""
    if isinstance(report, list):
        return [_untimed(part) for part in report]
    if isinstance(report, dict):
        return {name: _untimed(part) for name, part in report.items() if not name.endswith("_s")}
    return report
