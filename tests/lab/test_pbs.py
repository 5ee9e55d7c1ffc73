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
        os.chmod(top, 0o755)
        home = Path(top) / "home"
        write_images(home)
        with Lab(Path(top) / "lab", NUM_NODES) as lab:
            site = start_pbs(lab, home)
            site.init("--nodes", str(NUM_NODES), "--image", "jpg", "--time", "00:10:00")
            yield site


@pytest.fixture(scope="module")
def whole(site: Site) -> list[Line]:
    """The epochs of a run by mpiexec alone, which nothing disturbed."""
    directory = site.home.parent / "whole"
    subprocess.run(
        [*site.lab.mpiexec(NUM_NODES), sys.executable, "-m", "tonari", "train", "train.toml",
         f"run.epochs={EPOCHS}", f"run.directory={directory}"],
        cwd=site.home, stdin=subprocess.DEVNULL, timeout=JOB_S, check=True,
        env={**os.environ, "PYTHONPATH": str(ROOT), "TMPDIR": str(site.lab.scratch),
             "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    return read_epochs(directory)


def await_epochs(run: Path, number: int, log: Path) -> None:
    deadline = time.monotonic() + START_S
    while not has_epochs(run, number):
        assert time.monotonic() < deadline, f"{run}: not {number} epochs within {START_S} s"
        time.sleep(0.2)
