"""The same rows in the same order, whoever starts the ranks: every launcher and MPI of the lab.

    python -m benchmarks.lab.launchers  # root, iproute2, Slurm, Open MPI, libpmix: five minutes

Four nodes, a rank on each: `tonari train` (its order hashes and losses), and a loop of one's own
(`examples/own_loop.py`, its losses). OpenPBS, where `tests/lab/pbs.py` finds it, comes up beside
Slurm and runs the script of `tonari init`.
"""

import os
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from tests.lab import pbs
from tests.lab.site import CONFIG, NUM_NODES, Site, open_site, read_epochs, what_is_missing
from tests.multirank import ROOT

OPEN_MPI = Path("/usr/lib/x86_64-linux-gnu/libmpi.so.40")
EPOCHS, JOB_S = 3, 200
SRUN = ("srun", f"--nodes={NUM_NODES}", f"--ntasks={NUM_NODES}")
SOCKETS = {"OMPI_MCA_pml": "ob1", "OMPI_MCA_btl": "tcp,self", "OMPI_MCA_btl_tcp_if_include": "eth0"}
Result = tuple[list[tuple[str, float]], list[str]]
AS_ROOT = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}


@dataclass(frozen=True)
class LaunchedBy:
    """How ranks are started.

    Attributes:
        name: For the table.
        command: What comes before python.
        variables: That it needs.
        lies_at: Where something lies that it needs; None: nothing.
    """

    name: str
    command: tuple[str, ...]
    variables: dict[str, str] = field(default_factory=dict)
    lies_at: Path | None = None

    @property
    def is_here(self) -> bool:
        found = self.lies_at is None or self.lies_at.exists()
        return found and shutil.which(self.command[0]) is not None


def ways(site: Site) -> list[LaunchedBy]:
    """List what the lab can start ranks by."""
    of_open_mpi = {"MPI4PY_LIBMPI": str(OPEN_MPI), **SOCKETS, **AS_ROOT}
    nodes = site.lab.nodes
    agent = str(site.lab.directory / "enter")
    mpiexec = site.lab.mpiexec(NUM_NODES)[len(site.lab.enter("node0")) :]
    return [
        LaunchedBy("srun --mpi=pmi2, MPICH", (*SRUN, "--mpi=pmi2")),
        LaunchedBy("mpiexec, MPICH", tuple(mpiexec)),
        LaunchedBy("srun --mpi=pmix, Open MPI", (*SRUN, "--mpi=pmix"), of_open_mpi, OPEN_MPI),
        LaunchedBy(
            "mpirun, Open MPI",
            ("mpirun.openmpi", "--mca", "plm", "rsh", "--mca", "plm_rsh_agent", agent, "--mca",
             "oob_tcp_if_include", "eth0", "-H", ",".join(nodes), "-n", str(NUM_NODES),
             *(word for name in ("PATH", "PYTHONPATH", *of_open_mpi) for word in ("-x", name))),
            of_open_mpi, OPEN_MPI,
        ),
    ]  # fmt: skip


def run(site: Site, way: LaunchedBy, *program: str) -> str:
    """Start four ranks; returns what they wrote. Raises RuntimeError with it if they fail."""
    command = [
        *site.lab.enter("node0"), "env", "-C", str(site.home), *way.command, sys.executable,
        *program,
    ]  # fmt: skip
    env = {**site.environment, "OMP_NUM_THREADS": "1", **way.variables}
    ended = subprocess.run(
        command, env=env, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=JOB_S
    )
    if ended.returncode:
        raise RuntimeError(f"{way.name}: ended with {ended.returncode}:\n{ended.stderr[-2000:]}")
    return ended.stdout


def train(site: Site, way: LaunchedBy) -> list[tuple[str, float]]:
    """Train by `tonari train`; returns each epoch's order hash and loss."""
    directory = site.home / "runs" / way.name.replace(" ", "-")
    run(site, way, "-m", "tonari", "train", CONFIG, f"run.epochs={EPOCHS}",
        f"run.directory={directory}")  # fmt: skip
    return read(directory)


def own_loop(site: Site, way: LaunchedBy) -> list[str]:
    """Train by a loop of one's own; returns the line of each epoch."""
    written = run(site, way, *own_loop_words(site))
    return [line for line in written.splitlines() if line.startswith("epoch ")]


def own_loop_words(site: Site) -> tuple[str, ...]:
    end = ("--epochs", str(EPOCHS), "--image", "jpg", "--size", "32", "--channels", "3")
    return (str(ROOT / "examples" / "own_loop.py"), str(shards(site)), *end)


def by_pbs(site: Site) -> Result:
    """Train both by the script that `tonari init` writes for PBS."""
    jobs = pbs.start_pbs(site.lab, site.home)
    jobs.init("--nodes", str(NUM_NODES), "--time", "00:10:00")
    run = site.home / "runs" / "qsub"
    given = {"RUN_DIR": str(run), "CONFIG": CONFIG, "OVERRIDES": f"run.epochs={EPOCHS}"}
    jobs.await_end(jobs.submit("job.pbs", **given), within_s=JOB_S)
    script = (site.home / "job.pbs").read_text()
    words = shlex.join(own_loop_words(site))
    (site.home / "own.pbs").write_text(re.sub(r"-m tonari train .*", words, script))
    written = jobs.await_end(jobs.submit("own.pbs"), within_s=JOB_S)
    return read(run), [line for line in written.splitlines() if line.startswith("epoch ")]


def read(run: Path) -> list[tuple[str, float]]:
    return [(line["order_hash"], line["loss"]) for line in read_epochs(run)]


def shards(site: Site) -> Path:
    """Pack the site's images once."""
    directory = site.home / "shards"
    if not directory.exists():
        site.call(sys.executable, "-m", "tonari", "pack", "data/cifar10-train.parquet", "shards",
                  "--shard-samples", "250")  # fmt: skip
    return directory / "*.tar"


def by_way(site: Site, way: LaunchedBy) -> Result:
    return train(site, way), own_loop(site, way)


def compare(site: Site) -> list[tuple[str, str]]:
    """Run all ways; returns the name of each and what came of it, and prints them."""
    starts: list[tuple[str, Callable[[Site], Result] | None]] = [
        (way.name, partial(by_way, way=way) if way.is_here else None) for way in ways(site)
    ]
    starts.append(("qsub of init's script, MPICH", None if pbs.what_is_missing() else by_pbs))
    found, expected = [], None
    for name, start in starts:
        began_s = time.monotonic()
        result = "not here"
        if start:
            got = start(site)
            assert all(len(part) == EPOCHS for part in got), got
            expected = expected or got
            result = "the same" if got == expected else f"{got}, expected {expected}"
        found.append((name, result))
        print(f"{name:28} {result}  ({time.monotonic() - began_s:.0f} s)", flush=True)
    return found


def main() -> None:
    if reason := what_is_missing():
        raise SystemExit(reason)
    os.environ.pop("PYTHONPATH", None)
    with tempfile.TemporaryDirectory(prefix="tonari-launchers-") as top:
        # For the user of PBS.
        Path(top).chmod(0o755)
        with open_site(Path(top)) as site:
            compare(site)


if __name__ == "__main__":
    main()
