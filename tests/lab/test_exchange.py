"""An exchange over real links between nodes: every row owned once, and a cut link found out."""

import os
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.lab.cluster import Lab
from tests.lab.conftest import MakeLab
from tests.multirank import ROOT, read_reports
from tonari.bench.loader.launch import end

pytestmark = pytest.mark.lab
PROGRAM = Path(__file__).with_name("epochs_on_nodes.py")
EPOCHS = 3


def start(lab: Lab, out: Path, *arguments: object) -> "subprocess.Popen[bytes]":
    command = [*lab.mpiexec(lab.num_nodes), sys.executable, str(PROGRAM), str(out)]
    command += [str(lab.scratch), *map(str, arguments)]
    env = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    with open(out / "log", "wb") as log:
        return subprocess.Popen(
            command, env=env, stdin=subprocess.DEVNULL, stdout=log, stderr=log,
            start_new_session=True,
        )  # fmt: skip


def test_after_epochs_of_exchange_over_four_nodes_every_row_is_owned_once(
    make_lab: MakeLab, tmp_path: Path
) -> None:
    lab = make_lab(4, "1gbit")
    before = lab.sent_bytes("node1")
    job = start(lab, tmp_path, 203, 0.3, EPOCHS, 30)
    try:
        assert job.wait(90) == 0, (tmp_path / "log").read_text()
    finally:
        end(job, wait_s=0)
    reports = read_reports(tmp_path, 4)
    assert [report["host"] for report in reports] == lab.nodes
    assert [report["layout"] for report in reports] == [[1, 1, 1, 1]] * 4
    for epoch in range(EPOCHS):
        given = [i for report in reports for i in report["given"][epoch]]
        assert sorted(given) == list(range(203)), f"epoch {epoch}"
    moved = {i for e in (0, EPOCHS - 1) for i in reports[0]["given"][e]}
    assert len(moved) > len(reports[0]["given"][0]), "rows came from other nodes"
    assert sum(report["read_from_source"] for report in reports) == 203
    # What makes a node a node: a disk and a memory of its own, and bytes on its link.
    assert [report["nodes_in_cache"] for report in reports] == [[f"node{n}"] for n in range(4)]
    assert len({report["shared_memory"] for report in reports}) == 4
    assert lab.sent_bytes("node1") > before


def test_a_cut_link_ends_every_rank_within_the_time_limit_and_names_who_is_missing(
    make_lab: MakeLab, tmp_path: Path
) -> None:
    lab = make_lab(4)
    job = start(lab, tmp_path, 203, 0.3, 10**6, 3)
    try:
        await_ranks(job, tmp_path, 4)
        lab.cut("node2")
        cut = time.monotonic()
        # Not the launcher: mpiexec goes on to wait for the node that it cannot reach.
        while alive := [node for node in lab.nodes if has_rank(lab, node)]:
            taken = time.monotonic() - cut
            assert taken < 20, f"{alive} run after {taken:.0f} s\n{(tmp_path / 'log').read_text()}"
            time.sleep(0.1)
    finally:
        end(job, wait_s=0)
    said = (tmp_path / "log").read_text()
    assert re.search(r"rank 2\b|ranks \[2\]|ranks 2-3", said), said


def has_rank(lab: Lab, node: str) -> bool:
    return any(command.startswith(sys.executable) for command in lab.commands(node))


def await_ranks(job: "subprocess.Popen[bytes]", out: Path, num_ranks: int) -> None:
    """Wait until all ranks have begun to exchange."""
    deadline = time.monotonic() + 60
    while len(list(out.glob("*.running"))) < num_ranks:
        assert job.poll() is None, (out / "log").read_text()
        assert time.monotonic() < deadline, (out / "log").read_text()
        time.sleep(0.02)


RECEIVE = """
import socket
listener = socket.socket()
listener.setsockopt(socket.SOL_SOCKET, 33, 32 << 20)
listener.bind(("", 5000)); listener.listen(); print("ready", flush=True)
connection, _ = listener.accept()
while connection.recv(1 << 16): pass
"""
# SO_SNDBUFFORCE (32) and SO_RCVBUFFORCE (33): all bytes wait in the sender's kernel, and the
# receiver's has room for all, so that no process is needed while they go. The kernel's own watch
# runs as long as bytes are under way: tcpi_busy_time, microseconds, by its place in tcp_info.
SEND = """
import fcntl, socket, struct, sys, termios, time
sender = socket.socket()
sender.setsockopt(socket.SOL_SOCKET, 32, 32 << 20)
sender.connect(("node1", 5000)); sender.sendall(bytes(int(sys.argv[1])))
while struct.unpack("i", fcntl.ioctl(sender, termios.TIOCOUTQ, bytes(4)))[0]: time.sleep(0.01)
print(struct.unpack_from("Q", sender.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 192), 168)[0])
"""


@pytest.mark.parametrize("num_bytes", [4 << 20, 312_000], ids=["much", "gradients"])
def test_a_link_carries_its_rate_and_no_more(make_lab: MakeLab, num_bytes: int) -> None:
    lab = make_lab(2, "80mbit")
    command = [*lab.enter("node1"), sys.executable, "-c", RECEIVE]
    with subprocess.Popen(command, stdout=subprocess.PIPE, start_new_session=True) as receiver:
        assert receiver.stdout is not None
        assert receiver.stdout.readline() == b"ready\n"
        busy_s = int(lab.run("node0", sys.executable, "-c", SEND, str(num_bytes))) / 1e6
    # 10 MB/s less headers; what two buckets let pass at once is a tenth of the bytes at the most.
    assert 7e6 < num_bytes / busy_s < 11.5e6


def test_nothing_is_left_when_a_lab_is_closed(make_lab: MakeLab, tmp_path: Path) -> None:
    lab = make_lab(2)
    pid = int((lab.directory / "node0.pid").read_text())
    command = [*lab.enter("node1"), "sleep", "1000"]
    with subprocess.Popen(command, start_new_session=True) as stray:
        lab.close()
        assert stray.wait(10) != 0
    assert not Path(f"/proc/{pid}").exists()
    assert not lab.directory.exists()
    assert str(lab.directory) not in Path("/proc/mounts").read_text()
