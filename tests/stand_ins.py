"""What stands for time, and for a kill."""


class SetClock:
    """Time that a test sets; in the place of the module `time`."""

    def __init__(self, now: float = 0.0) -> None:
        self.now = now

    def perf_counter(self) -> float:
        return self.now

    def monotonic(self) -> float:
        return self.now


class Killed(BaseException):
    """Stands for kill -9: nothing in the package catches it."""
