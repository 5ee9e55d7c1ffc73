"""Start real ranks and hand back all that they said, failures included."""

import contextlib
import json
import os
import select
import signal
import sys
from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Protocol

from tonari.mpi import mpiexec_command
from tonari.processes import run_group

ROOT = Path(__file__).parents[1]

Launcher = Literal["mpiexec", "torchrun"]

FORKED: list[Callable[[], list[str]]] = []
"""With ``pytest --forked``: what gives ``ForkedPython.command``."""


@dataclass(frozen=True)
class Ended:
    """How a job ended.

    Attributes:
        returncode: Of the launcher.
        output: What all ranks and the launcher wrote, stdout and stderr together.
        reports: What each rank reported, by rank; a rank that wrote nothing is left out.
        directory: Where the ranks reported.
    """

    returncode: int
    output: str
    reports: list[dict[str, Any]]
    directory: Path


class RunRanks(Protocol):
    """What the fixture ``run_ranks`` hands to a test."""

    def __call__(
        self,
        program: str,
        n: int,
        *args: str,
        launcher: Launcher = "mpiexec",
        env: Mapping[str, str] | None = None,
        timeout_s: float = 120.0,
        check: bool = True,
        fresh: bool = False,
    ) -> Ended:
        """Run ``tests/ranks/<program>.py OUT_DIR ARGS...`` on n ranks.

        The launcher is the real one, and so is what the ranks meet by.

        Args:
            program: Name of the file. Its ranks report: each writes ``OUT_DIR/<rank>.json``.
            n: Ranks to start.
            args: More arguments.
            launcher: What starts them.
            env: Variables beside the test's own.
            timeout_s: The job is killed, and the test fails, after this time.
            check: Whether another exit status than 0, or a missing report, fails the test.
            fresh: Whether each rank is a new Python, such as where its memory is measured.
        """
        ...


def python_command() -> list[str]:
    """Begin the command line of a Python process.

    With ``pytest --forked`` it is forked from one that has imported everything (see
    ``tests/forked``) if its variables are those of ``job_environ``, and begins anew otherwise.
    """
    return FORKED[0]() if FORKED else [sys.executable]


def launch_command(launcher: Launcher, n: int, *, fresh: bool = False) -> list[str]:
    """Begin the command line of a job of n Python processes.

    Args:
        launcher: What starts them.
        n: Processes.
        fresh: Whether each begins anew; otherwise as ``python_command``.
    """
    python = [sys.executable] if fresh else python_command()
    if launcher == "mpiexec":
        return [*mpiexec_command(n), *python]
    torchrun = [*python, "-m", "torch.distributed.run", "--standalone"]
    # As torchrun starts Python itself: unbuffered.
    return [*torchrun, f"--nproc-per-node={n}", "--no-python", *python, "-u"]


def job_environ(env: Mapping[str, str] | None = None) -> dict[str, str]:
    """Variables of a job: the test's own, some that all jobs have, and more."""
    paths = [str(ROOT / "tests/start"), str(ROOT), os.environ.get("PYTHONPATH")]
    path = os.pathsep.join(filter(None, paths))
    return {
        **os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1", "PYTHONFAULTHANDLER": "1",
        **(env or {}),
    }  # fmt: skip


def run_job(
    command: list[str], *, env: Mapping[str, str] | None, timeout_s: float
) -> tuple[int, str]:
    """Run a command, and leave nothing of it behind.

    Returns:
        Exit status and output.

    Raises:
        TimeoutError: If the limit passes; holds what was written until then, and the stack of every
            thread of every Python process of the job.
    """
    status, said = run_group(
        command, timeout_s=timeout_s, env=job_environ(env), on_timeout=write_stacks
    )
    if status is None:
        raise TimeoutError(f"{' '.join(command)}: still running after {timeout_s} s\n{said}")
    return status, said


def write_stacks(launcher: int) -> None:
    """Let the ranks of a job that hangs write where each of their threads is; it ends them."""
    started = find_descendants(launcher)
    ranks = [pid for pid in started if _is_python(pid)]
    # Else it would end the other ranks as soon as one has ended.
    launchers = [launcher, *(pid for pid in started if pid not in ranks)]
    _signal(launchers, signal.SIGSTOP)
    for pid in ranks:
        # One after the other: they write into one file, in small pieces.
        _signal([pid], signal.SIGABRT)
        ends(pid)
    _signal(launchers, signal.SIGCONT)
    if ranks:
        ends(launcher)  # It passes on what they wrote.


def _signal(pids: list[int], number: signal.Signals) -> None:
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, number)


def find_descendants(pid: int) -> list[int]:
    """Find the processes that a process has started, and those that these have started."""
    children = defaultdict(list)
    for path in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):
            # The name of the program, in parentheses, may hold anything.
            parent = path.read_text().rpartition(")")[2].split()[1]
            children[int(parent)].append(int(path.parent.name))
    found = list(children[pid])
    for child in found:
        found += children[child]
    return found


def _is_python(pid: int) -> bool:
    with contextlib.suppress(FileNotFoundError):
        return Path(f"/proc/{pid}/exe").readlink().name.startswith("python")
    return False


def read_reports(directory: Path, n: int) -> list[dict[str, Any]]:
    """Read the reports that are there, in the order of ranks."""
    paths = [directory / f"{rank}.json" for rank in range(n)]
    return [json.loads(path.read_text()) for path in paths if path.exists()]


def ends(pid: int, *, timeout_s: float = 20.0) -> bool:
    """Wait for the end of a process: of an aborted job mpiexec's helper ends them, after it."""
    try:
        process = os.pidfd_open(pid)
    except ProcessLookupError:
        return True
    try:
        return bool(select.select([process], [], [], timeout_s)[0])
    finally:
        os.close(process)
