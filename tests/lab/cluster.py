"""A small virtual cluster on one machine: nodes of their own name, network, mounts and links.

A node is a process that holds namespaces (network, mounts, host name, IPC) and reads a pipe from
this one: it ends when the pipe closes, however this process ends, and ends all that runs there. A
switch, one more such process, joins the nodes' links in a bridge; the machine's own network is not
touched. Needs root, iproute2 (ip, tc) and util-linux (unshare, nsenter).

What is not real: the processor and its caches are one machine's, the links have no latency beyond
what their queue makes, all nodes see one process table and one /tmp. A parallel filesystem and a
batch system run on it: `tests/lab/parallel_fs.py`, `tests/lab/slurm.py`.
"""

import json
import os
import shutil
import signal
import subprocess
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO

from typing_extensions import Self

from tonari.mpi import mpiexec_command

TOOLS = ("ip", "tc", "unshare", "nsenter", "mount")
UP_TIMEOUT_S = 10.0
SWITCH = "switch"

# Its own /dev/shm, or MPI would pass from node to node through memory. Daemons, which no signal of
# their starter reaches, end when the pipe does.
HOLD = """
hostname {name} && mount -t tmpfs -o size=2g,mode=1777 shm /dev/shm &&
mount --bind {own} {scratch} && mount --bind {hosts} /etc/hosts && ip link set lo up &&
echo ready || exit
while read -r _; do :; done
exec 2> /dev/null
own=$(readlink /proc/$$/ns/net)
for entry in /proc/[0-9]*; do
    [ "$entry" = /proc/$$ ] || [ "$(readlink "$entry/ns/net")" != "$own" ] ||
        kill -KILL "${{entry#/proc/}}"
done
"""

ENTER = """#!/bin/sh
# Called by mpiexec as it would call ssh: [options] HOST COMMAND...
while case "$1" in -*) true;; *) false;; esac; do shift; done
host=$1; shift
exec nsenter -n -m -u -i -t "$(cat {directory}/$host.pid)" -- sh -c "$*"
"""


def what_is_missing() -> str:
    """Say why no lab can be made here; empty if it can."""
    if os.geteuid() != 0:
        return "the lab makes network namespaces, which needs root"
    absent = [tool for tool in TOOLS if shutil.which(tool) is None]
    if absent:
        return f"the lab needs {', '.join(absent)}: install iproute2 and util-linux"
    probe = subprocess.run(["unshare", "-n", "-m", "-u", "-i", "true"], capture_output=True)
    return f"the lab makes namespaces: {probe.stderr.decode().strip()}" if probe.returncode else ""


BURST_S, LEAST_BURST_BYTES = 0.5e-3, 16 << 10
"""What a link passes at once, in seconds of its rate."""


