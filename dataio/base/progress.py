"""Progress of long work: one line on rank 0's terminal, nothing in a log file."""

import sys
import time


class ProgressBar:
    """Counts up to a total and shows it, with rate and time left, once work has lasted two seconds.

    Args:
        what: What is being done, such as ``"staging"``.
        total: What ``add`` counts up to.
        shown: Whether this rank shows progress; nothing is shown where stderr is not a terminal.
        unit: What is counted, in the plural.
    """

    def __init__(self, what: str, total: int, *, shown: bool, unit: str = "rows") -> None:
        self.what, self.unit = what, unit
        self.total = total
        self._shown = shown and sys.stderr.isatty()
        self._done = 0
        self._num_bytes = 0
        self._started = time.monotonic()
        self._last = self._started + 1.5

    def add(self, count: int, *, num_bytes: int = 0) -> None:
        """Count ``count`` more as done, and their bytes where these matter."""
        self._done += count
        self._num_bytes += num_bytes
        now = time.monotonic()
        if self._shown and now - self._last >= 0.5:
            self._last = now
            rate = self._done / (now - self._started)
            left_s = (self.total - self._done) / max(rate, 1e-9)
            megabytes = self._num_bytes / 1e6
            size = f"{megabytes:,.0f} MB, " if self._num_bytes else ""
            speed = f"{megabytes / (now - self._started):,.0f} MB/s, " if self._num_bytes else ""
            sys.stderr.write(
                f"\r{self.what}: {self._done:,}/{self.total:,} {self.unit}, {size}{rate:,.0f} "
                f"{self.unit}/s, {speed}{left_s:.0f} s left \x1b[K"
            )
            sys.stderr.flush()

    def close(self) -> None:
        """Clear the line."""
        if self._shown and self._last > self._started + 1.5:
            sys.stderr.write("\r\x1b[K")
            sys.stderr.flush()
