"""A polite end: SIGTERM asks for a checkpoint instead of killing at once."""

import signal
import threading
from types import FrameType, TracebackType
from typing import Self

import numpy as np

from dataio.world import World


class StopRequest:
    """Notes a SIGTERM while it is open. The signal handler writes, the training loop reads."""

    def __init__(self) -> None:
        self._asked = False

    def __enter__(self) -> Self:
        # Python lets only the main thread handle signals.
        self._handles = threading.current_thread() is threading.main_thread()
        if self._handles:
            self._earlier = signal.signal(signal.SIGTERM, self._note)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._handles:
            signal.signal(signal.SIGTERM, self._earlier)

    def agreed(self, world: World) -> bool:
        """Say whether any rank was asked to stop; the same answer everywhere. Collective."""
        asked = np.array([self._asked])
        return bool(world.allreduce(asked, op="max", doing="looking for a SIGTERM")[0])

    def _note(self, number: int, frame: FrameType | None) -> None:
        self._asked = True
