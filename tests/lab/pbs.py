"""OpenPBS on a lab's nodes: server, scheduler and pbs_comm on node0, pbs_mom on each node.

Debian has no package. From its sources (https://github.com/openpbs/openpbs), as root, in about ten
minutes on two cores:

    apt-get install gcc g++ make libtool autoconf automake swig libhwloc-dev libx11-dev libxt-dev \
      libxext-dev libxft-dev libedit-dev libical-dev ncurses-dev libexpat1-dev libssl-dev \
      libcjson-dev tcl-dev tk-dev perl python3-dev postgresql postgresql-contrib \
      postgresql-server-dev-all
    ./autogen.sh
    ./configure --prefix=/opt/pbs --disable-ptl PYTHON=/usr/bin/python3 CFLAGS="-O1 -w"
    make -j2 && make install

Each node sees directories of its own where PBS keeps its files (/var/spool/pbs: PBS refuses a home
below a directory that all may write, such as /tmp), where it makes a job's TMPDIR (/var/tmp), and
where a login shell learns of its commands (/etc/profile.d). Jobs run as root.
"""

import os
import subprocess
import time
from collections.abc import Mapping
from pathlib import Path

from tests.lab.cluster import Lab

EXEC = Path(os.environ.get("PBS_EXEC", "/opt/pbs"))
UP_TIMEOUT_S = 60.0
OWN = {"spool": "/var/spool", "tmp": "/var/tmp", "profile": "/etc/profile.d"}
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
export PBS_CONF_FILE=/var/spool/pbs.conf
PATH=$PATH:{exec}/bin
"""
SETTINGS = (
    "set server flatuid = true",
    "set server acl_roots = root@*",
    "set server job_history_enable = true",
)


def what_is_missing() -> str:
    """Say why PBS cannot run here; empty if it can."""
    if (EXEC / "libexec" / "pbs_init.d").exists():
        return ""
    return f"needs OpenPBS in {EXEC}: build it as {__file__} says, or set PBS_EXEC"


def start_pbs(lab: Lab, *, kill_delay_s: int = 10) -> Mapping[str, str]:
    """Start PBS on all nodes; it ends with the lab. Blocks until the nodes are free.

    Args:
        lab: Its nodes.
        kill_delay_s: From SIGTERM to SIGKILL, where a job is over its limit or is deleted.

    Returns:
        Variables for those who talk to it.
    """
    environment = {
        **os.environ,
        "PBS_CONF_FILE": "/var/spool/pbs.conf",
        "PATH": f"{os.environ['PATH']}:{EXEC}/bin",
    }
    for node in lab.nodes:
        _start(lab, node)
    # The first is there by PBS's own start.
    nodes = [f"create node {node}" for node in lab.nodes[1:]]
    for line in (*nodes, *SETTINGS, f"set queue workq kill_delay = {kill_delay_s}"):
        _call(lab, "node0", f"{EXEC}/bin/qmgr", "-c", line)
    deadline = time.monotonic() + UP_TIMEOUT_S
    while _call(lab, "node0", f"{EXEC}/bin/pbsnodes", "-a").count("state = free") < lab.num_nodes:
        if time.monotonic() > deadline:
            raise RuntimeError(f"lab: PBS's nodes did not come up; see {lab.directory}/node*/spool")
        time.sleep(0.2)
    return environment


def _start(lab: Lab, node: str) -> None:
    own = lab.directory / node / "of-pbs"
    for name, place in OWN.items():
        (own / name).mkdir(parents=True)
        (own / name).chmod(0o1777 if name == "tmp" else 0o755)
        lab.run(node, "mount", "--bind", str(own / name), place)
    (own / "profile" / "pbs.sh").write_text(PROFILE.format(exec=EXEC))
    conf = CONF.format(exec=EXEC, first=int(node == "node0"))
    (own / "spool" / "pbs.conf").write_text(conf)
    _call(lab, node, f"{EXEC}/libexec/pbs_init.d", "start")


def _call(lab: Lab, node: str, *command: str) -> str:
    """Run one of PBS's commands; daemons keep what they write to, so it goes to a file."""
    log = lab.directory / "pbs.log"
    with open(log, "w") as written:
        ended = subprocess.run(
            [*lab.enter(node), "env", "PBS_CONF_FILE=/var/spool/pbs.conf", *command],
            stdin=subprocess.DEVNULL, stdout=written, stderr=subprocess.STDOUT,
            timeout=UP_TIMEOUT_S,
        )  # fmt: skip
    if ended.returncode:
        raise RuntimeError(f"lab: `{' '.join(command)}` failed on {node}: {log.read_text()}")
    return log.read_text()
