"""A polite end: a signal asks for a checkpoint instead of killing at once."""

import contextlib
import os
import signal
import threading
import time
from collections.abc import Iterator
from types import FrameType, TracebackType

import numpy as np
from typing_extensions import Self

from dataio.world import World

SIGNALS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2)
"""What launchers send, and what Slurm can send ahead of the time limit (--signal=USR1@300)."""

AT_ONCE = ("SIGTERM", "SIGINT")
"""After these a run trains no step more: SIGKILL, or a person's patience, may end soon."""

ASK_S = 1.0
"""Time between two questions to all ranks: a step that takes longer asks every time."""

MOST_STEPS = 100
"""Between two questions: steps may become slower all at once."""

AGAIN_S = 2.0
"""A launcher and its group may both pass on a signal: within this time it is the same one."""


class StopRequest:
    """Notes a signal while it is open; the same one again ends the process at once.

    The signal handler writes, the training loop reads. Ctrl-C is noted from `train` on: before,
    nothing would be saved, and it interrupts as ever.

    Args:
        ends_with_node: Whether SIGTERM ends the process where an error closes it: a launcher that
            lost another rank of the node ends this one too.
        noted: Signals that came before, to which those that come are added; None: there are none.
    """

    def __init__(
        self, *, ends_with_node: bool = False, noted: dict[int, float] | None = None
    ) -> None:
        self._ends_with_node = ends_with_node
        self._asked = 0
        self._noted = {} if noted is None else noted
        self._earlier: dict[int, object] = {}
        self._speaks = False
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

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        for number, earlier in self._earlier.items():
            signal.signal(number, earlier)  # type: ignore[arg-type]
        if self._ends_with_node and error is not None and signal.SIGTERM in self._noted:
            os.kill(os.getpid(), signal.SIGTERM)

    def train(self, *, speaks: bool) -> None:
        """From now on a checkpoint may be written: note Ctrl-C too.

        Args:
            speaks: Whether this rank says on standard error that it was noted.
        """
        self._speaks = speaks
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
        asked = np.array([max(self._noted, default=0), pace_s])
        number, slowest_s = world.allreduce(asked, op="max", doing="looking for a signal to stop")
        self._asked = int(number)
        return self._asked > 0, float(slowest_s)

    def _note(self, number: int, frame: FrameType | None) -> None:
        now = time.monotonic()
        if number == signal.SIGINT and self._speaks and number not in self._noted:
            words = "tonari: stops after this step, with a checkpoint; Ctrl-C again ends it at once"
            os.write(2, f"\n{words}\n".encode())
        if number in self._noted and now - self._noted[number] > AGAIN_S:
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)
        self._noted.setdefault(number, now)


@contextlib.contextmanager
def noting_between(noted: dict[int, float]) -> Iterator[None]:
    """Note within, also while no `StopRequest` is open, the signals that ask for a checkpoint."""
    numbers = (signal.SIGUSR1, signal.SIGUSR2)
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def note(number: int, frame: FrameType | None) -> None:
        noted.setdefault(number, time.monotonic())

    earlier = {number: signal.signal(number, note) for number in numbers}
    try:
        yield
    finally:
        for number, handler in earlier.items():
            signal.signal(number, handler)
