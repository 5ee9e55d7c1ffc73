"""A loader that is measured: start its ranks, request epochs of them, compare, end them."""

import contextlib
import json
import shutil
import socket
import subprocess
import tempfile
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from tonari.bench.errors import BenchError
from tonari.bench.loader.contenders import Contender
from tonari.bench.loader.figures import EpochFigures, compare
from tonari.bench.loader.launch import commands, end, free_port, last_words
from tonari.bench.loader.peers.harness import PeerTask
from tonari.bench.loader.processes import cpu_s, pss_bytes

LOOK_S = 0.2
END_S = 10.0
LAST_WORDS_S = 2.0
MOST_EPOCHS = 10

Message = dict[str, object]


class ContenderSession:
    """A contender's ranks, from start to end; use it in ``with``.

    Args:
        contender: The loader to measure.
        python: Its interpreter.
        task: What every rank receives; ``world_size`` ranks are started.
        timeout_s: Longest wait for any answer.
    """

    def __init__(
        self, contender: Contender, python: Path, task: PeerTask, *, timeout_s: float = 600.0
    ) -> None:
        self.contender = contender
        self._timeout_s = timeout_s
        self._directory = Path(tempfile.mkdtemp(prefix="tonari-bench-"))
        self._processes: list[subprocess.Popen[bytes]] = []
        self._ranks: list[Rank] = []
        self._num_measured = 1 if contender.nodes > 1 else task.world_size
        self._expected: NDArray[np.int64] | None = None
        self._num_samples = task.open_source().spec.num_samples
        self._next = 0
        self._python, self._task = python, task

    def start(self) -> None:
        """Start the ranks and wait until each has its loader open.

        Raises:
            BenchError: If one fails or takes too long.
        """
        path = self._directory / "socket"
        with socket.socket(socket.AF_UNIX) as listener, free_port() as port:
            listener.bind(str(path))
            listener.listen()
            listener.settimeout(1.0)
            num_ranks = max(self._task.world_size, self.contender.nodes)
            task = replace(self._task, socket=str(path), port=port.getsockname()[1])
            port.close()
            with open(self._log, "wb") as log:
                for command, env in commands(self.contender, self._python, task, num_ranks):
                    process = subprocess.Popen(
                        command, env=env, stdin=subprocess.DEVNULL, stdout=log,
                        stderr=subprocess.STDOUT, start_new_session=True, cwd=self._directory,
                    )  # fmt: skip
                    self._processes.append(process)
            waited = 0.0
            while len(self._ranks) < num_ranks:
                try:
                    connection, _ = listener.accept()
                except TimeoutError:
                    waited += 1.0
                    ended = [p for p in self._processes if p.poll() is not None]
                    if ended or waited > self._timeout_s:
                        raise self._failed("opening") from None
                else:
                    connection.settimeout(self._timeout_s)
                    self._ranks.append(Rank(connection))
        for rank in self._ranks:
            rank.hello = self._receive(rank)
        self._ranks.sort(key=lambda rank: int(str(rank.hello["rank"])))

    @property
    def _log(self) -> Path:
        return self._directory / "log"

    def round(self, least_s: float) -> EpochFigures:
        """Let the measured ranks deliver epochs until they took ``least_s``, at most MOST_EPOCHS.

        Raises:
            BenchError: If a rank fails or takes too long.
        """
        figures = self.epoch()
        for _ in range(MOST_EPOCHS - 1):
            if figures.elapsed_s >= least_s:
                break
            figures = figures.followed_by(self.epoch())
        return figures

    def epoch(self, *, watch: bool = False) -> EpochFigures:
        """Let every measured rank deliver its next epoch.

        In the first, every sample's content is checked, and of ranks that are not measured too.

        Args:
            watch: Whether to look at the memory meanwhile, which slows the ranks down a little.

        Raises:
            BenchError: If a rank fails or takes too long.
        """
        number, self._next = self._next, self._next + 1
        measured = self._ranks[: self._num_measured]
        pids = [int(str(rank.hello["pid"])) for rank in measured]
        for rank in self._ranks:
            rank.send(["ready", number])
        for rank in self._ranks:
            self._receive(rank)
        before = cpu_s(pids)
        for rank in measured:
            rank.send(["epoch", number])
        with Maximum(lambda: pss_bytes(pids), active=watch) as seen:
            reports = [self._receive(rank) for rank in measured]
        used_s = cpu_s(pids) - before
        others: list[Message] = []
        if number == 0:
            # They deliver only now, so that no measured rank shares the machine with them.
            for rank in self._ranks[self._num_measured :]:
                rank.send(["epoch", number])
                others.append(self._receive(rank))
        return self._summed(reports, others, used_s, seen.most if watch else None)

    def _summed(
        self, reports: list[Message], others: list[Message], used_s: float, pss: int | None
    ) -> EpochFigures:
        ids = [np.load(str(report["ids"])) for report in reports]
        if self._expected is None:
            other_ids = [np.load(str(report["ids"])) for report in others]
            lost, repeated = compare(np.concatenate([*ids, *other_ids]), self._num_samples)
            seen = np.unique(np.concatenate(ids))
            self._expected = seen[(seen >= 0) & (seen < self._num_samples)]
            if not others:
                self._expected = np.arange(self._num_samples)
        else:
            lost, repeated = compare(np.concatenate(ids), self._num_samples, self._expected)
        samples = sum(len(part) for part in ids)
        pairs = zip(self._ranks, reports, strict=False)
        return EpochFigures(
            samples=samples,
            elapsed_s=max(_number(report, "elapsed_s") for report in reports),
            cpu_s=used_s,
            first_batch_s=max(
                _number(rank.hello, "open_s") + _number(report, "first_batch_s")
                for rank, report in pairs
            ),
            pss_bytes=pss,
            label_spread=float(np.mean([_number(report, "label_spread") for report in reports])),
            lost=lost,
            repeated=repeated,
            mismatched=sum(int(_number(report, "mismatched")) for report in [*reports, *others]),
        )

    def _receive(self, rank: "Rank") -> Message:
        try:
            message = rank.receive()
        except OSError:
            message = None
        if message is None:
            raise self._failed("delivering")
        return message

    def _failed(self, doing: str) -> BenchError:
        for process in self._processes:
            # Its last error message may not have been written yet.
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(LAST_WORDS_S)
        return BenchError(
            f"{self.contender.name}: a rank failed or gave no answer within {self._timeout_s:g} s "
            f"while {doing}: {last_words(self._log)}; run it alone with --contenders "
            f"{self.contender.name}, or leave it out"
        )

    def close(self) -> None:
        """Close the connections, and end the processes that do not end by themselves."""
        for rank in self._ranks:
            rank.close()
        for process in self._processes:
            end(process, wait_s=END_S)
        shutil.rmtree(self._directory, ignore_errors=True)

    def __enter__(self) -> "ContenderSession":
        try:
            self.start()
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class Rank:
    """A connection to one rank."""

    def __init__(self, connection: socket.socket) -> None:
        self.hello: Message = {}
        self._connection = connection
        self._lines = connection.makefile("r")

    def send(self, message: object) -> None:
        """Send a line; a rank that has ended is noticed when it does not answer."""
        try:
            self._connection.sendall(json.dumps(message).encode() + b"\n")
        except BrokenPipeError:
            return

    def receive(self) -> Message | None:
        """Wait for a line; None if the rank has ended."""
        line = self._lines.readline()
        return dict(json.loads(line)) if line else None

    def close(self) -> None:
        """Close the connection."""
        self._lines.close()
        self._connection.close()


class Maximum:
    """Looks at a growing figure from a thread, and at the end once more."""

    def __init__(self, look: Callable[[], int], *, active: bool) -> None:
        self.most = 0
        self._look = look
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run) if active else None

    def _run(self) -> None:
        while not self._ended.wait(LOOK_S):
            self.most = max(self.most, self._look())

    def __enter__(self) -> "Maximum":
        if self._thread is not None:
            self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        if self._thread is not None:
            self._ended.set()
            self._thread.join()
            self.most = max(self.most, self._look())


def _number(message: Message, name: str) -> float:
    return float(str(message[name]))
