"""OpenPBS on a lab's nodes: server, scheduler and pbs_comm on node0, pbs_mom on each node.

Debian has no package. From its sources (https://github.com/openpbs/openpbs), as root, in about ten
minutes on two cores:

    apt-get install gcc g++ make libtool autoconf automake swig libhwloc-dev libx11-dev libxt-dev \\
      libxext-dev libxft-dev libedit-dev libical-dev ncurses-dev libexpat1-dev libssl-dev \\
      libcjson-dev tcl-dev tk-dev perl python3-dev postgresql postgresql-contrib \\
      postgresql-server-dev-all
    ./autogen.sh
    ./configure --prefix=/opt/pbs --disable-ptl PYTHON=/usr/bin/python3 CFLAGS="-O1 -w"
    make -j2 && make install && chmod 4755 /opt/pbs/sbin/pbs_iff /opt/pbs/sbin/pbs_rcp

Jobs run as a user that the nodes alone have: pbs_mom does not count root's processes, and takes a
job of root for ended at its first signal. Each node sees files of its own where PBS keeps its own
(/var/spool/pbs: it refuses a home below a directory that all may write, such as /tmp), where it
makes a job's TMPDIR (/var/tmp), and where a login shell looks for commands and users.
"""

import os
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

from tests.lab.cluster import Lab
from tests.multirank import ROOT

EXEC = Path(os.environ.get("PBS_EXEC", "/opt/pbs"))
USER, USER_ID = "trainer", 7700
CALL_TIMEOUT_S = 60.0
CONF = """
PBS_EXEC={exec}
PBS_SERVER=node0
PBS_HOME=/var/spool/pbs
PBS_START_SERVER={first}
PBS_START_SCHED={first}
PBS_START_COMM={first}
PBS_START_MOM=1
PBS_CORE_LIMIT=0
PBS_SCP=/bin/cp
"""
PROFILE = """
export PBS_CONF_FILE=/var/spool/pbs.conf PYTHONPATH={root}
PATH=$PATH:{exec}/bin
# Sockets alone: other ways would find out that the machine is one.
export FI_PROVIDER=tcp FI_TCP_IFACE=eth0
"""
SETTINGS = ("set server flatuid = true", "set server job_history_enable = true")


def what_is_missing() -> str:
    """Say why PBS cannot run here; empty if it can."""
    if (EXEC / "libexec" / "pbs_init.d").exists():
        return ""
    return f"needs OpenPBS in {EXEC}: build it as {__file__} says, or set PBS_EXEC"


@dataclass(frozen=True)
class Pbs:
    """PBS on all nodes of a lab, and the user who calls qsub on node 0.

    Attributes:
        lab: Its nodes.
        home: The user's, seen by all of them.
    """

    lab: Lab
    home: Path

    def call(self, *command: str, timeout_s: float = CALL_TIMEOUT_S) -> str:
        """Run a command as the user; returns what it wrote."""
        user = ["setpriv", f"--reuid={USER_ID}", f"--regid={USER_ID}", "--clear-groups"]
        variables = [
            "PBS_CONF_FILE=/var/spool/pbs.conf", f"HOME={self.home}", f"USER={USER}",
            f"PYTHONPATH={ROOT}", f"PATH=/usr/bin:/bin:{EXEC}/bin", "OMP_NUM_THREADS=1",
        ]  # fmt: skip
        ended = subprocess.run(
            [*self.lab.enter("node0"), *user, "env", "-i", "-C", str(self.home), *variables,
             *command],
            stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=timeout_s,
        )  # fmt: skip
        assert not ended.returncode, f"{ended.stdout}\n{ended.stderr}"
        return ended.stdout

    def operate(self, *command: str) -> str:
        """Run a command as PBS's operator, who is root here."""
        return _call(self.lab, "node0", f"{EXEC}/bin/{command[0]}", *command[1:])

    def init(self, *options: str) -> None:
        """Write a script by `tonari init`, for this lab's data."""
        self.call(sys.executable, "-m", "tonari", "init", ".", "--scheduler", "pbs", "--data",
                  "data/cifar10-train.parquet", "--image", "jpg", *options)  # fmt: skip

    def submit(self, script: str, *options: str, **variables: str) -> str:
        """Submit a script with variables, whose values hold no comma; returns the job."""
        listed = [f"{name}={value}" for name, value in variables.items()]
        given = ["-v", ",".join(listed)] if listed else []
        return self.call("qsub", *options, *given, script).strip()

    def state(self, job: str) -> str:
        """Ask PBS for a job's letter: Q queued, H held, R running, E exiting, F finished."""
        return self.call("qstat", "-x", job).splitlines()[-1].split()[-2]

    def log(self, job: str) -> str:
        """Read what a job has written; PBS brings it when the job ends."""
        number = job.partition(".")[0]
        return "".join(path.read_text() for path in self.home.glob(f"*.o{number}"))

    def await_end(self, job: str, *, within_s: float) -> str:
        """Wait for a job to finish; returns what it has written."""
        deadline = time.monotonic() + within_s
        while self.state(job) != "F":
            assert time.monotonic() < deadline, f"{job} is {self.state(job)} after {within_s} s"
            time.sleep(0.5)
        return self.log(job)


