"""Progress of long work, said by rank 0: on a terminal one line, in a log a line now and then."""

import sys
import time

FIRST_S = {True: 2.0, False: 5.0}
"""Quicker work says nothing; on a terminal, and in a log."""
EVERY_S = {True: 0.5, False: 30.0}


class ProgressBar:
    """Counts up to a total and says on standard error how far it is, the rate and the time left.

    On a terminal it is a line that changes and goes at the end. Elsewhere, as in the log of a batch
    job, it is a line of its own every 30 s, and one at the end of work that took over 5 s.

    Args:
        what: What is being done, such as ``"staging"``.
        total: What ``add`` counts up to.
        shown: Whether this rank says anything.
        unit: What is counted, in the plural.
    """

    def __init__(self, what: str, total: int, *, shown: bool, unit: str = "rows") -> None:
        self.what, self.unit = what, unit
        self.total = total
        self._shown, self._changes = shown, sys.stderr.isatty()
        self._done = 0
        self._num_bytes = 0
        self._started = time.monotonic()
        self._next = self._started + FIRST_S[self._changes]

    def add(self, count: int, *, num_bytes: int = 0) -> None:
        """Count ``count`` more as done, and their bytes where these matter."""
        self._done += count
        self._num_bytes += num_bytes
        now = time.monotonic()
        if self._shown and now >= self._next:
            self._next = now + EVERY_S[self._changes]
            left_s = (now - self._started) * (self.total - self._done) / max(self._done, 1)
            left = f"{_time(left_s)} left" if self._done else "not begun"
            self._write(f"{self._words(now)}, {left}")

    def close(self) -> None:
        """Clear the line; in a log, say how long it took."""
        now = time.monotonic()
        if not self._shown or now < self._started + FIRST_S[self._changes]:
            return
        self._write("" if self._changes else f"{self._words(now)}, {_time(now - self._started)}")

    def _words(self, now: float) -> str:
        passed_s, megabytes = now - self._started, self._num_bytes / 1e6
        size = f"{megabytes:,.0f} MB, " if self._num_bytes else ""
        speed = f", {megabytes / passed_s:,.0f} MB/s" if self._num_bytes else ""
        return (
            f"{self.what}: {self._done:,}/{self.total:,} {self.unit}, {size}"
            f"{self._done / passed_s:,.0f} {self.unit}/s{speed}"
        )

    def _write(self, words: str) -> None:
        sys.stderr.write(f"\r{words}\x1b[K" if self._changes else f"{words}\n")
        sys.stderr.flush()


def _time(seconds: float) -> str:
    for unit, unit_s in (("h", 3600.0), ("min", 60.0)):
        if seconds >= 2 * unit_s:
            return f"{seconds / unit_s:.1f} {unit}"
    return f"{seconds:.0f} s"