@dataclass
class Lab:
    """Nodes ``node0``, ``node1``, ... at 10.77.0.1, 10.77.0.2, ..., while it is open.

    Attributes:
        directory: An empty directory, removed at the end.
        num_nodes: At least one.
        rate: Of every node's link, each way, as tc writes it: ``"1gbit"``; empty: not limited.
    """

    directory: Path
    num_nodes: int = 4
    rate: str = ""
    _holders: dict[str, "subprocess.Popen[bytes]"] = field(default_factory=dict, init=False)
    _namespaces: set[str] = field(default_factory=set, init=False)

    @property
    def scratch(self) -> Path:
        """The node-local directory: the same path on every node, another directory on each."""
        return self.directory / "scratch"

    @property
    def nodes(self) -> list[str]:
        return [f"node{number}" for number in range(self.num_nodes)]

    def __enter__(self) -> Self:
        try:
            self._up()
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _up(self) -> None:
        self.scratch.mkdir(parents=True)
        names = [f"10.77.0.{number + 1} {node}\n" for number, node in enumerate(self.nodes)]
        self._hosts.write_text("127.0.0.1 localhost\n" + "".join(names))
        self._launcher.write_text(ENTER.format(directory=self.directory))
        self._launcher.chmod(0o755)
        self._hold(SWITCH)
        self.run(SWITCH, "ip", "link", "add", "br0", "type", "bridge")
        self.run(SWITCH, "ip", "link", "set", "br0", "up")
        for number, node in enumerate(self.nodes):
            self._hold(node)
            self._link(node, f"10.77.0.{number + 1}/24")
        if self.rate:
            self.shape(self.rate)

    @property
    def _hosts(self) -> Path:
        return self.directory / "hosts"

    @property
    def _launcher(self) -> Path:
        return self.directory / "enter"

    def _hold(self, name: str) -> None:
        own = self.directory / name
        own.mkdir()
        script = HOLD.format(name=name, own=own, scratch=self.scratch, hosts=self._hosts)
        # Slave: what the machine mounts is seen in the node, and never the reverse.
        command = ["unshare", "-n", "-m", "-u", "-i", "--propagation", "slave", "sh", "-c", script]
        holder = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, start_new_session=True
        )
        self._holders[name] = holder
        assert holder.stdout is not None
        if holder.stdout.readline() != b"ready\n":
            raise RuntimeError(f"lab: {name} did not come up; run `{' '.join(command)}` to see why")
        self._namespaces.add(_namespace(holder.pid))
        (self.directory / f"{name}.pid").write_text(str(holder.pid))

    def _link(self, node: str, address: str) -> None:
        ends = [str(self._holders[name].pid) for name in (SWITCH, node)]
        _call("ip", "link", "add", f"to-{node}", "netns", ends[0], "type", "veth",
              "peer", "name", "eth0", "netns", ends[1])  # fmt: skip
        self.run(SWITCH, "ip", "link", "set", f"to-{node}", "master", "br0", "up")
        self.run(node, "ip", "addr", "add", address, "dev", "eth0")
        self.run(node, "ip", "link", "set", "eth0", "up")

    def add(self, name: str, address: str) -> None:
        """Join a machine that is not one of the nodes, such as a server, to the switch.

        Args:
            name: Of the machine; it is held and ended as a node is.
            address: In 10.77.0.0/24.
        """
        with open(self._hosts, "a") as hosts:
            hosts.write(f"{address} {name}\n")
        self._hold(name)
        self._link(name, f"{address}/24")

    def shape(self, rate: str, *names: str) -> None:
        """Give links a rate, each way; may be called again while a job runs.

        Args:
            rate: As tc writes it.
            names: Of machines; by default all nodes.
        """
        # More at once, as a message of gradients is, would pass as if there were no limit
        burst = max(int(bytes_per_s(rate) * BURST_S), LEAST_BURST_BYTES)
        limit = ["root", "tbf", "rate", rate, "burst", f"{burst}b", "latency", "50ms"]
        for node in names or self.nodes:
            self.run(node, "tc", "qdisc", "replace", "dev", "eth0", *limit)
            self.run(SWITCH, "tc", "qdisc", "replace", "dev", f"to-{node}", *limit)

    def cut(self, node: str) -> None:
        """Take a node's link down, as a pulled cable: nobody is told, packets are gone."""
        self.run(SWITCH, "ip", "link", "set", f"to-{node}", "down")

    def mend(self, node: str) -> None:
        """Plug it in again."""
        self.run(SWITCH, "ip", "link", "set", f"to-{node}", "up")

    def run(self, node: str, *command: str) -> str:
        """Run a short command on a node; returns what it wrote.

        Raises:
            RuntimeError: If it fails; says what it wrote on stderr.
        """
        return _call(*self.enter(node), *command)

    def enter(self, node: str) -> list[str]:
        """Begin a command line that runs on a node."""
        return ["nsenter", "-n", "-m", "-u", "-i", "-t", str(self._holders[node].pid), "--"]

    def mpiexec(self, num_ranks: int) -> list[str]:
        """Begin a command line of ranks, started from node 0; fewer than nodes: one on each."""
        nodes = self.nodes[:num_ranks]
        if num_ranks % len(nodes):
            raise ValueError(f"lab: {num_ranks} ranks cannot lie evenly on {len(nodes)} nodes")
        hosts = ",".join(f"{node}:{num_ranks // len(nodes)}" for node in nodes)
        mpiexec, *count = mpiexec_command(num_ranks)
        launcher = ["-launcher", "ssh", "-launcher-exec", str(self._launcher)]
        return [
            *self.enter("node0"), mpiexec, *launcher, "-iface", "eth0", "-hosts", hosts,
            *count,
            # Sockets alone: other ways would find out that the machine is one.
            "-genv", "FI_PROVIDER", "tcp", "-genv", "FI_TCP_IFACE", "eth0",
        ]  # fmt: skip

    def commands(self, node: str) -> list[str]:
        """List the command lines of what runs on a node."""
        return [_command(pid) for pid in self._running(node)]

    def kill(self, node: str) -> None:
        """Kill all that runs on a node, daemons too."""
        for pid in self._running(node):
            _kill(pid)

    def _running(self, node: str) -> list[int]:
        holder = self._holders[node].pid
        return [pid for pid in _inside({_namespace(holder)}) if pid != holder]

    def sent_bytes(self, node: str) -> int:
        """Count the bytes that a node has sent over its link."""
        found = json.loads(self.run(node, "ip", "-j", "-s", "link", "show", "eth0"))
        return int(found[0]["stats64"]["tx"]["bytes"])

    def held_back(self, name: str, *, sending: bool = False) -> int:
        """Count how often a link with a rate had to keep packets waiting for it.

        Args:
            name: Of a machine whose link `shape` gave a rate.
            sending: Of the way from it, not to it.
        """
        where, device = (name, "eth0") if sending else (SWITCH, f"to-{name}")
        found = json.loads(self.run(where, "tc", "-s", "-j", "qdisc", "show", "dev", device))
        return int(found[0]["overlimits"])

    def close(self) -> None:
        """End what runs on the nodes, and the nodes. Touches nothing else."""
        deadline = time.monotonic() + UP_TIMEOUT_S
        while (left := _inside(self._namespaces)) and time.monotonic() < deadline:
            for pid in left:
                _kill(pid)
            time.sleep(0.01)
        for holder in self._holders.values():
            for pipe in (holder.stdin, holder.stdout):
                _close(pipe)
            holder.wait(UP_TIMEOUT_S)
        shutil.rmtree(self.directory, ignore_errors=True)


