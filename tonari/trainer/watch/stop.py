"""A polite end: a signal asks for a checkpoint instead of killing at once."""

import contextlib
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from types import FrameType

import numpy as np
from typing_extensions import Self

from dataio.world import World
from dataio.world.launchers import mpi_claim, torchrun_claim

SIGNALS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2)
"""What launchers send, and what Slurm can send ahead of the time limit (--signal=USR1@300)."""

AT_ONCE = ("SIGTERM", "SIGINT")
"""After these a run trains no step more: SIGKILL, or a person's patience, may end soon."""

ASK_S = 1.0
"""Time between two questions to all ranks: a step that takes longer asks every time."""

MOST_STEPS = 100
"""Between two questions: steps may become slower all at once."""

STAGED = "when all rows are staged, which the next start finds"

AGAIN_S = 2.0
"""A launcher and its group may both pass on a signal: within this time it is the same one. And one
that is meant for all ranks has reached all of them."""


class StopRequest:
    """Notes a signal while it is open; the same one again ends the process at once.

    The signal handler writes, the training loop reads. Ctrl-C is noted from `train` on: before,
    nothing would be saved, and it interrupts as ever.

    Args:
        leave: Called on all ranks with those that SIGTERM reached, where it did not reach all: ends
            them, and says whether the others go on. None: SIGTERM stops all ranks, whichever it
            reached.
        noted: Signals that came before, to which those that come are added; None: there are none.
    """

    def __init__(
        self,
        *,
        leave: Callable[[list[bool]], bool] | None = None,
        noted: dict[int, float] | None = None,
    ) -> None:
        self._leave = leave
        self._asked = 0
        self._noted = {} if noted is None else noted
        self._earlier: dict[int, object] = {}
        claim = mpi_claim(os.environ) or torchrun_claim(os.environ)
        self._speaks, self._trains = claim is None or not claim.rank, False
        self._steps = 0
        self._due = 1
        self._since = time.monotonic()

    def __enter__(self) -> Self:
        # Python lets only the main thread handle signals.
        if threading.current_thread() is threading.main_thread():
            self._earlier = {number: signal.signal(number, self._note) for number in SIGNALS}
            # `tonari train` lets those that come while it is imported wait for this.
            signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)
        return self

    def __exit__(self, *_: object) -> None:
        for number, earlier in self._earlier.items():
            signal.signal(number, earlier)  # type: ignore[arg-type]

    def train(self) -> None:
        """From now on a checkpoint may be written: note Ctrl-C too."""
        self._trains = True
        # Ignored where a shell runs this in its background
        if self._earlier and signal.getsignal(signal.SIGINT) is signal.default_int_handler:
            self._earlier[signal.SIGINT] = signal.signal(signal.SIGINT, self._note)

    @property
    def words(self) -> str:
        """The signal that was agreed on; empty before."""
        return signal.Signals(self._asked).name if self._asked else ""

    def agreed(self, world: World) -> bool:
        """Say whether any rank was asked to stop; the same answer everywhere. Collective."""
        return self._ask(world, pace_s=0.0)[0]

    def after_step(self, world: World) -> bool:
        """Ask what ``agreed`` does about once a second, however short the steps. Collective.

        Every rank calls it after every step. They agree on when to ask next as they ask, by the
        slowest one's pace; in between this only counts.
        """
        self._steps += 1
        if self._steps < self._due:
            return False
        stops, pace_s = self._ask(world, pace_s=(time.monotonic() - self._since) / self._steps)
        # At most doubled: the first steps of a run are not like the others.
        due = max(int(ASK_S / pace_s), 1) if pace_s > 0 else 1
        self._due = min(due, 2 * self._due, MOST_STEPS)
        self._steps, self._since = 0, time.monotonic()
        return stops

    def _ask(self, world: World, *, pace_s: float) -> tuple[bool, float]:
        noted = {*self._noted}
        others, ends = noted - {signal.SIGTERM}, signal.SIGTERM in noted
        asked = np.array([max(others, default=0), pace_s, ends, not ends])
        number, slowest_s, any_ends, any_stays = world.allreduce(
            asked, op="max", doing="looking for a signal to stop"
        )
        if self._leave is not None and any_ends and any_stays and not number:
            time.sleep(AGAIN_S)
            found = b"asked" if signal.SIGTERM in self._noted else b""
            said = world.allgather(found, doing="looking for whom SIGTERM reached")
            any_ends = not self._leave([*map(bool, said)])
        self._asked = int(max(number, signal.SIGTERM * any_ends))
        return self._asked > 0, float(slowest_s)

    def _note(self, number: int, frame: FrameType | None) -> None:
        if self._speaks and number not in self._noted:
            name = "Ctrl-C" if number == signal.SIGINT else signal.Signals(number).name
            when = "after this step, with a checkpoint" if self._trains else STAGED
            words = f"tonari: stops {when}; {name} again ends it at once"
            os.write(2, f"\n{words}\n".encode())
        _note(self._noted, number)


def _note(noted: dict[int, float], number: int, frame: FrameType | None = None) -> None:
    now = time.monotonic()
    if number in noted and now - noted[number] > AGAIN_S:
        signal.signal(number, signal.SIG_DFL)
        os.kill(os.getpid(), number)
    noted.setdefault(number, now)


@contextlib.contextmanager
def noting_between(noted: dict[int, float]) -> Iterator[None]:
    """Note within, also while no `StopRequest` is open, the signals that ask for a checkpoint."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    earlier = {number: signal.signal(number, partial(_note, noted)) for number in SIGNALS}
    try:
        yield
    finally:
        for number, handler in earlier.items():
            signal.signal(number, handler)
