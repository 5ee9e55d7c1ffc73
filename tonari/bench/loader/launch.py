"""How a contender's processes are started, and how they end."""

import os
import re
import signal
import socket
import subprocess
from dataclasses import replace
from pathlib import Path

from tonari.bench.errors import BenchError
from tonari.bench.loader.contenders import Contender
from tonari.bench.loader.peers.harness import PeerTask
from tonari.mpi import mpiexec_command

PACKAGE = __name__.partition(".")[0]
ROOT = Path(__file__).parents[__name__.count(".")]
"""Where Python finds Tonari's packages."""
LAUNCHER_PREFIXES = ("PMI_", "PMIX_", "OMPI_", "TORCHELASTIC_", "SLURM_", "TONARI_RANKS_PER_NODE")


def prepare(contender: Contender, python: Path, task: PeerTask, *, timeout_s: float) -> None:
    """Let a contender make its own form of the set. Blocks.

    Raises:
        BenchError: If it fails or takes too long.
    """
    log = Path(f"{task.prepared}.log")
    # One rank makes the form that all ranks of a node share; two nodes make theirs together.
    command, env = commands(contender, python, task, contender.nodes)[0]
    with open(log, "wb") as output:
        process = subprocess.Popen(
            command, env=env, stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT,
            start_new_session=True, cwd=log.parent,
        )  # fmt: skip
        try:
            status: int | None = process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            status = None
        finally:
            end(process, wait_s=0)
    if status != 0:
        ended = f"took over {timeout_s:g} s" if status is None else f"ended with {status}"
        raise BenchError(
            f"{contender.name}: {ended} while preparing the set: {last_words(log)}; the whole of "
            f"what it wrote is in {log}"
        )


def commands(
    contender: Contender, python: Path, task: PeerTask, num_ranks: int
) -> list[tuple[list[str], dict[str, str]]]:
    """Make the command lines, with their variables, that start a contender's ranks.

    Ours are started by mpiexec; the others as processes of their own, each with its rank.
    """
    env = {k: v for k, v in os.environ.items() if not k.startswith(LAUNCHER_PREFIXES)}
    env["PYTHONPATH"] = str(_import_root(contender, Path(task.prepared).parent))
    # Threads of torch that spin beside each other's would slow some contenders down many times.
    env.setdefault("OMP_NUM_THREADS", "1")
    program = [str(python), "-P", str(contender.program)]
    if contender.kind != "ours":
        return [([*program, replace(task, rank=rank).to_json()], env) for rank in range(num_ranks)]
    if contender.nodes > 1:
        env["TONARI_RANKS_PER_NODE"] = "1"
    launch = mpiexec_command(num_ranks) if num_ranks > 1 else []
    return [([*launch, *program, task.to_json()], env)]


def _import_root(contender: Contender, directory: Path) -> Path:
    if not contender.environment:
        return ROOT
    # An environment may see this package and nothing else that lies beside it.
    only = directory / "import"
    only.mkdir(exist_ok=True)
    link = only / PACKAGE
    if not link.is_symlink():
        link.symlink_to(ROOT / PACKAGE)
    return only


def free_port() -> socket.socket:
    """Reserve a TCP port that is free."""
    listener = socket.socket()
    listener.bind(("127.0.0.1", 0))
    return listener


def end(process: "subprocess.Popen[bytes]", *, wait_s: float) -> None:
    """Wait for a process, then end it and its process group.

    It is asked first, because a launcher has to end its ranks.
    """
    try:
        process.wait(wait_s)
    except subprocess.TimeoutExpired:
        process.terminate()
        try:
            process.wait(3.0)
        except subprocess.TimeoutExpired:
            process.kill()
    try:
        os.killpg(process.pid, signal.SIGKILL)
    except ProcessLookupError:
        return
    finally:
        process.wait()


def last_words(log: Path, num_lines: int = 1) -> str:
    """Find the last lines that a process wrote; of errors, if it wrote any."""
    lines = [line for line in log.read_text(errors="replace").splitlines() if line.strip()]
    errors = [line for line in lines if re.match(r"(\w+\.)*\w*(Error|Exception)\b", line)]
    return " | ".join((errors or lines or ["it wrote nothing"])[-num_lines:]).strip()
