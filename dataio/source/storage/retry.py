"""Requests that failed for a reason that may pass are made again.

The waits between them double, and each is drawn from [0, that) so that the ranks of a job, which
failed together, do not all come back together.
"""

import errno
import logging
import os
import threading
import time
from collections.abc import Callable
from functools import partial
from typing import TypeVar

import numpy as np

from dataio.base.checked import NotNegative, Positive, checked
from dataio.base.seeding import generator, key
from dataio.source.storage.deadline import LATE_S, CallDeadline

T = TypeVar("T")

FIRST_WAIT_S = 0.1
LONGEST_WAIT_S = 10.0

TRANSIENT = frozenset(
    {
        errno.EAGAIN, errno.EBUSY, errno.EINTR, errno.EIO, errno.EREMOTEIO, errno.ESTALE,
        errno.ETIMEDOUT, errno.ECONNABORTED, errno.ECONNREFUSED, errno.ECONNRESET, errno.EPIPE,
        errno.EHOSTDOWN, errno.EHOSTUNREACH, errno.ENETDOWN, errno.ENETRESET, errno.ENETUNREACH,
        errno.ENOTCONN, errno.ESHUTDOWN,
    }
)  # fmt: skip
"""What network filesystems and sockets say while a server is away."""

_log = logging.getLogger(__name__)


class TransientError(OSError):
    """A request failed for a reason that may pass."""


class GaveUpError(OSError):
    """A request failed again and again."""


def is_transient(error: OSError) -> bool:
    """Say whether the same request may succeed later."""
    passing = isinstance(error, (TransientError, TimeoutError, ConnectionError))
    return passing or error.errno in TRANSIENT


@checked
class Retry:
    """Makes requests again, each with a deadline, until one succeeds or time is up. Thread-safe.

    Args:
        read_timeout_s: Longest wait for one request that is watched, > 0.
        retry_s: No request is made again later than this after its first, >= 0. Below the
            world's own limit (300 s), so that the error says what hangs before ranks say who.
        clock: Seconds.
        sleep: Waits so many seconds.
        rng: Draws the waits; by default each process and object its own, since no result
            depends on it.

    Attributes:
        num_retries: Requests that were made again so far.
    """

    def __init__(
        self,
        *,
        read_timeout_s: Positive = 60.0,
        retry_s: NotNegative = 120.0,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
        rng: np.random.Generator | None = None,
    ) -> None:
        self.read_timeout_s = read_timeout_s
        self.retry_s = retry_s
        self.num_retries, self._said_late = 0, False
        self._clock, self._sleep = clock, sleep
        self._rng = rng or generator(key(int.from_bytes(os.urandom(8), "big"), "retry"))
        self._lock = threading.Lock()
        self._deadline = CallDeadline()

    def call(
        self,
        work: Callable[[int], T],
        *,
        doing: str,
        watched: bool,
        most_s: float | None = None,
    ) -> T:
        """Make a request. Blocks for ``retry_s`` and one request at most, if it is watched.

        Args:
            work: Makes it, given how often it failed before.
            doing: Where and what, for the log.
            watched: Whether it may hang, and is given up after ``read_timeout_s``.
            most_s: Instead of ``retry_s`` where that is longer.

        Raises:
            GaveUpError: If it went on failing.
            OSError: If it failed for a reason that does not pass.
        """
        started = self._clock()
        retry_s = self.retry_s if most_s is None else min(self.retry_s, most_s)
        failures = 0
        while True:
            try:
                if not watched:
                    return work(failures)
                attempt = partial(work, failures)
                return self._deadline.call(
                    attempt, timeout_s=self.read_timeout_s, late=partial(self._say_late, doing)
                )
            except OSError as error:
                if not is_transient(error):
                    raise
                failures += 1
                wait_s = self._wait_s(failures)
                elapsed_s = self._clock() - started
                if elapsed_s + wait_s > retry_s:
                    times = "once" if failures == 1 else f"{failures} times"
                    raise GaveUpError(f"{times} in {elapsed_s:.3g} s, last: {error}") from error
                _log.warning("%s failed (%s); again in %.1f s", doing, error, wait_s)
            self._sleep(wait_s)
            with self._lock:
                self.num_retries += 1

    def note_cut(self, doing: str, num_bytes: int) -> None:
        """Count that an answer was cut, and the rest is asked for at once; log it by its words."""
        with self._lock:
            self.num_retries += 1
        if doing:
            _log.warning("%s was cut after %d bytes; asking for the rest", doing, num_bytes)

    def _say_late(self, doing: str) -> None:
        """Log once that there is no answer yet: a network that is down may not fail for long."""
        with self._lock:
            said, self._said_late = self._said_late, True
        if not said:
            _log.warning(
                "%s: no answer in %g s; a request is given up after %g s, and made again for %g s "
                "in all", doing, LATE_S, self.read_timeout_s, self.retry_s,
            )  # fmt: skip

    def _wait_s(self, failures: int) -> float:
        longest_s = min(FIRST_WAIT_S * 2.0 ** min(failures - 1, 30), LONGEST_WAIT_S)
        return float(self._rng.uniform(0, longest_s))
