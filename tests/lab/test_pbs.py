"""The script that `tonari init` writes, as it is, on a real OpenPBS of two nodes."""

import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.lab import cluster, pbs
from tests.lab.cluster import Lab
from tests.lab.pbs import Pbs, start_pbs
from tests.lab.site import DATA, has_epochs, read_epochs, write_images
from tests.multirank import ROOT

pytestmark = [pytest.mark.lab, pytest.mark.timeout(900)]
NUM_NODES, EPOCHS, START_S, JOB_S = 2, 6, 200, 300

Line = dict[str, Any]


@pytest.fixture(scope="module")
def site() -> Iterator[Pbs]:
    absent = "" if DATA.exists() else f"{DATA} is not here"
    if reason := cluster.what_is_missing() or pbs.what_is_missing() or absent:
        pytest.skip(reason)
    with tempfile.TemporaryDirectory(prefix="tonari-pbs-") as top:
        Path(top).chmod(0o755)
        home = Path(top) / "home"
        write_images(home)
        with Lab(Path(top) / "lab", NUM_NODES) as lab:
            site = start_pbs(lab, home)
            site.init("--nodes", str(NUM_NODES), "--time", "00:10:00")
            yield site


@pytest.fixture(scope="module")
def whole(site: Pbs) -> list[Line]:
    """The epochs of a run by mpiexec alone, which nothing disturbed."""
    directory = site.home.parent / "whole"
    enter = site.lab.enter("node0")
    subprocess.run(
        [*enter, "env", "-C", str(site.home), *site.lab.mpiexec(NUM_NODES)[len(enter):],
         sys.executable, "-m", "tonari", "train", "train.toml", f"run.epochs={EPOCHS}",
         f"run.directory={directory}"],
        stdin=subprocess.DEVNULL, timeout=JOB_S, check=True,
        env={**os.environ, "PYTHONPATH": str(ROOT), "TMPDIR": str(site.lab.scratch),
             "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    return read_epochs(directory)


def await_epochs(run: Path, number: int) -> None:
    deadline = time.monotonic() + START_S
    while not has_epochs(run, number):
        assert time.monotonic() < deadline, f"{run}: not {number} epochs within {START_S} s"
        time.sleep(0.2)


def order(lines: list[Line]) -> list[str]:
    """The order of a run's epochs, as many as the undisturbed one has."""
    return [line["order_hash"] for line in lines[:EPOCHS]]


def test_doctor_finds_the_nodes_and_the_directory_that_pbs_made(site: Pbs) -> None:
    job = site.submit("job.pbs", PROGRAM="-m tonari doctor")
    log = site.await_end(job, within_s=JOB_S)
    found = dict(line.split(": ", 1) for line in log.splitlines() if ": " in line)
    assert "2 ranks on 2 nodes" in found["fine     ranks"], log
    assert f"/var/tmp/pbs.{job}/tonari-{pbs.USER_ID} on " in log, log
    assert f"PBS_JOBID={job}" in found["fine     launcher"]
    assert "slowest node0 - node1" in log
    assert "broken" not in log


def test_the_script_of_init_trains_in_the_order_of_mpiexec(site: Pbs, whole: list[Line]) -> None:
    job = site.submit("job.pbs", RUN_DIR="runs/plain", OVERRIDES=f"run.epochs={EPOCHS}")
    log = site.await_end(job, within_s=JOB_S)
    assert len(whole) == EPOCHS
    assert whole[1]["exchanged_rows"] > 0
    assert read_epochs(site.home / "runs/plain") == whole, log


def test_before_its_limit_a_job_submits_itself_and_each_epoch_is_trained_once(
    site: Pbs, whole: list[Line]
) -> None:
    run = site.home / "runs/limit"
    job = site.submit("job.pbs", "-lwalltime=00:02:00", RUN_DIR="runs/limit", BEFORE_S="60",
                      OVERRIDES="run.epochs=10000")  # fmt: skip
    log = site.await_end(job, within_s=JOB_S)
    stopped = re.search(r"stopped by SIGUSR1 after (\d+) epochs, (\d+) steps", log)
    assert stopped, log
    following = re.search(
        rf"from runs/limit/checkpoints/step-{int(stopped[2]):08} in job (\S+)", log
    )
    assert following, log
    await_epochs(run, int(stopped[1]) + 2)
    # An operator's, or PBS's own where a node is lost.
    site.operate("qrerun", following[1])
    trained = len(read_epochs(run))
    await_epochs(run, trained + 2)
    site.call("qdel", following[1])
    log = site.await_end(following[1], within_s=JOB_S)
    assert "stopped by SIGTERM after" in log, "PBS leaves the ranks the time for a checkpoint"
    lines = read_epochs(run)
    assert [line["epoch"] for line in lines] == list(range(len(lines))), "each once"
    assert order(lines) == order(whole)[: len(lines)]
    assert site.call("qselect") == "", "what somebody has deleted does not come back"


def test_what_fails_at_once_is_not_submitted_again(site: Pbs) -> None:
    job = site.submit("job.pbs", RUN_DIR="runs/wrong", OVERRIDES="data.train=absent.parquet")
    log = site.await_end(job, within_s=JOB_S)
    assert "absent.parquet" in log
    assert "no checkpoint after the start: not submitted again" in log
    assert site.call("qselect") == ""
