"""A parallel filesystem on a lab's nodes: MooseFS, a metadata server and two servers of data.

All servers are on one machine, ``pfs``, whose link the nodes share. Every node mounts it for
itself, so that each has its own page cache of it; the servers' own cache is always warm.
"""

import shutil
import time
from dataclasses import dataclass
from pathlib import Path

from tests.lab.cluster import Lab

TOOLS = ("mfsmaster", "mfschunkserver", "mfsmount")
READY_TIMEOUT_S = 60.0
SERVER, ADDRESS = "pfs", "10.77.0.100"
EMPTY = Path("/var/lib/mfs/metadata.mfs.empty")

# Neither favoured by the scheduler nor spared when memory ends: others work on this machine.
MODEST = "WORKING_USER = root\nWORKING_GROUP = root\nNICE_LEVEL = 0\nDISABLE_OOM_KILLER = 0\n"
MASTER = "DATA_PATH = {own}/master\nEXPORTS_FILENAME = {own}/exports.cfg\n"
CHUNKS = """DATA_PATH = {own}/server{number}
HDD_CONF_FILENAME = {own}/disks{number}.cfg
MASTER_HOST = {address}
CSSERV_LISTEN_PORT = {port}
MASTER_RECONNECTION_DELAY = 1
"""
# No attribute is remembered: a node sees at once what another wrote.
OPTIONS = (
    "mfscachemode={mode},mfsattrcacheto=0,mfsnice=0,mfsallowoomkiller,"
    "mfsioretries=10,mfswritecachesize=64,mfsreadaheadsize=64"
)


def what_is_missing() -> str:
    """Say why there can be no parallel filesystem here; empty if there can."""
    absent = [tool for tool in TOOLS if shutil.which(tool) is None]
    absent += [] if EMPTY.exists() else [str(EMPTY)]
    if absent:
        return (
            f"needs {', '.join(absent)}: install moosefs-master, moosefs-chunkserver and "
            "moosefs-client"
        )
    return "" if Path("/dev/fuse").exists() else "needs /dev/fuse"


@dataclass(frozen=True)
class ParallelFs:
    """What is mounted on all nodes of a lab, until the lab ends.

    Attributes:
        path: Where, on every node.
    """

    lab: Lab
    path: Path

    def server_bytes(self) -> int:
        """Count the bytes that the servers have sent over their link, to all nodes."""
        return self.lab.sent_bytes(SERVER)

    def counts(self, node: str) -> dict[str, int]:
        """Read the filesystem's own counters of what a node's client has done."""
        text = self.lab.run(node, "cat", str(self.path / ".stats"))
        pairs = (line.partition(":") for line in text.splitlines())
        return {name: int(value) for name, _, value in pairs if value.strip().isdigit()}

    def shape(self, rate: str) -> None:
        """Give the servers' link a rate, each way; may be called while a job runs."""
        self.lab.shape(rate, SERVER)


def start_parallel_fs(lab: Lab, rate: str = "", *, cached: bool = True) -> ParallelFs:
    """Start the servers and mount them on every node; it ends with the lab.

    Blocks until a file can be written.

    Args:
        lab: It is open.
        rate: Of the servers' link, as tc writes it; empty: not limited.
        cached: Whether nodes keep what they have read; if not, as where data are far more than
            memory, every read is one of the filesystem's.
    """
    lab.add(SERVER, ADDRESS)
    own, path = lab.directory / SERVER, lab.directory / "parallel"
    path.mkdir()
    _configure(own)
    lab.run(SERVER, "mfsmaster", "-c", f"{own}/master.cfg", "start")
    for number in (0, 1):
        lab.run(SERVER, "mfschunkserver", "-c", f"{own}/server{number}.cfg", "start")
    options = OPTIONS.format(mode="AUTO" if cached else "DIRECT")
    for node in lab.nodes:
        lab.run(node, "mfsmount", str(path), "-H", ADDRESS, "-o", options)
    _await_servers(lab, path)
    if rate:
        lab.shape(rate, SERVER)
    return ParallelFs(lab, path)


def _await_servers(lab: Lab, path: Path) -> None:
    # Each brings the disk that both lie on. Whoever writes earlier is put off for many seconds.
    usage = shutil.disk_usage(lab.directory)
    disk = usage.used + usage.free
    deadline = time.monotonic() + READY_TIMEOUT_S
    while (found := _total_bytes(lab, path)) < 1.5 * disk:
        if time.monotonic() > deadline:
            raise RuntimeError(
                f"lab: {path} has {found} bytes after {READY_TIMEOUT_S:g} s, expected two servers "
                f"with {disk} each; see what mfschunkserver wrote to the system's log"
            )
        time.sleep(0.05)


def _total_bytes(lab: Lab, path: Path) -> int:
    blocks, block_bytes = lab.run("node0", "stat", "-f", "-c", "%b %S", str(path)).split()
    return int(blocks) * int(block_bytes)


def _configure(own: Path) -> None:
    (own / "master").mkdir()
    shutil.copyfile(EMPTY, own / "master/metadata.mfs")
    (own / "master.cfg").write_text(MODEST + MASTER.format(own=own))
    (own / "exports.cfg").write_text("* / rw,alldirs,maproot=0\n")
    for number in (0, 1):
        for directory in (f"server{number}", f"disk{number}"):
            (own / directory).mkdir()
        conf = CHUNKS.format(own=own, number=number, address=ADDRESS, port=9422 + number)
        (own / f"server{number}.cfg").write_text(MODEST + conf)
        (own / f"disks{number}.cfg").write_text(f"{own}/disk{number}\n")
