"""A site: Slurm on four nodes, and the directory that its users call sbatch in."""

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq

from tests.lab import cluster, slurm
from tests.lab.cluster import Lab
from tests.multirank import ROOT

DATA = ROOT.parent / "shared" / "data" / "cifar10-train.parquet"
SCRIPTS = ROOT / "examples" / "slurm"
CONFIG = str(ROOT / "examples" / "cifar10.toml")
NUM_NODES, JOB_S, REVOKED_S = 4, 300, 2.0


def what_is_missing() -> str:
    """Say why there can be no site here; empty if there can."""
    return (
        cluster.what_is_missing()
        or slurm.what_is_missing()
        or ("" if DATA.exists() else f"{DATA} is not here")
    )


@dataclass
class Site:
    """Four nodes with Slurm, and the directory that users call sbatch in.

    Attributes:
        lab: The nodes.
        home: Seen by all of them, with 2,000 images.
        environment: Of every command.
    """

    lab: Lab
    home: Path
    environment: dict[str, str]

    def call(self, *command: str, **variables: str) -> str:
        """Run a command on node 0; returns what it wrote."""
        ended = subprocess.run(
            [*self.lab.enter("node0"), "env", "-C", str(self.home), *command],
            env={**self.environment, **variables}, timeout=JOB_S, capture_output=True, text=True,
        )  # fmt: skip
        assert not ended.returncode, f"{ended.stdout}\n{ended.stderr}"
        return ended.stdout

    def submit(self, script: str, *end: str, **variables: str) -> str:
        """Submit one of the scripts; returns the job. SBATCH_... overrule its own lines."""
        path = str(SCRIPTS / script)
        return self.call("sbatch", "--parsable", path, *end, **variables).strip()

    def log(self, job: str) -> str:
        return "".join(path.read_text() for path in self.home.glob(f"*-{job}.log"))

    def state(self, job: str) -> str:
        """Ask Slurm; empty once it has forgotten the job."""
        listed = self.call("squeue", "--noheader", "--states=all", "--format=%i %T")
        return dict(line.split() for line in listed.splitlines()).get(job, "")

    def await_state(self, job: str, *states: str, within_s: float = JOB_S) -> str:
        what = f"job {job} is {' or '.join(states)}"
        self.wait_for(lambda: self.state(job) in states, what, job, within_s)
        return self.state(job)

    def wait_for(self, holds: Callable[[], bool], what: str, job: str, within_s: float) -> None:
        deadline = time.monotonic() + within_s
        while not holds():
            assert time.monotonic() < deadline, (
                f"not within {within_s} s: {what}; it is {self.state(job)}\n{self.log(job)}"
            )
            time.sleep(0.1)

    def start_now(self, job: str) -> None:
        """Let a job that was queued again start at once: Slurm waits two minutes.

        Not within the second in which it was queued: Slurm notes by the second until when a job's
        credentials are revoked, and a start in that same second is "already killed", FAILED
        without a line in its log.
        """
        self.await_state(job, "PENDING")
        time.sleep(REVOKED_S)
        self.call("scontrol", "update", f"JobId={job}", "StartTime=now")

    def train(self, *end: str, script: str = "train.sbatch", **variables: str) -> tuple[Path, str]:
        """Run a script to its end; returns the directory of the run, and the job's log."""
        job = self.submit(script, *end, **variables)
        assert self.await_state(job, "COMPLETED", "FAILED", "CANCELLED", "TIMEOUT") == (
            "COMPLETED"
        ), self.log(job)
        return next(self.home.glob(f"runs/*-{job}")), self.log(job)


def write_images(home: Path) -> None:
    """Write the 2,000 images to train on."""
    (home / "data").mkdir(parents=True)
    # Its first rows are all of one class.
    rows = pq.read_table(DATA).take(list(range(0, 50_000, 25)))
    pq.write_table(rows, home / "data" / "cifar10-train.parquet", row_group_size=250)


@contextmanager
def open_site(top: Path) -> Iterator[Site]:
    """Bring a site up in an empty directory."""
    home = top / "home"
    write_images(home)
    with Lab(top / "lab", NUM_NODES) as lab:
        environment = {
            **slurm.start_slurm(lab, top / "slurm"),
            "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
            "PYTHONPATH": str(ROOT),
            "CONFIG": CONFIG,
            "TRAIN": str(SCRIPTS / "train.sbatch"),
            # A directory of the node's own, as sites give to jobs.
            "TMPDIR": str(lab.scratch),
            # Sockets alone: other ways would find out that the machine is one.
            "FI_PROVIDER": "tcp",
            "FI_TCP_IFACE": "eth0",
        }
        yield Site(lab, home, environment)


def read_epochs(run: Path) -> list[dict[str, Any]]:
    """Read what a run has written of its epochs, but for times."""
    kept = ("epoch", "step", "loss", "order_hash", "exchanged_rows")
    path = run / "metrics.jsonl"
    lines = map(json.loads, path.read_text().splitlines() if path.exists() else [])
    return [{key: line[key] for key in kept} for line in lines if line["kind"] == "epoch"]


def has_epochs(run: Path, number: int) -> bool:
    path = run / "metrics.jsonl"
    return path.exists() and path.read_text().count('"epoch_s"') >= number
