"""Messages between a rank that trains and a feeder, over a TCP connection of their own.

A message is a plain value, and bytes behind it that go from where they lie to where they belong.
"""

import hmac
import math
import os
import socket
import struct
import time
from collections import deque
from collections.abc import Iterable, Sequence
from itertools import islice
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dataio.base.network import KEEP_ALIVE
from dataio.batch.feeders.plain import read, written

Piece = NDArray[Any] | memoryview | bytes
LENGTHS = struct.Struct("<3Q")
"""Of a value's JSON, of its arrays, and of what is behind it."""
NONCE_BYTES = 32
MOST_PIECES = 512
"""Handed to the system at once; it takes 1,024."""


class WrongSecretError(Exception):
    """The other side does not know the secret."""


class WrongMessageError(Exception):
    """The other side sent what is no message."""


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
    theirs = receive_bytes(made, NONCE_BYTES).tobytes()
    made.sendall(_proof(secret, me, mine + theirs))
    expected = _proof(secret, other, theirs + mine)
    if not hmac.compare_digest(receive_bytes(made, len(expected)).tobytes(), expected):
        raise WrongSecretError


def _proof(secret: bytes, name: bytes, nonces: bytes) -> bytes:
    return hmac.digest(secret, name + nonces, "sha256")


def send(made: socket.socket, value: object, pieces: Iterable[Piece] = ()) -> int:
    """Send a message.

    Args:
        made: The connection.
        value: See `written`.
        pieces: What goes behind it, each contiguous; not copied.

    Returns:
        Its bytes.

    Raises:
        NoPlainFormError: If the value has no plain form; nothing was sent.
        OSError: If the connection ends, or stalls for longer than its timeout.
    """
    form, arrays = written(value)
    own, behind = ([memoryview(_flat(each)) for each in part] for part in (arrays, pieces))
    lengths = LENGTHS.pack(len(form), sum(map(len, own)), sum(map(len, behind)))
    todo = deque(view for view in (memoryview(lengths + form), *own, *behind) if len(view))
    num_bytes = sum(map(len, todo))
    while todo:
        sent = made.sendmsg(list(islice(todo, MOST_PIECES)))
        while todo and sent >= len(todo[0]):
            sent -= len(todo.popleft())
        if sent:
            todo[0] = todo[0][sent:]
    return num_bytes


def _flat(piece: Piece) -> Any:
    return piece.reshape(-1).view(np.uint8) if isinstance(piece, np.ndarray) else piece


def receive(made: socket.socket) -> tuple[Any, int, int]:
    """Receive a message's value, how many bytes are still to come behind it, and all its bytes.

    Raises:
        EOFError: If the connection has ended.
        OSError: If it breaks, or stalls for longer than its timeout.
        WrongMessageError: If it is none.
    """
    *own_bytes, num_bytes = LENGTHS.unpack(receive_bytes(made, LENGTHS.size).data)
    try:
        form, data = (receive_bytes(made, each) for each in own_bytes)
        value = read(form.tobytes(), data)
    except (EOFError, OSError):
        raise
    except Exception as error:
        raise WrongMessageError(
            f"it sent what is no message ({type(error).__name__}: {error}), expected one of this "
            "Tonari; start it with this node's environment, or stop it"
        ) from error
    return value, num_bytes, LENGTHS.size + sum(own_bytes) + num_bytes


def receive_bytes(made: socket.socket, num_bytes: int) -> NDArray[np.uint8]:
    """Receive bytes; raises as `receive_into`."""
    data = np.empty(num_bytes, np.uint8)
    receive_into(made, [data])
    return data


def receive_into(
    made: socket.socket, rooms: Sequence[NDArray[Any]], *, until: float = math.inf
) -> None:
    """Receive the bytes behind a value into where they belong, each room contiguous.

    Raises:
        EOFError: If the connection has ended.
        OSError: If it breaks, stalls for longer than its timeout, or some are missing after
            ``until``, of `time.perf_counter`.
    """
    for room in rooms:
        left = memoryview(_flat(room))
        while len(left):
            count = made.recv_into(left)
            if not count:
                raise EOFError("the connection was closed")
            left = left[count:]
            if len(left) and time.perf_counter() > until:
                raise TimeoutError
