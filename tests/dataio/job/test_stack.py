"""In which line of the program a thread is, and whether it waits there."""

import sys
import threading
import time
from types import SimpleNamespace

import pytest

from dataio.job.stack import TORCH, find_place
from dataio.world import World, run_threads, thread_worlds


def stack(*calls: str) -> SimpleNamespace | None:
    """A thread's frames: the innermost call first."""
    if not calls:
        return None
    code = SimpleNamespace(co_filename=calls[0], co_qualname="step")
    return SimpleNamespace(f_code=code, f_lineno=12, f_back=stack(*calls[1:]))


@pytest.mark.parametrize(
    ("calls", "place", "waits"),
    [
        (("distributed/c10d.py", "loop.py"), "loop.py:12 (step)", True),
        (("_ops.py", "_library/x.py", "distributed/x.py", "loop.py"), "loop.py:12 (step)", True),
        (("nn/modules/linear.py", "loop.py", "distributed/run.py"), "loop.py:12 (step)", False),
        (("_ops.py", "nn/functional.py", "model.py"), "model.py:12 (step)", False),
        (("model.py", "distributed/x.py", "loop.py"), "model.py:12 (step)", False),
        ((), "no line of Python", False),
    ],
)
def test_the_line_of_the_program_is_found_and_whether_it_waits_there(
    monkeypatch: pytest.MonkeyPatch, calls: tuple[str, ...], place: str, waits: bool
) -> None:
    own = ("loop.py", "model.py")
    paths = [call if call in own else f"{TORCH}/{call}" for call in calls]
    monkeypatch.setattr(sys, "_current_frames", lambda: {7: stack(*paths)})
    assert find_place(7) == (place, waits)


def test_a_rank_that_waits_for_another_is_seen_to_wait() -> None:
    threads: dict[int, int] = {}

    def rank(world: World) -> tuple[str, bool]:
        threads[world.rank] = threading.get_ident()
        world.barrier(doing="starting")
        found, limit = ("", False), time.monotonic() + 60
        # Until the other has come to where it waits for this rank.
        while world.rank == 0 and not found[1] and time.monotonic() < limit:
            found = find_place(threads[1])
        world.barrier(doing="looking")
        return found

    place, waits = run_threads(thread_worlds((2,), timeout_s=120), rank)[0]
    assert waits
    assert "dataio/world/" in place
