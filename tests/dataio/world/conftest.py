"""Start real ranks and hand back all that they said, failures included."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[3]


@dataclass(frozen=True)
class EndedJob:
    """How a job ended."""

    status: int
    stderr: str
    seconds: float
    reports: dict[int, Any]


Launch = Callable[..., EndedJob]


def _command(launcher: str, n: int) -> list[str]:
    if launcher == "torchrun":
        run = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
        return [*run, f"--nproc-per-node={n}"]
    beside = Path(sys.executable).with_name("mpiexec")
    mpiexec = str(beside) if beside.exists() else shutil.which("mpiexec")
    if mpiexec is None:
        pytest.skip("no mpiexec")
    return [mpiexec, "-n", str(n), sys.executable]


@pytest.fixture
def launch(tmp_path: Path) -> Launch:
    """Run ``tests/ranks/<program>.py`` on n ranks, each with ``tmp_path`` and more arguments."""

    def run(
        program: str, n: int, *args: str, launcher: str = "mpiexec", **environ: str
    ) -> EndedJob:
        script = str(ROOT / "tests" / "ranks" / f"{program}.py")
        command = [*_command(launcher, n), script, str(tmp_path), *args]
        settings = {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", **environ}
        start = time.monotonic()
        process = subprocess.Popen(
            command,
            env={**os.environ, **settings},
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        try:
            _, stderr = process.communicate(timeout=90)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            _, stderr = process.communicate()
            pytest.fail(f"{program} on {n} ranks hung: {stderr}")
        reports = {int(path.stem): json.loads(path.read_text()) for path in tmp_path.glob("*.json")}
        return EndedJob(process.returncode, stderr, time.monotonic() - start, reports)

    return run
