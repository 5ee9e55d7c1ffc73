"""Messages between a rank that trains and a feeder, over a TCP connection of their own.

A message is a pickled value, and bytes behind it that go from where they lie to where they belong.
Nothing is unpickled before the other side has proved that it knows the secret.
"""

import hmac
import os
import pickle  # noqa: TID251  (read only from who knows the secret)
import socket
import struct
from collections import deque
from collections.abc import Iterable, Sequence
from itertools import islice
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dataio.base.network import KEEP_ALIVE

Piece = NDArray[Any] | memoryview | bytes
LENGTH = struct.Struct("<Q")
NONCE_BYTES = 32
MOST_PIECES = 512
"""Handed to the system at once; it takes 1,024."""


class WrongSecretError(Exception):
    """The other side does not know the secret."""


def greet(made: socket.socket, secret: bytes, *, is_feeder: bool) -> None:
    """Prove to one another that both sides know the secret, which is not sent.

    Raises:
        WrongSecretError: If the other side does not know it.
        OSError: If the connection ends, or stalls for longer than its timeout.
    """
    for option in (*KEEP_ALIVE, (socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)):
        made.setsockopt(*option)
    me, other = (b"feeder", b"trainer") if is_feeder else (b"trainer", b"feeder")
    mine = os.urandom(NONCE_BYTES)
    made.sendall(mine)
    theirs = bytes(_receive(made, NONCE_BYTES))
    made.sendall(_proof(secret, me, mine + theirs))
    expected = _proof(secret, other, theirs + mine)
    if not hmac.compare_digest(bytes(_receive(made, len(expected))), expected):
        raise WrongSecretError


def _proof(secret: bytes, name: bytes, nonces: bytes) -> bytes:
    return hmac.digest(secret, name + nonces, "sha256")


def send(made: socket.socket, value: object, pieces: Iterable[Piece] = ()) -> int:
    """Send a message.

    Args:
        made: The connection.
        value: What is pickled.
        pieces: What goes behind it, each contiguous; not copied.

    Returns:
        Its bytes.
    """
    views = [memoryview(_flat(piece)) for piece in pieces]
    body = pickled((value, sum(map(len, views))))
    todo = deque([memoryview(LENGTH.pack(len(body))), memoryview(body)])
    todo.extend(view for view in views if len(view))
    num_bytes = sum(map(len, todo))
    while todo:
        sent = made.sendmsg(list(islice(todo, MOST_PIECES)))
        while todo and sent >= len(todo[0]):
            sent -= len(todo.popleft())
        if sent:
            todo[0] = todo[0][sent:]
    return num_bytes


def pickled(value: object) -> bytes:
    """Write a value as messages have it."""
    return pickle.dumps(value, protocol=5)


def unpickled(data: bytes | bytearray) -> Any:
    """Read what `pickled` wrote; of somebody who knows the secret, as it may run anything."""
    return pickle.loads(data)


def _flat(piece: Piece | bytearray) -> Any:
    return piece.reshape(-1).view(np.uint8) if isinstance(piece, np.ndarray) else piece


def receive(made: socket.socket) -> tuple[Any, int, int]:
    """Receive a message's value, how many bytes are still to come behind it, and all its bytes.

    Raises:
        EOFError: If the connection has ended.
        OSError: If it breaks, or stalls for longer than its timeout.
    """
    body = _receive(made, *LENGTH.unpack(_receive(made, LENGTH.size)))
    value, num_bytes = unpickled(body)
    return value, num_bytes, LENGTH.size + len(body) + num_bytes


def _receive(made: socket.socket, num_bytes: int) -> bytearray:
    data = bytearray(num_bytes)
    receive_into(made, [data])
    return data


def receive_into(made: socket.socket, rooms: Sequence[NDArray[Any] | bytearray]) -> None:
    """Receive the bytes behind a value into where they belong, each room contiguous.

    Raises:
        EOFError: If the connection has ended.
        OSError: If it breaks, or stalls for longer than its timeout.
    """
    for room in rooms:
        left = memoryview(_flat(room))
        while len(left):
            count = made.recv_into(left)
            if not count:
                raise EOFError("the connection was closed")
            left = left[count:]
