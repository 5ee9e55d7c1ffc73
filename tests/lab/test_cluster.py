"""Where no lab can be made, it says why; where one was, nothing outlives it."""

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.lab.cluster import what_is_missing
from tests.multirank import ROOT


def test_a_missing_tool_is_named_with_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    monkeypatch.setenv("PATH", "")
    assert what_is_missing().startswith("the lab needs ip, tc, unshare, nsenter")
    assert "install iproute2" in what_is_missing()


def test_another_user_than_root_is_told_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    assert "needs root" in what_is_missing()


DAEMON = """
import sys
from pathlib import Path
from tests.lab.cluster import Lab
with Lab(Path(sys.argv[1]), 1) as lab:
    lab.run("node0", "sh", "-c", "setsid sleep 1000 > /dev/null 2>&1 &")
    print(lab.commands("node0"), flush=True)
    sys.stdin.read()
"""


@pytest.mark.lab
def test_a_daemon_ends_when_whoever_made_the_lab_is_killed(tmp_path: Path) -> None:
    if reason := what_is_missing():
        pytest.skip(reason)
    directory = tmp_path / "lab"
    with subprocess.Popen(
        [sys.executable, "-c", DAEMON, str(directory)], cwd=ROOT, text=True,
        stdin=subprocess.PIPE, stdout=subprocess.PIPE,
    ) as maker:  # fmt: skip
        assert maker.stdout is not None
        assert "sleep 1000" in maker.stdout.readline()
        namespace = Path(f"/proc/{(directory / 'node0.pid').read_text()}/ns/net").readlink()
        maker.kill()
    deadline = time.monotonic() + 30
    while namespace in namespaces():
        assert time.monotonic() < deadline


def namespaces() -> set[Path]:
    found = set()
    for process in Path("/proc").glob("[0-9]*"):
        try:
            found.add((process / "ns/net").readlink())
        except OSError:
            continue
    return found
