"""A network that cuts, stalls and refuses, between a client and a server on this machine."""

import socket
import threading
from collections.abc import Callable

from typing_extensions import Self

Way = Callable[[bytes], tuple[bytes, str]]
"""From what the server sent, to what goes on, and then: "go on", "cut" or "stall"."""


def cut_after(num_bytes: int) -> Way:
    """Hand on so many bytes of an answer that is longer, then close the connection."""
    return lambda data: (data[:num_bytes], "cut" if len(data) > num_bytes else "go on")


def stall(data: bytes) -> tuple[bytes, str]:
    """Hand on nothing, and keep the connection."""
    return b"", "stall"


def unavailable(data: bytes) -> tuple[bytes, str]:
    """Answer as a server that is overloaded."""
    return b"HTTP/1.1 503 Slow Down\r\nContent-Length: 0\r\nConnection: close\r\n\r\n", "cut"


class TcpProxy:
    """Hands bytes on in both directions. What `ways` hold is done to answers to `verb`, one each.

    The test writes both, the connections' threads take them; a lock guards them.
    """

    def __init__(self, server_port: int) -> None:
        self.ways: list[Way] = []
        self.verb = b"GET"
        self.num_disturbed = 0
        self._server_port = server_port
        self._lock = threading.Lock()
        self._over = threading.Event()
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = int(self._listener.getsockname()[1])
        threading.Thread(target=self._accept, daemon=True).start()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()

    def _accept(self) -> None:
        while not self._over.is_set():
            try:
                client, _ = self._listener.accept()
            except OSError:
                return
            threading.Thread(target=self._serve, args=(client,), daemon=True).start()

    def _serve(self, client: socket.socket) -> None:
        """Carry one connection: each request whole, then its answer whole."""
        server = socket.create_connection(("127.0.0.1", self._server_port))
        with client, server:
            while request := _read_head(client):
                server.sendall(request)
                answer = _read_answer(server, has_body=not request.startswith(b"HEAD"))
                after = "go on"
                if request.startswith(self.verb) and (way := self._next_way()):
                    answer, after = way(answer)
                client.sendall(answer)
                if after == "stall":
                    self._over.wait(60)
                if after != "go on":
                    return

    def _next_way(self) -> Way | None:
        with self._lock:
            if not self.ways:
                return None
            self.num_disturbed += 1
            return self.ways.pop(0)


def _read_head(stream: socket.socket) -> bytes:
    """Read up to the empty line; nothing if the other side is gone."""
    data = b""
    while not data.endswith(b"\r\n\r\n"):
        byte = stream.recv(1)
        if not byte:
            return b""
        data += byte
    return data


def _read_answer(server: socket.socket, *, has_body: bool) -> bytes:
    head = _read_head(server)
    lengths = [
        int(line.split(b":")[1])
        for line in head.lower().split(b"\r\n")
        if line.startswith(b"content-length:")
    ]
    body = b""
    while has_body and lengths and len(body) < lengths[0]:
        piece = server.recv(lengths[0] - len(body))
        if not piece:
            break
        body += piece
    return head + body