def _call(*command: str) -> str:
    ended = subprocess.run(command, capture_output=True, text=True, timeout=UP_TIMEOUT_S)
    if ended.returncode:
        raise RuntimeError(f"lab: `{' '.join(command)}` failed: {ended.stderr.strip()}")
    return ended.stdout


def _namespace(pid: int) -> str:
    """Name a process's network namespace; empty if the process is gone."""
    try:
        return str(Path(f"/proc/{pid}/ns/net").readlink())
    except OSError:
        return ""


def _inside(namespaces: set[str]) -> list[int]:
    """List the processes in network namespaces that we made."""
    pids = [int(entry.name) for entry in Path("/proc").iterdir() if entry.name.isdigit()]
    return [pid for pid in pids if _namespace(pid) in namespaces - {""}]


def _command(pid: int) -> str:
    """Read a process's command line; empty if the process is gone."""
    try:
        return Path(f"/proc/{pid}/cmdline").read_text().replace("\0", " ")
    except OSError:
        return ""


def _kill(pid: int) -> None:
    try:
        os.kill(pid, signal.SIGKILL)
    except ProcessLookupError:
        return


def _close(pipe: IO[bytes] | None) -> None:
    assert pipe is not None
    pipe.close()


def bytes_per_s(rate: str) -> float:
    """Read a rate as tc writes it, such as ``"300mbit"``."""
    number = rate.removesuffix("bit").rstrip("kmg")
    unit = {"": 1, "k": 1e3, "m": 1e6, "g": 1e9}[rate.removesuffix("bit")[len(number) :]]
    return float(number) * unit / 8
