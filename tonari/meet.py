"""Ranks that are started by hand, one on each node, and meet at an address."""

import fcntl
import os
import socket
import struct
from datetime import timedelta

from dataio.world import World, discover_world
from tonari.errors import CommandError

SIOCGIFADDR = 0x8915


def meet(node: int, nodes: int, address: str, *, timeout_s: float, meet_s: float) -> World:
    """Join the ranks of a job that no launcher started. Collective.

    Args:
        node: Number of this one, in [0, nodes); the address is that of node 0.
        nodes: How many are to come, >= 2.
        address: HOST:PORT, a port that is free on that host.
        timeout_s: Longest wait for another rank, later.
        meet_s: Longest wait for all to come.

    Raises:
        CommandError: If they do not meet.
    """
    host, _, port = address.rpartition(":")
    if not host or not port.isdecimal():
        raise CommandError(
            f"--meet {address}: expected HOST:PORT of node 0, such as node0:29400, with a port "
            "that is free there"
        )
    import torch.distributed as dist

    # Left alone, gloo takes the address of the host's name, which may be the loopback's.
    interface = interface_towards(host, int(port))
    if interface is not None:
        os.environ.setdefault("GLOO_SOCKET_IFNAME", interface)
    try:
        dist.init_process_group(
            "gloo", init_method=f"tcp://{address}", rank=node, world_size=nodes,
            timeout=timedelta(seconds=meet_s),
        )  # fmt: skip
    except (RuntimeError, ValueError) as error:
        raise CommandError(
            f"--meet {address}: node {node} of {nodes} did not meet the others within {meet_s:g} s "
            f"({str(error).splitlines()[0]}); expected the same --meet and --nodes on each, every "
            "--node from 0 once, and a port that is free and let through"
        ) from error
    return discover_world(ranks_per_node=1, timeout_s=timeout_s)


def interface_towards(host: str, port: int) -> str | None:
    """Name the interface by which a host is reached; None if that cannot be told."""
    try:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            # Of datagrams: no packet is sent.
            probe.connect((host, port))
            own = probe.getsockname()[0]
            for _, name in socket.if_nameindex():
                if _address(probe, name) == own:
                    return name
    except OSError:
        return None
    return None


def _address(probe: socket.socket, name: str) -> str | None:
    asked = struct.pack("256s", name.encode()[:15])
    try:
        return socket.inet_ntoa(fcntl.ioctl(probe.fileno(), SIOCGIFADDR, asked)[20:24])
    except OSError:
        # It has no address of this family.
        return None
