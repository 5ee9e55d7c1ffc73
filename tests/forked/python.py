"""A Python that has imported everything: a command that starts processes in milliseconds."""

import os
import select
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path

from typing_extensions import Self

from tests.forked.interpreter import EXECUTABLE, Forked, ask, ignored

ROOT = Path(__file__).parents[2]
MODULES = (
    "numpy.ma", "pyarrow.compute", "pyarrow.parquet", "torch.distributed.run", "dataio",
    "importance", "shuffle", "tonari.trainer.run.loop", "dataio.job.launch", "tonari.cli",
)  # fmt: skip


class ForkedPython:
    """Zygotes, and the command that stands for Python on a command line; see `interpreter.py`.

    Args:
        environ: Variables of the zygotes; processes have their own.
        modules: What is imported.
        zygotes: How many; ranks are dealt to them in turn.

    Attributes:
        command: Stands for ``[sys.executable]``, and forked processes have it there.
    """

    def __init__(
        self, environ: Mapping[str, str], *, modules: Sequence[str] = MODULES, zygotes: int = 2
    ) -> None:
        self._environ, self._modules, self._num_zygotes = environ, modules, zygotes
        self._stack = ExitStack()
        self.command: list[str] = []
        self.pids: list[int] = []
        self.sockets: list[str] = []

    def __enter__(self) -> Self:
        # A path of a socket has at most 107 bytes.
        place = self._stack.enter_context(tempfile.TemporaryDirectory(dir="/tmp", prefix="zygote-"))
        for number in range(self._num_zygotes):
            self._start(f"{place}/{number}")
        executable = Path(place, EXECUTABLE)
        here = str(Path(__file__).parent)
        executable.write_text(
            f"#!{sys.executable} -IS\nimport sys\nsys.path.insert(0, {here!r})\n"
            f"import interpreter\ninterpreter.main({self.sockets}, sys.argv[1:])\n"
        )
        executable.chmod(0o700)
        self.command = [str(executable)]
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def fork(
        self, arguments: Sequence[str], *, environ: Mapping[str, str], files: Mapping[int, int]
    ) -> Forked:
        """Start a process without a command; see ``interpreter.ask``."""
        return ask(self.sockets[0], arguments, environ=environ, files=files, ignored=ignored())

    def _start(self, path: str) -> None:
        # Arrow's allocator would have a thread, beside which no process should be forked.
        environ = {**self._environ, "JE_ARROW_MALLOC_CONF": "background_thread:false"}
        reading, writing = os.pipe()
        with socket.socket(socket.AF_UNIX) as listener:
            listener.bind(path)
            # Whoever asks while it still imports waits.
            listener.listen(64)
            numbers = (listener.fileno(), reading)
            process = subprocess.Popen(
                [sys.executable, "-m", "tests.forked.zygote", *map(str, numbers), *self._modules],
                cwd=ROOT, env=environ, pass_fds=numbers, stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
            )  # fmt: skip
        os.close(reading)
        self.pids.append(process.pid)
        self.sockets.append(path)
        self._stack.callback(process.wait)
        self._stack.callback(os.close, writing)


def wait_together(ranks: Sequence[Forked], *, limit_s: float) -> tuple[list[int], bool]:
    """Wait for all ranks; the first that fails ends the others, as a launcher does. Blocks.

    Returns:
        Their exit statuses, and whether they were ended because the time was over.
    """
    statuses: dict[Forked, int] = {}
    deadline, timed_out = time.monotonic() + limit_s, False
    while len(statuses) < len(ranks):
        running = [rank for rank in ranks if rank not in statuses]
        left_s = None if timed_out else max(deadline - time.monotonic(), 0.0)
        ended = select.select(running, [], [], left_s)[0]
        statuses |= {rank: rank.wait() for rank in ended}
        timed_out = timed_out or not ended
        if timed_out or any(statuses.values()):
            for rank in running:
                rank.kill()
    return [statuses[rank] for rank in ranks], timed_out
