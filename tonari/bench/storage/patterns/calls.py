"""System calls of one thread, each timed apart."""

import contextlib
import mmap
import os
from collections import defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path
from time import perf_counter
from typing import ParamSpec, TypeVar

from tonari.bench.errors import BenchError

Given = ParamSpec("Given")
Answer = TypeVar("Answer")


class TimedCalls:
    """Makes calls and keeps how long each took. One thread's.

    Args:
        buffer_bytes: The largest read.
        direct: Whether files are opened with O_DIRECT.

    Attributes:
        most_bytes: Of one read.
        seconds: By the name of the operation, a duration each.
        num_bytes: Bytes read and written, as the calls returned.
        num_read: Read alone.
    """

    def __init__(self, buffer_bytes: int, *, direct: bool = False) -> None:
        # Anonymous memory begins at a page, as O_DIRECT wants it; touched now, not in a read.
        self._buffer = memoryview(mmap.mmap(-1, max(buffer_bytes, mmap.PAGESIZE)))
        self._buffer[:: mmap.PAGESIZE] = bytes(len(self._buffer[:: mmap.PAGESIZE]))
        self.most_bytes = len(self._buffer)
        self._flags = os.O_RDONLY | os.O_CLOEXEC | (os.O_DIRECT if direct else 0)
        self.seconds: defaultdict[str, list[float]] = defaultdict(list)
        self.num_bytes = self.num_read = 0

    def time(
        self, name: str, call: Callable[Given, Answer], *given: Given.args, **named: Given.kwargs
    ) -> Answer:
        """Make a call and note its time; one that fails is not noted."""
        started = perf_counter()
        answer = call(*given, **named)
        self.seconds[name].append(perf_counter() - started)
        return answer

    @contextlib.contextmanager
    def opened(self, path: Path) -> Iterator[int]:
        """Open a file to read, and close it."""
        descriptor = self.time("open", os.open, path, self._flags)
        try:
            yield descriptor
        finally:
            self.time("close", os.close, descriptor)

    def read(self, descriptor: int, offset: int, length: int, path: Path) -> None:
        """Read exactly so many bytes, by one call or as many as the filesystem makes of it.

        Raises:
            BenchError: If the file is shorter than it was.
        """
        done = 0
        while done < length:
            view = self._buffer[done:length]
            try:
                got = self.time("read", os.preadv, descriptor, [view], offset + done)
            except OSError as error:
                error.filename = str(path)
                raise
            if not got:
                raise BenchError(
                    f"{path}: ended at {offset + done} bytes, expected {offset + length}; see that "
                    "nothing changes files while they are measured"
                )
            done += got
        self.num_bytes += length
        self.num_read += length


def takes_direct(path: Path) -> bool:
    """Try whether a file of at least a page can be read with O_DIRECT."""
    calls = TimedCalls(mmap.PAGESIZE, direct=True)
    try:
        with calls.opened(path) as descriptor:
            calls.read(descriptor, 0, mmap.PAGESIZE, path)
    except OSError:
        return False
    return True
