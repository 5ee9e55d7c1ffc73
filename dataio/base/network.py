"""Connections between nodes: by which name others reach this one, and when one is given up."""

import socket
import threading
from weakref import WeakSet

SILENT_LINK_S = 15
"""For which a node's system may not answer: one without power or network closes no connection."""
KEEP_ALIVE = (
    (socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1),
    (socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 5),
    (socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 2),
    (socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, 1000 * SILENT_LINK_S),
)

CONNECTING = threading.RLock()
"""Held while connections to other ranks are made, and noted, and while any others are made."""

APART: WeakSet[socket.socket] = WeakSet()
"""Connections to who is no rank: those stay when ranks are lost. `CONNECTING` guards it."""


def own_name() -> str:
    """Name this machine to the others, if its name leads to it."""
    name = socket.gethostname()
    try:
        with listen(name):
            return name
    except OSError:
        return "127.0.0.1"


def listen(host: str) -> socket.socket:
    """Listen at one of this machine's addresses, of IPv4 or IPv6, on a port that is free.

    Raises:
        OSError: If it is none of this machine's.
    """
    family = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)[0][0]
    return socket.create_server((host, 0), family=family)


def connect_apart(host: str, port: int, timeout_s: float) -> socket.socket:
    """Connect to who is no rank, also while connections to ranks are noted.

    Raises:
        OSError: If nobody answers there.
    """
    with CONNECTING:
        made = socket.create_connection((host, port), timeout_s)
        APART.add(made)
    return made
