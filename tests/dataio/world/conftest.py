"""Start real ranks and hand back all that they said, failures included."""

import json
import os
import signal
import subprocess
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.multirank import ROOT, Launcher, job_environ, launch_command


@dataclass(frozen=True)
class EndedJob:
    """How a job ended."""

    status: int
    stderr: str
    seconds: float
    reports: dict[int, Any]


Launch = Callable[..., EndedJob]


@pytest.fixture
def launch(tmp_path: Path) -> Launch:
    """Run ``tests/ranks/<program>.py`` on n ranks, each with ``tmp_path`` and more arguments."""

    def run(
        program: str, n: int, *args: str, launcher: Launcher = "mpiexec", fresh: bool = False,
        **environ: str,
    ) -> EndedJob:  # fmt: skip
        script = str(ROOT / "tests" / "ranks" / f"{program}.py")
        command = [*launch_command(launcher, n, fresh=fresh), script, str(tmp_path), *args]
        start = time.monotonic()
        process = subprocess.Popen(
            command,
            env=job_environ(environ),
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
