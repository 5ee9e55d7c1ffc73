"""What measures the parts of a step: the host's clock, or events of a GPU's own.

A host issues kernels and goes on, so its clock says how long issuing takes and nothing of when they
run. Between two events of the GPU lies what it computed, and what it waited for its host; a clock
that holds the GPU back until the host is ahead leaves the first alone.
"""

import time
from dataclasses import dataclass
from types import ModuleType
from typing import Protocol

import torch

from dataio.job.launch import own_device
from dataio.world import World
from tonari.oracle.errors import OracleError
from tonari.trainer.config.config import Config
from tonari.trainer.private.occupied import occupy

HELD_OPERATORS = 128
"""Issued while the GPU is held, which queues a thousand kernels before it makes its host wait."""
HELD_CYCLES = 1 << 24
"""For which it is held at first, some ten milliseconds."""
MOST_CYCLES = 1 << 26


class StepClock(Protocol):
    """Measures laps of a step, one after another, without what it is paused for."""

    def begin(self) -> None:
        """Begin the first lap."""
        ...

    def pause(self) -> None:
        """Leave out what follows."""
        ...

    def resume(self) -> None:
        """Go on with a lap."""
        ...

    def lap(self) -> None:
        """End a lap, and begin the next."""
        ...

    def count(self) -> None:
        """Take note of an operator that is about to be issued."""
        ...

    def end(self) -> list[float]:
        """End the last lap: seconds of each. Blocks until all is computed."""
        ...


class HostClock:
    """What passes on the host."""

    def begin(self) -> None:
        self._laps_s = [0.0]
        self.resume()

    def pause(self) -> None:
        self._laps_s[-1] += time.perf_counter() - self._since

    def resume(self) -> None:
        self._since = time.perf_counter()

    def lap(self) -> None:
        self.pause()
        self._laps_s.append(0.0)
        self.resume()

    def count(self) -> None:
        """Nothing: an operator is computed where it is called."""

    def end(self) -> list[float]:
        self.pause()
        return self._laps_s


@dataclass(frozen=True)
class Gpu:
    """A GPU on which steps are timed.

    Attributes:
        device: Where tensors lie.
        name: Of the card.
        cuda: ``torch.cuda``.
    """

    device: torch.device
    name: str
    cuda: ModuleType


def find_gpu(config: Config, world: World) -> Gpu | None:
    """Find the GPU on which this rank's steps are timed. Collective.

    Args:
        config: The job's settings.
        world: All ranks of the probe.

    Returns:
        None: The job trains on CPUs.

    Raises:
        OracleError: If it would train on GPUs, and there is none here.
        WorldError: If there are fewer than ranks on this node.
    """
    wanted = config.run.device
    if wanted == "cpu" or (wanted == "auto" and not torch.cuda.is_available()):
        return None
    if not torch.cuda.is_available():
        raise OracleError(
            f'run.device is "{wanted}", and torch {torch.__version__} sees no GPU here: what one '
            "computes, keeps in memory and sends can be measured on it alone; start the probe "
            "where the job will run, or give run.device=cpu for a job on CPUs"
        )
    device = own_device(world)
    return Gpu(device, torch.cuda.get_device_name(device), torch.cuda)


class DeviceClock:
    """What passes on a GPU, on the stream on which `begin` was called.

    Args:
        cuda: Of the GPU.
        holds: Hold it back while operators are issued, a hundred or so at a time, so that no lap
            has a wait for its host in it.
    """

    def __init__(self, cuda: ModuleType, *, holds: bool = False) -> None:
        self._cuda, self._holds, self._cycles = cuda, holds, HELD_CYCLES
        self._operators = 0
        self._was_late = False
        self._laps: list[list[tuple[torch.cuda.Event, torch.cuda.Event]]] = []

    def begin(self) -> None:
        self._stream = self._cuda.current_stream()
        self._laps, self._was_late = [[]], False
        self.resume()

    def pause(self) -> None:
        # Passed already: the hold was over before all was issued
        self._was_late |= self._began.query()  # type: ignore[no-untyped-call]
        self._laps[-1].append((self._began, self._mark()))

    def resume(self) -> None:
        self._operators = 0
        if self._holds:
            with self._cuda.stream(self._stream):
                occupy(self._cycles)
        self._began = self._mark()

    def lap(self) -> None:
        self.pause()
        self._laps.append([])
        self.resume()

    def count(self) -> None:
        self._operators += 1
        if self._holds and self._operators > HELD_OPERATORS:
            self.pause()
            self.resume()

    def end(self) -> list[float]:
        self.pause()
        self._cuda.synchronize()
        return [
            sum(first.elapsed_time(last) for first, last in parts) / 1000 for parts in self._laps
        ]

    def falls_short(self) -> bool:
        """Say whether the host was not ahead in the last step; in the next, it has more time.

        Never where it had the longest: then the step itself waits for the GPU.
        """
        if not (self._holds and self._was_late) or self._cycles >= MOST_CYCLES:
            return False
        self._cycles *= 4
        return True

    def _mark(self) -> torch.cuda.Event:
        mark: torch.cuda.Event = self._cuda.Event(enable_timing=True)
        mark.record(self._stream)
        return mark
