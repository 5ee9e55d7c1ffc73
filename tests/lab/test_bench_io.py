"""`tonari bench io` on a real parallel filesystem: its name, what links allow, cold and warm."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.storage.document import read_document
from benchmarks.storage.results import Phase, Results
from tests.lab import parallel_fs
from tests.lab.cluster import Lab
from tests.lab.conftest import MakeLab
from tests.lab.parallel_fs import start_parallel_fs
from tests.multirank import ROOT

pytestmark = [pytest.mark.lab, pytest.mark.timeout(600)]
LINK_BYTES_PER_S = 80e6 / 8
"""Of a node's link, with everything that frames the bytes."""


@pytest.fixture
def pfs(make_lab: MakeLab) -> tuple[Lab, Path]:
    """Two nodes with slow links, and their filesystem."""
    if reason := parallel_fs.what_is_missing():
        pytest.skip(reason)
    lab = make_lab(2)
    fs = start_parallel_fs(lab)
    lab.shape("80mbit")
    return lab, fs.path


def bench(lab: Lab, directory: Path, out: Path, *arguments: str) -> Results:
    """Run the command, a rank a node; returns what it wrote."""
    command = [*lab.mpiexec(2), sys.executable, "-m", "tonari", "bench", "io", str(directory)]
    command += ["--scratch", str(lab.scratch), "--json-file", str(out), *arguments]
    env = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    ended = subprocess.run(command, env=env, capture_output=True, text=True, timeout=400)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    return read_document(out)


def phase_of(results: Results, pattern: str, clients: int, wanted: str) -> Phase:
    found = [
        phase
        for phase in results.phases
        if (phase.pattern, phase.clients, phase.wanted, phase.tier)
        == (pattern, clients, wanted, "shared")
    ]
    assert len(found) == 1
    return found[0]


def test_the_command_names_the_filesystem_and_finds_the_links_rate_and_what_was_cold(
    pfs: tuple[Lab, Path], tmp_path: Path
) -> None:
    lab, directory = pfs
    results = bench(
        lab, directory, tmp_path / "io.json", "--size", "16MiB", "--repeats", "3", "--threads", "1",
        "--patterns", "sequential_shard", "random_record",
    )  # fmt: skip
    assert results.site.name == "moosefs"
    assert re.search(r"10\.77\.0\.100", results.site.mount.server or results.site.mount.source)
    assert results.site.is_shared
    for clients in (1, 2):
        cold = phase_of(results, "sequential_shard", clients, "cold")
        most = max(repeat.bytes_per_s for repeat in cold.repeats)
        # A MooseFS block of 64 KiB goes with little beside it; Ethernet, IP and TCP take 5 %.
        assert most == pytest.approx(clients * LINK_BYTES_PER_S * 0.95, rel=0.1)
        states = {
            verdict.state for repeat in cold.repeats for verdict in repeat.verdict_of_node.values()
        }
        assert states == {"cold"}, [repeat.verdict_of_node for repeat in cold.repeats]
        warm = phase_of(results, "sequential_shard", clients, "warm")
        assert "cold" not in {repeat.verdict.state for repeat in warm.repeats}
        assert max(repeat.bytes_per_s for repeat in warm.repeats) > 3 * most
    (link,) = results.links
    assert set(link.nodes) == {"node0", "node1"}
    assert link.bytes_per_s == pytest.approx(LINK_BYTES_PER_S, rel=0.1)
    listed = subprocess.run(
        [*lab.enter("node0"), "ls", "-A", str(directory)], capture_output=True, text=True
    )
    assert listed.stdout == ""