def start_pbs(lab: Lab, home: Path, *, kill_delay_s: int = 10) -> Pbs:
    """Start PBS on all nodes; it ends with the lab. Blocks until the nodes are free.

    Args:
        lab: Its nodes.
        home: Becomes the user's, with all in it; others may enter every directory above it.
        kill_delay_s: From SIGTERM to SIGKILL, where a job is over its limit or is deleted.
    """
    for path in (home, *home.rglob("*")):
        os.chown(path, USER_ID, USER_ID)
    for node in lab.nodes:
        _start(lab, node, home)
    # The first is there by PBS's own start.
    nodes = [f"create node {node}" for node in lab.nodes[1:]]
    for line in (*nodes, *SETTINGS, f"set queue workq kill_delay = {kill_delay_s}"):
        _call(lab, "node0", f"{EXEC}/bin/qmgr", "-c", line)
    deadline = time.monotonic() + CALL_TIMEOUT_S
    while _call(lab, "node0", f"{EXEC}/bin/pbsnodes", "-a").count("state = free") < lab.num_nodes:
        if time.monotonic() > deadline:
            raise RuntimeError(f"lab: PBS's nodes did not come up; see {lab.directory}/node*/spool")
        time.sleep(0.2)
    return Pbs(lab, home)


def _start(lab: Lab, node: str, home: Path) -> None:
    own = lab.directory / node / "of-pbs"
    user = f"{USER}:x:{USER_ID}:{USER_ID}::{home}:/bin/bash\n"
    files = {
        "/var/spool/pbs.conf": CONF.format(exec=EXEC, first=int(node == "node0")),
        "/etc/profile.d/pbs.sh": PROFILE.format(exec=EXEC, root=ROOT),
        "/etc/passwd": Path("/etc/passwd").read_text() + user,
        "/etc/group": Path("/etc/group").read_text() + f"{USER}:x:{USER_ID}:\n",
    }
    for name, text in files.items():
        path = own / name[1:]
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    (own / "var/tmp").mkdir()
    (own / "var/tmp").chmod(0o1777)
    for name in ("/var/spool", "/var/tmp", "/etc/profile.d", "/etc/passwd", "/etc/group"):
        lab.run(node, "mount", "--bind", str(own / name[1:]), name)
    _show_python(lab, node, own)
    _call(lab, node, f"{EXEC}/libexec/pbs_init.d", "start")


def _show_python(lab: Lab, node: str, own: Path) -> None:
    """Show the user a Python that lies in a directory which only root may enter."""
    python = Path(sys.base_prefix)
    closed = [path for path in reversed(python.parents) if not path.stat().st_mode & 0o001]
    if closed:
        shown = own / "python" / python.relative_to(closed[0])
        shown.mkdir(parents=True)
        lab.run(node, "mount", "--bind", str(python), str(shown))
        lab.run(node, "mount", "--rbind", str(own / "python"), str(closed[0]))


def _call(lab: Lab, node: str, *command: str) -> str:
    """Run one of PBS's commands as root; daemons keep what they write to, so it goes to a file."""
    log = lab.directory / "pbs.log"
    with open(log, "w") as written:
        ended = subprocess.run(
            [*lab.enter(node), "env", "PBS_CONF_FILE=/var/spool/pbs.conf", *command],
            stdin=subprocess.DEVNULL, stdout=written, stderr=subprocess.STDOUT,
            timeout=CALL_TIMEOUT_S,
        )  # fmt: skip
    if ended.returncode:
        raise RuntimeError(f"lab: `{' '.join(command)}` failed on {node}: {log.read_text()}")
    return log.read_text()
