"""Where an epoch's time goes on this rank, and what a plan predicted of it."""

import contextlib
import time
from collections.abc import Iterator, Mapping

from tonari.trainer.watch.metrics import Line
from tonari.trainer.watch.plan import PARTS, Plan

OTHER = "other_s"
"""Of an epoch, what no part counts: averages of buffers, logs."""
WORDS = {**PARTS, OTHER: "other"}


class EpochParts:
    """Counts each second once: to the part that runs, or to none.

    The end of the epoch before and its checkpoint belong to the epoch that they open, as for
    `Meter`. Of an epoch that was interrupted `go_on` adds the rest.

    Args:
        plan: To put beside what is measured; None: there is none.

    Attributes:
        run_s: Seconds of each part since it was made, over all epochs.
    """

    def __init__(self, plan: Plan | None) -> None:
        self._plan = plan
        self._at = time.perf_counter()
        self._running = OTHER
        self._seconds, self.run_s = self._none(), self._none()

    @contextlib.contextmanager
    def time(self, part: str) -> Iterator[None]:
        """Count what is inside to a part of `PARTS`, and not to the part around it."""
        around = self._running
        self._switch(part)
        try:
            yield
        finally:
            self._switch(around)

    def go_on(self, so_far: Mapping[str, float]) -> None:
        """Count in what an earlier start measured of the epoch."""
        for name in self._seconds:
            self._seconds[name] += so_far.get(name, 0.0)

    def so_far(self) -> dict[str, float]:
        """Return the epoch's parts until now, for a start that is to `go_on`."""
        self._switch(self._running)
        return dict(self._seconds)

    def end_epoch(self, epoch: int, *, exchange_s: float) -> Line:
        """Return the parts of an epoch, beside the planned ones; the next epoch begins.

        Args:
            epoch: Its number.
            exchange_s: What the end of the epoch before waited for the exchange, on the slowest
                rank.
        """
        measured = self.so_far()
        self._seconds = self._none()
        measured["exchange_s"] = min(exchange_s, measured["epoch_end_s"])
        measured["epoch_end_s"] -= measured["exchange_s"]
        line: dict[str, str | float] = {**measured, "measured_s": sum(measured.values())}
        if self._plan is None:
            return line
        planned = self._plan.parts_of(epoch)
        off = max(measured, key=lambda name: abs(measured[name] - planned.get(name, 0.0)))
        line |= {f"planned_{name}": seconds for name, seconds in planned.items()}
        line |= {"planned_s": sum(planned.values()), "most_off": off}
        return line if epoch else line | {"planned_staging_s": self._plan.staging_s}

    def _switch(self, part: str) -> None:
        now = time.perf_counter()
        self._seconds[self._running] += now - self._at
        self.run_s[self._running] += now - self._at
        self._at, self._running = now, part

    @staticmethod
    def _none() -> dict[str, float]:
        return dict.fromkeys((*PARTS, OTHER), 0.0)


def time_by_cause(line: Line) -> dict[str, float]:
    """Divide an epoch's time by what took it: steps first, then each wait and each task beside.

    Args:
        line: Of the epoch.

    Returns:
        Seconds by words. What steps waited for data is counted apart.
    """
    waited_s = min(_seconds(line, "wait_s"), _seconds(line, "train_s"))
    found = {"steps": _seconds(line, "train_s") - waited_s, "waiting for data": waited_s}
    return found | {
        words: _seconds(line, name) for name, words in WORDS.items() if name != "train_s"
    }


def off_words(line: Line) -> str:
    """Put an epoch's line beside its plan, on a line of its own; empty if it had none."""
    if "planned_s" not in line:
        return ""
    name = str(line["most_off"])
    measured_s, planned_s = _seconds(line, name), _seconds(line, f"planned_{name}")
    share = f" ({measured_s / planned_s - 1:+.0%})" if planned_s else ""
    staging = ""
    if "planned_staging_s" in line:
        staging = (
            f"; staging {line['staging_s']:.2f} s, {line['planned_staging_s']:.2f} s were planned"
        )
    return (
        f"\n  with its evaluation and the checkpoint before it {line['measured_s']:.2f} s, "
        f"{line['planned_s']:.2f} s were planned; {WORDS[name]} {measured_s - planned_s:+.2f} s"
        f"{share}{staging}"
    )


def _seconds(line: Line, name: str) -> float:
    return float(line.get(name) or 0.0)
