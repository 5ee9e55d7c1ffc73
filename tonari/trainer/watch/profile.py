"""A trace of some steps by torch's profiler, for a trace viewer such as Perfetto."""

from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile
from typing_extensions import Self


class StepTrace:
    """Traces this start's steps ``first`` to ``last`` of a rank into ``directory``.

    Args:
        steps: The first and the last step, counted from 1; empty: none.
        directory: Gets ``trace-<rank>.json``.
        rank: Of this process.
        device: Whose work to trace beside the CPU's.
    """

    def __init__(
        self, steps: tuple[int, ...], *, directory: Path, rank: int, device: torch.device
    ) -> None:
        self._steps = range(steps[0], steps[1] + 1) if steps else range(0)
        self._path = directory / f"trace-{rank}.json"
        activities = [ProfilerActivity.CPU]
        if device.type == "cuda":
            activities.append(ProfilerActivity.CUDA)
        # All events: torch before 2.13 warns that it keeps those of one cycle, where there is one.
        self._profile = profile(activities=activities, acc_events=True) if steps else None
        self._step = 0
        self._running = False

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self._running:
            self._stop()

    def step(self) -> None:
        """Say that a step begins."""
        self._step += 1
        wanted = self._step in self._steps
        if wanted and not self._running and self._profile is not None:
            self._profile.start()
            self._running = True
        elif self._running and not wanted:
            self._stop()

    def _stop(self) -> None:
        assert self._profile is not None, "it runs"
        self._running = False
        self._profile.stop()
        self._path.parent.mkdir(parents=True, exist_ok=True)
        self._profile.export_chrome_trace(str(self._path))
