"""Slurm on a lab's nodes: one controller, on node0, and a daemon on each node.

No accounts and no keys: everything runs as root, and messages are not signed.
"""

import os
import shutil
import time
from collections.abc import Mapping
from pathlib import Path

from tests.lab.cluster import UP_TIMEOUT_S, Lab

TOOLS = ("slurmctld", "slurmd", "sbatch", "scontrol", "srun")

CONF = """
ClusterName=lab
SlurmctldHost=node0
SlurmUser=root
AuthType=auth/none
CredType=cred/none
StateSaveLocation={directory}/state
SlurmdSpoolDir={directory}/spool.%n
SlurmctldPidFile={directory}/ctld.pid
SlurmdPidFile={directory}/slurmd.%n.pid
SlurmctldLogFile={directory}/ctld.log
SlurmdLogFile={directory}/slurmd.%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
MpiDefault=none
TmpFS={scratch}
KillWait=5
SlurmdTimeout=30
ReturnToService=2
SlurmdParameters=config_overrides
NodeName=node[0-{last}] NodeAddr=10.77.0.[1-{num_nodes}] CPUs=1 RealMemory=2000 State=UNKNOWN
PartitionName=all Nodes=ALL Default=YES MaxTime=INFINITE State=UP
"""


def what_is_missing() -> str:
    """Say why Slurm cannot run here; empty if it can."""
    absent = [tool for tool in TOOLS if shutil.which(tool) is None]
    return (
        f"needs {', '.join(absent)}: install slurmctld, slurmd and slurm-client" if absent else ""
    )


def start_slurm(lab: Lab, directory: Path) -> Mapping[str, str]:
    """Start Slurm on all nodes; it ends with the lab. Blocks until the nodes are idle.

    Returns:
        Variables for those who talk to it.
    """
    (directory / "state").mkdir(parents=True)
    conf = directory / "slurm.conf"
    count = lab.num_nodes
    conf.write_text(
        CONF.format(directory=directory, scratch=lab.scratch, last=count - 1, num_nodes=count)
    )
    environment = {**os.environ, "SLURM_CONF": str(conf)}
    lab.run("node0", "slurmctld", "-f", str(conf))
    for node in lab.nodes:
        lab.run(node, "slurmd", "-f", str(conf))
    deadline = time.monotonic() + UP_TIMEOUT_S
    asked = ("env", f"SLURM_CONF={conf}", "sinfo", "--noheader", "--format=%t %D")
    while lab.run("node0", *asked).strip() != f"idle {count}":
        if time.monotonic() > deadline:
            raise RuntimeError(f"lab: Slurm's nodes did not come up; see {directory}/*.log")
        time.sleep(0.1)
    return environment
