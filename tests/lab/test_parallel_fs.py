"""The lab's parallel filesystem is one: shared contents, own page caches, links that limit."""

import hashlib
import json
import os
import select
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.lab import parallel_fs
from tests.lab.cluster import Lab
from tests.lab.conftest import MakeLab
from tests.lab.parallel_fs import SERVER, ParallelFs, start_parallel_fs
from tests.multirank import ROOT

READ = Path(__file__).with_name("read_on_node.py")
MIB = 1 << 20
TIMEOUT_S = 60


@pytest.fixture
def make_fs(make_lab: MakeLab):
    """Bring up a lab with a parallel filesystem."""
    if reason := parallel_fs.what_is_missing():
        pytest.skip(reason)

    def make(num_nodes: int) -> ParallelFs:
        return start_parallel_fs(make_lab(num_nodes))

    return make


def write(fs: ParallelFs, name: str, num_bytes: int) -> tuple[Path, str]:
    """Write a file on node 0; returns where it is, and the digest of its content."""
    data = os.urandom(num_bytes)
    own = fs.lab.directory / name
    own.write_bytes(data)
    path = fs.path / name
    copy = ["dd", f"if={own}", f"of={path}", "bs=1M", "conv=fsync"]
    subprocess.run(
        [*fs.lab.enter("node0"), *copy], check=True, capture_output=True, timeout=TIMEOUT_S
    )
    return path, hashlib.blake2b(data).hexdigest()


