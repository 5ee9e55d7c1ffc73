"""`tonari bench io` on a real parallel filesystem: its name, what links allow, cold and warm."""

import os
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from tests.lab import parallel_fs
from tests.lab.cluster import Lab
from tests.lab.conftest import MakeLab
from tests.lab.parallel_fs import start_parallel_fs
from tests.multirank import ROOT
from tonari.bench.storage.results.document import read_document
from tonari.bench.storage.results.results import Phase, Results

pytestmark = [pytest.mark.lab, pytest.mark.timeout(600)]
LINK_BYTES_PER_S = 80e6 / 8
"""Of a node's link, with everything that frames the bytes."""

# What is mapped stays in memory, whoever asks for it to be dropped.
HOLD = """
import mmap, sys
from pathlib import Path
from tonari.bench.storage.patterns.phase import fill
from tonari.bench.storage.site.residency import resident_bytes
paths = [Path(path) for path in sys.argv[1:]]
fill(paths)
files = [path.open("rb") for path in paths]
held = [mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ) for file in files]
for _ in range(3):
    sum(view[at] for view in held for at in range(0, len(view), mmap.PAGESIZE))
print(resident_bytes(paths).bytes_resident, flush=True)
sys.stdin.read()
"""


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


def check_rate(best_bytes_per_s: float, link_bytes_per_s: float) -> None:
    """The best of three is never above the link's, whatever else runs, nor half of it."""
    assert 0.6 * link_bytes_per_s < best_bytes_per_s < 1.05 * link_bytes_per_s


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
        check_rate(most, clients * LINK_BYTES_PER_S)
        states = {
            verdict.state for repeat in cold.repeats for verdict in repeat.verdict_of_node.values()
        }
        assert states == {"cold"}, [repeat.verdict_of_node for repeat in cold.repeats]
        warm = phase_of(results, "sequential_shard", clients, "warm")
        assert {repeat.verdict.state for repeat in warm.repeats} == {"warm"}
        assert max(repeat.bytes_per_s for repeat in warm.repeats) > 3 * most
    (link,) = results.links
    assert set(link.nodes) == {"node0", "node1"}
    assert link.bytes_per_s == np.median(link.repeats)
    check_rate(max(link.repeats), LINK_BYTES_PER_S)
    listed = subprocess.run(
        [*lab.enter("node0"), "ls", "-A", str(directory)], capture_output=True, text=True
    )
    assert listed.stdout == ""


def test_what_a_node_holds_in_memory_is_called_warm_there_and_cold_on_the_other(
    pfs: tuple[Lab, Path], tmp_path: Path
) -> None:
    lab, directory = pfs
    shards = [str(directory / f"{number}.bin") for number in range(2)]
    for shard in shards:
        lab.run("node0", "dd", "if=/dev/urandom", f"of={shard}", "bs=1M", "count=4", "conv=fsync")
    holder = subprocess.Popen(
        [*lab.enter("node1"), sys.executable, "-c", HOLD, *shards], stdin=subprocess.PIPE,
        stdout=subprocess.PIPE, text=True, env={**os.environ, "PYTHONPATH": str(ROOT)},
    )  # fmt: skip
    with holder:
        assert holder.stdout is not None
        assert int(holder.stdout.readline()) == 2 * 4 << 20
        results = bench(
            lab, directory, tmp_path / "io.json", "--size", "1MiB", "--threads", "1",
            "--patterns", "random_record", "--dataset", *shards, "--temperatures", "cold",
        )  # fmt: skip
        holder.communicate()
    planted = phase_of(results, "dataset", 2, "cold")
    for repeat in planted.repeats:
        states = {node: verdict.state for node, verdict in repeat.verdict_of_node.items()}
        assert states == {"node0": "cold", "node1": "warm"}, repeat.verdict_of_node
        assert repeat.verdict.state == "unknown"
