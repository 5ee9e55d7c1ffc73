"""A start that hangs ends with a message that names launcher, PMI and cure; others stay clean."""

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from dataio.world import start
from dataio.world.start import VARIABLE, _Watch, watch_mpi_start

PMI = {"PMI_RANK": "0", "PMI_SIZE": "2"}
JOIN = "from dataio.world import discover_world; discover_world()"


@contextmanager
def started(program: str, environ: dict[str, str], pass_fds: tuple[int, ...] = ()) -> Iterator[
    subprocess.Popen[str]
]:  # fmt: skip
    with subprocess.Popen(
        [sys.executable, "-c", program], env={**os.environ, **environ}, pass_fds=pass_fds,
        stderr=subprocess.PIPE, text=True,
    ) as process:  # fmt: skip
        try:
            yield process
        finally:
            process.kill()


def test_a_pmi_that_answers_half_a_line_ends_the_rank_with_a_message() -> None:
    mpi4py = pytest.importorskip("mpi4py")
    if "open" in str(mpi4py.get_config()).lower():
        pytest.skip("mpi4py is built against Open MPI, which is started by PMIx")
    server, rank = socket.socketpair()
    environ = {**PMI, "PMI_FD": str(rank.fileno()), "SLURM_STEP_ID": "0", VARIABLE: "4"}
    with server, started(JOIN, environ, pass_fds=(rank.fileno(),)) as process:
        rank.close()
        server.settimeout(120)
        assert server.recv(1000).startswith(b"cmd=init ")
        # Of "cmd=response_to_init pmi_version=1 pmi_subversion=1 rc=0\n".
        server.sendall(b"cmd=response_to_init pmi_ver")
        said = process.communicate(timeout=120)[1]
    assert process.returncode == -signal.SIGKILL
    first, last = said.splitlines()
    assert first.startswith(f"[rank 0 of 2 on {socket.gethostname()}] MPI_Init has not returned")
    for words in (
        "Started by srun, PMI-1 or PMI-2 (SLURM_STEP_ID=0, PMI_FD=", "PMI_RANK=0, PMI_SIZE=2)",
        "srun --mpi=pmi2 for", "srun --mpi=pmix", "mpiexec of mpi4py's own MPI",
        "the site's MPI module", "This rank ends after 4 s", VARIABLE,
    ):  # fmt: skip
        assert words in first
    assert last.endswith("MPI_Init did not return within 4 s; ending this rank")


def test_another_start_that_hangs_ends_the_rank_too() -> None:
    program = (
        "import time; from dataio.world import watch_start\n"
        "with watch_start('init_process_group'): time.sleep(200)"
    )
    torchrun = {"TORCHELASTIC_RUN_ID": "a", "RANK": "4", "WORLD_SIZE": "8", "LOCAL_RANK": "0"}
    with started(program, {**torchrun, VARIABLE: "1"}) as process:
        said = process.communicate(timeout=120)[1]
    assert process.returncode == 1
    assert "[rank 4 of 8 on " in said
    assert "init_process_group has not returned" in said
    assert "Started by torchrun" in said
    assert "--rdzv-endpoint" in said


def test_a_good_start_leaves_no_process_and_no_file_behind(
    capfd: pytest.CaptureFixture[str],
) -> None:
    before = files_and_children()
    with watch_mpi_start():
        pass
    with pytest.raises(ValueError, match="as it is"), watch_mpi_start():
        raise ValueError("as it is")
    assert files_and_children() == before
    assert capfd.readouterr() == ("", "")


def files_and_children() -> list[str]:
    """List this process's open files and its children, zombies included."""
    children = Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()
    return sorted(path.name for path in Path("/proc/self/fd").iterdir()) + children


def test_what_watches_ends_with_a_rank_that_is_killed() -> None:
    program = (
        "import os, signal; from dataio.world.start import watch_mpi_start\n"
        "with watch_mpi_start(): os.kill(os.getpid(), signal.SIGKILL)"
    )
    with started(program, {VARIABLE: "60"}) as process:
        # The end of the pipe: nobody holds standard error any more.
        assert process.communicate(timeout=120)[1] == ""
    assert process.returncode == -signal.SIGKILL


def run(*, is_first: bool, ends_in: int | None) -> tuple[list[float], int]:
    """Run a watch of 300 s of which wait number ``ends_in`` sees the end; its waits, its ends."""
    waits: list[float] = []
    ends: list[None] = []

    def ended(wait_s: float) -> bool:
        waits.append(wait_s)
        return len(waits) == ends_in

    _Watch("MPI_Init", 300.0, is_first, time.monotonic()).run(ended, lambda: ends.append(None))
    return waits, len(ends)


def test_the_first_rank_of_a_node_prints_after_a_minute_and_the_others_at_their_end(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    said: list[str] = []
    monkeypatch.setattr(start, "_print", said.append)
    assert run(is_first=True, ends_in=1) == ([60.0], 0)
    assert run(is_first=False, ends_in=2) == ([60.0, 250.0], 0)
    assert not said
    assert run(is_first=True, ends_in=2) == ([60.0, 240.0], 0)
    assert "has not returned for 60 s" in said[0]
    assert run(is_first=False, ends_in=None) == ([60.0, 250.0], 1)
    assert "has not returned for 310 s" in said[1]
    assert len(said) == 2


def test_a_start_that_was_only_slow_is_reported_to_go_on(monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []
    monkeypatch.setattr(start, "_print", said.append)
    for spent_s in (59, 75):
        _Watch("MPI_Init", 300.0, True, time.monotonic() - spent_s).report_return()
    assert len(said) == 1
    assert said[0].endswith("MPI_Init returned after 75 s; going on")


def test_the_limit_is_the_variables_or_not_less_than_the_callers() -> None:
    assert start._limit_s({}, 5.0) == 300.0
    assert start._limit_s({}, 1800.0) == 1800.0
    assert start._limit_s({VARIABLE: "20"}, 1800.0) == 20.0
