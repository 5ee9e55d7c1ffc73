"""A feeder: processes, one for each core, that make rows for whoever knows their secret.

It keeps nothing of a run: no cache, no state. In each process a thread for each trainer takes in
what that sends, and the main thread makes it, for one trainer after the other. The condition guards
who there is, and what each has sent.
"""

import contextlib
import logging
import os
import pickle  # noqa: TID251  (read only from who knows the secret)
import secrets
import signal
import socket
import sys
import threading
from collections import deque
from multiprocessing import forkserver, get_context
from multiprocessing.process import BaseProcess
from pathlib import Path

import numpy as np
import torch

from dataio.base.errors import WorkerError
from dataio.base.network import listen, own_name
from dataio.batch.feeders.directory import announce, check_directory, is_over, versions
from dataio.batch.feeders.parts import MadeRows, Maker, SentRows
from dataio.batch.feeders.plain import NoPlainFormError
from dataio.batch.feeders.wire import WrongSecretError, greet, receive, receive_bytes, send
from dataio.batch.process_transform import ENVIRONMENT, end_with_parent, environment

GREETING_S = 10.0
"""Longest wait for each message of a trainer that comes."""
LOOK_S = 1.0

log = logging.getLogger(__name__)


class _Trainer:
    """A rank that trains, on its connection."""

    def __init__(self, made: socket.socket, secret: bytes) -> None:
        self._made = made
        self.todo: deque[tuple[SentRows, np.ndarray]] = deque()
        made.settimeout(GREETING_S)
        greet(made, secret, is_feeder=True)
        send(made, versions())
        path, num_bytes, _ = receive(made)
        arguments = receive_bytes(made, num_bytes)
        sys.path.extend(entry for entry in path if entry not in sys.path)
        try:
            self._maker = Maker(pickle.loads(arguments.data))
        except Exception as error:
            send(made, f"{type(error).__name__}: {error}")
            raise
        send(made, "")
        made.settimeout(None)

    def receive(self) -> tuple[SentRows, np.ndarray]:
        sent, num_bytes, _ = receive(self._made)
        return SentRows(*sent), receive_bytes(self._made, num_bytes)

    def answer(self, sent: SentRows, data: np.ndarray) -> None:
        try:
            made, pieces = self._maker.make(sent, data)
        except Exception as error:
            made, pieces = MadeRows(failure=f"{type(error).__name__}: {error}"), []
        try:
            try:
                send(self._made, tuple(made), pieces)
            except NoPlainFormError as error:
                send(self._made, tuple(MadeRows(failure=str(error), has_no_form=True)))
        except OSError:  # its own thread sees it, too
            self.shut()

    def shut(self) -> None:
        with contextlib.suppress(OSError):
            self._made.shutdown(socket.SHUT_RDWR)


class _Core:
    """Makes rows in this process."""

    def __init__(self, secret: bytes) -> None:
        self._secret = secret
        self._trainers: list[_Trainer] = []
        self._came = threading.Condition()

    def accept(self, listening: socket.socket) -> None:
        """Let trainers come, for ever."""
        while True:
            made, address = listening.accept()
            threading.Thread(target=self._admit, args=(made, address[0]), daemon=True).start()

    def _admit(self, made: socket.socket, host: str) -> None:
        trainer = None
        try:
            with made:
                trainer = _Trainer(made, self._secret)
                with self._came:
                    self._trainers.append(trainer)
                while True:
                    one = trainer.receive()
                    with self._came:
                        trainer.todo.append(one)
                        self._came.notify()
        except WrongSecretError:
            log.warning(
                "feed: a connection from %s did not know the secret, and was closed; trainers read "
                "it in the directory that this feeder was started with",
                host,
            )
        except (OSError, EOFError):  # it has left
            pass
        except Exception as error:
            log.warning("feed: cannot serve a trainer on %s: %s", host, error)
        finally:
            with self._came:
                if trainer in self._trainers:
                    self._trainers.remove(trainer)

    def make(self) -> None:
        """Make what is sent, for ever."""
        while True:
            with self._came:
                self._came.wait_for(lambda: any(trainer.todo for trainer in self._trainers))
                trainer = next(trainer for trainer in self._trainers if trainer.todo)
                # Behind all others
                self._trainers.remove(trainer)
                self._trainers.append(trainer)
                one = trainer.todo.popleft()
            trainer.answer(*one)


def _serve(listening: socket.socket, secret: bytes) -> None:
    """Serve trainers in this process, until the one that started it ends."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    end_with_parent()
    torch.set_num_threads(1)
    core = _Core(secret)
    threading.Thread(target=core.accept, args=(listening,), daemon=True).start()
    core.make()


def run_feeder(directory: Path, *, num_cores: int, host: str | None = None) -> None:
    """Serve trainers until the run is over, or SIGTERM or Ctrl-C comes. Blocks.

    Args:
        directory: In which trainers find it.
        num_cores: Processes that make rows.
        host: Name or address at which trainers reach this node; None: its own name.

    Raises:
        WorkerError: If the directory cannot be used, or the node has no such name.
    """
    check_directory(directory)
    host, secret = host or own_name(), secrets.token_bytes(32)
    asked = threading.Event()
    before = {
        number: signal.signal(number, lambda *_: asked.set())
        for number in (signal.SIGTERM, signal.SIGINT)
    }
    with contextlib.ExitStack() as stack:
        for number, handler in before.items():
            stack.callback(signal.signal, number, handler)
        try:
            listening = [stack.enter_context(listen(host)) for _ in range(num_cores)]
        except OSError as error:
            raise WorkerError(
                f"feed: cannot listen at {host} ({error}), expected a name or address of this "
                "node; give another with --host"
            ) from error
        with environment(ENVIRONMENT):
            forkserver.set_forkserver_preload([__name__])
            forkserver.ensure_running()
        cores: list[BaseProcess] = [_started(each, secret) for each in listening]
        stack.callback(_end, cores)
        ports = tuple(each.getsockname()[1] for each in listening)
        own = announce(directory, host, ports, secret)
        stack.callback(own.unlink, missing_ok=True)
        log.info("feed: %d cores of %s serve the trainers of %s", num_cores, host, directory)
        while not asked.wait(LOOK_S) and not is_over(directory, own):
            for place, core in enumerate(cores):
                if core.exitcode is not None:
                    log.warning(
                        "feed: a process ended with status %s, and is started again; if compiled "
                        "code of a transform crashed, its trainer shows where", core.exitcode,
                    )  # fmt: skip
                    cores[place] = _started(listening[place], secret)


def _started(listening: socket.socket, secret: bytes) -> BaseProcess:
    process = get_context("forkserver").Process(
        target=_serve, args=(listening, secret), name="tonari-feed", daemon=True
    )
    process.start()
    return process


def _end(cores: list[BaseProcess]) -> None:
    for core in cores:
        core.kill()
    for core in cores:
        core.join()


def cores_here() -> int:
    """Count the cores that this process may use."""
    return len(os.sched_getaffinity(0))