class Reader:
    """A read of a file that waits on a node."""

    def __init__(self, lab: Lab, node: str, path: Path, mode: str) -> None:
        self.process = subprocess.Popen(
            [*lab.enter(node), sys.executable, str(READ), str(path), mode],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, start_new_session=True,
            env={**os.environ, "PYTHONPATH": str(ROOT)},
        )  # fmt: skip
        assert self._line() == b"ready\n"

    def start(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(b"\n")
        self.process.stdin.flush()

    def report(self) -> dict[str, Any]:
        return json.loads(self._line())  # type: ignore[no-any-return]

    def _line(self) -> bytes:
        assert self.process.stdout is not None
        assert select.select([self.process.stdout], [], [], TIMEOUT_S)[0], "nothing was said"
        return self.process.stdout.readline()

    def close(self) -> None:
        self.process.kill()
        self.process.communicate()


@contextmanager
def readers(fs: ParallelFs, nodes: Sequence[str], path: Path, mode: str) -> Iterator[list[Reader]]:
    """Have a reader ready on each node."""
    made: list[Reader] = []
    try:
        for node in nodes:
            made.append(Reader(fs.lab, node, path, mode))
        yield made
    finally:
        for reader in made:
            reader.close()


def read(fs: ParallelFs, nodes: Sequence[str], path: Path, mode: str) -> list[dict[str, Any]]:
    """Read a file on some nodes at once."""
    with readers(fs, nodes, path, mode) as made:
        for reader in made:
            reader.start()
        return [reader.report() for reader in made]


def bytes_per_s(reports: list[dict[str, Any]], num_bytes: int) -> float:
    """Of all readers together, from the first start to the last end."""
    seconds: float = max(r["ended"] for r in reports) - min(r["started"] for r in reports)
    return len(reports) * num_bytes / seconds


def held_back(fs: ParallelFs, nodes: Sequence[str], path: Path, most_bytes_per_s: float) -> bool:
    """Read on some nodes at once; returns whether it was the servers' link that held packets back.

    The links' own counters judge: a busy machine makes every read slower than its link.
    """

    def counts() -> list[int]:
        of_nodes = [fs.lab.held_back(node) for node in fs.lab.nodes]
        return [fs.lab.held_back(SERVER, sending=True), sum(of_nodes)]

    before = counts()
    reports = read(fs, nodes, path, "evict")
    by_servers, by_nodes = np.subtract(counts(), before).tolist()
    assert {report["state"] for report in reports} == {"cold"}
    # What a bucket lets pass at once is a thirtieth of the bytes.
    assert bytes_per_s(reports, path_bytes(fs, path)) < 1.05 * most_bytes_per_s
    assert max(by_servers, by_nodes) > 100, "a link limits, not what is behind it"
    return bool(by_servers > by_nodes)


def path_bytes(fs: ParallelFs, path: Path) -> int:
    return int(fs.lab.run("node0", "stat", "-c", "%s", str(path)))


@pytest.mark.lab
def test_each_node_reads_what_one_wrote_once_over_the_link_that_limits(make_fs) -> None:
    fs, num_bytes = make_fs(4), 8 * MIB
    path, digest = write(fs, "file", num_bytes)
    fs.lab.shape("80mbit")
    fs.shape("160mbit")
    before, operations = fs.server_bytes(), fs.counts("node3")["fuse_ops.read"]
    [first] = read(fs, ["node3"], path, "keep")
    sent = fs.server_bytes() - before
    assert num_bytes < sent < 1.2 * num_bytes
    assert fs.counts("node3")["fuse_ops.read"] - operations >= num_bytes // (128 << 10)
    [again] = read(fs, ["node3"], path, "keep")
    # Not none: the client does not keep every page that it has read.
    assert fs.server_bytes() - before - sent < 0.1 * num_bytes
    assert first["state"] == "cold"
    others = read(fs, ["node1", "node2"], path, "keep")
    assert {report["state"] for report in others} == {"cold"}, "pages of node 3 alone"
    reports = [first, again, *others]
    assert {report["digest"] for report in reports} == {digest}
    # One file by its content, though nodes call the filesystem by numbers of their own.
    assert len({report["device"] for report in reports}) == 3
    assert len({report["inode"] for report in reports}) == 1
    assert not held_back(fs, ["node3"], path, 10e6)
    # All at once, through the servers' link: half of what their own four could take.
    assert held_back(fs, fs.lab.nodes, path, 20e6)


def witnessed(fs: ParallelFs, node: str, path: Path, mode: str) -> tuple[str, float]:
    """Read on one node; returns the verdict, and the share that the servers' link carried."""
    before = fs.server_bytes()
    [report] = read(fs, [node], path, mode)
    assert (report["filesystem"], report["is_shared"]) == ("moosefs", True)
    assert report["server"] == f"{parallel_fs.ADDRESS}:9421"
    return report["state"], (fs.server_bytes() - before) / path_bytes(fs, path)


@pytest.mark.lab
def test_a_read_is_called_warm_on_the_node_where_it_was_and_cold_elsewhere(make_fs) -> None:
    fs = make_fs(3)
    path, _ = write(fs, "file", 8 * MIB)
    seen = [witnessed(fs, "node1", path, "evict")]
    assert seen[0][0] == "cold"
    # The client does not keep every page of a first read: several make it warm.
    while len(seen) < 6 and seen[-1][0] != "warm":
        seen.append(witnessed(fs, "node1", path, "keep"))
    assert seen[-1][0] == "warm", seen
    seen.append(witnessed(fs, "node2", path, "keep"))
    seen.append(witnessed(fs, "node1", path, "evict"))
    assert [state for state, _ in seen[-2:]] == ["cold", "cold"]
    # The servers' end of the link, which no verdict was made from, agrees with each.
    for state, share in seen:
        assert state != "warm" or share < 0.02, seen
        assert state != "cold" or share > 0.9, seen


@pytest.mark.lab
def test_a_node_without_its_link_waits_while_others_read_and_goes_on_when_it_is_mended(
    make_fs,
) -> None:
    fs = make_fs(2)
    path, digest = write(fs, "file", 4 * MIB)
    with readers(fs, ["node1"], path, "evict") as [cut]:
        fs.lab.cut("node1")
        cut.start()
        [other] = read(fs, ["node0"], path, "evict")
        assert other["digest"] == digest
        assert cut.process.poll() is None
        fs.lab.mend("node1")
        assert cut.report()["digest"] == digest


@pytest.mark.lab
def test_no_process_and_no_mount_of_the_filesystem_is_left(make_fs) -> None:
    fs = make_fs(2)
    path, _ = write(fs, "file", MIB)
    with readers(fs, ["node1"], path, "keep"):
        pids = [int((fs.lab.directory / f"{name}.pid").read_text()) for name in ("node1", SERVER)]
        # As a test that fails amid a read
        fs.lab.close()
    assert not any(Path(f"/proc/{pid}").exists() for pid in pids)
    assert str(fs.lab.directory) not in Path("/proc/mounts").read_text()
    assert not [
        entry for entry in Path("/proc").glob("[0-9]*/cmdline") if mentions(entry, fs.lab.directory)
    ]
    assert not fs.lab.directory.exists()


def mentions(command: Path, directory: Path) -> bool:
    try:
        return f"{directory}/" in command.read_text(errors="replace")
    except OSError:
        return False


def test_what_a_parallel_filesystem_needs_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")
    said = parallel_fs.what_is_missing()
    assert said.startswith("needs mfsmaster, mfschunkserver, mfsmount")
    assert "install moosefs-master" in said
