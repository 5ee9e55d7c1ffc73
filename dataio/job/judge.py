"""Judge from heartbeats, limits and a time which rank is silent, late or at fault."""

from collections.abc import Sequence
from dataclasses import dataclass

GONE = (
    "its process was killed or stopped, or its node is gone: look at its last log lines, "
    "and in the kernel's for one that was killed for its memory"
)


@dataclass(frozen=True)
class Heartbeat:
    """What a rank last reported of itself.

    Attributes:
        count: Heartbeats so far.
        host: Where its process is known by number.
        pid: That number.
        step: Steps done.
        waits: Whether its training thread waits for other ranks.
        place: Where in the program that thread is.
        failure: The error that it failed by. Empty while all is well.
        left: Whether it has ended well.
    """

    count: int
    host: str
    pid: int
    step: int = 0
    waits: bool = False
    place: str = "joining"
    failure: str = ""
    left: bool = False


class Unchanged:
    """Counts for how many intervals in a row a number has stayed the same.

    Intervals of the watching thread are counted, not seconds: a process that slept itself must not
    take others for silent.

    Args:
        interval_s: Between two calls.
        limit_s: For so long the number may stay the same.
    """

    def __init__(self, *, interval_s: float, limit_s: float) -> None:
        self._interval_s, self._limit_s = interval_s, limit_s
        self._seen, self._missed = -1, 0

    def is_too_long(self, number: int, *, may_rest: bool) -> bool:
        """Take the number of this interval; may_rest if it is right that it does not change."""
        self._missed = self._missed + 1 if number == self._seen and not may_rest else 0
        self._seen = number
        return self._missed * self._interval_s >= self._limit_s


def is_late(*, since: float | None, now: float, timeout_s: float) -> bool:
    """Whether a step is overdue; none is expected where since, the last one's time, is None."""
    return since is not None and now - since > timeout_s


def find_culprits(
    first: Sequence[Heartbeat],
    second: Sequence[Heartbeat],
    *,
    own: int,
    first_lost: int | None = None,
) -> tuple[dict[int, str], list[Heartbeat]]:
    """Find who is to blame by two looks at all ranks.

    The failed and the dead are to blame if there are any; otherwise those that hang.

    Args:
        first: Of every rank.
        second: The same, some heartbeats later.
        own: Who judges, and therefore lives.
        first_lost: Whose process was the first to end, if one was seen to.

    Returns:
        What to report of each rank that is to blame, by rank; and the silent ones.
    """
    failed = {rank: f"failed: {now.failure}" for rank, now in enumerate(second) if now.failure}
    silent = [
        rank
        for rank, (before, after) in enumerate(zip(first, second, strict=True))
        if before.count == after.count and not (after.left or after.failure or rank == own)
    ]
    # Where one reported why it failed, or ended first, a launcher may have ended the others for it.
    first_gone = [] if failed else [first_lost] if first_lost in silent else silent
    gone = {
        rank: f"is silent after {second[rank].step} steps: {GONE}"
        if rank in first_gone
        else f"has ended too, after {second[rank].step} steps"
        for rank in silent
    }
    if failed or gone:
        return failed | gone, [second[rank] for rank in silent]
    here = {rank: now for rank, now in enumerate(second) if not now.left}
    least = min((now.step for now in here.values()), default=0)
    behind = {rank: now for rank, now in here.items() if now.step == least}
    # Of those that are behind, nobody waits for the ones that wait themselves.
    busy = {rank: now for rank, now in behind.items() if not now.waits}
    return {
        rank: f"hangs after {now.step} steps in {now.place}: look there, or raise run.timeout_s "
        "if a step may take so long"
        for rank, now in (busy or behind).items()
    }, []
