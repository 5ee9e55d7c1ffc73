"""Bugs to plant in `dataio.live`: each breaks a promise that a rehearsal is to find broken."""

import contextlib
from collections.abc import Iterator
from typing import Any

import torch

import dataio.job.live
from dataio import LiveJob, Loader
from dataio.job.meeting import Meeting


def _count_early(self: LiveJob, parameters: Any, then: Any = LiveJob.average) -> None:
    if self._loader is not None:
        self._count(self.number + 1, self._loader.state_dict())
    then(self, parameters)


@contextlib.contextmanager
def _count_nothing(self: LiveJob) -> Iterator[None]:
    yield


def _count_late(self: LiveJob, number: int, loader: Any, then: Any = LiveJob._count) -> None:
    before = self.counted.loader if self.counted is not None else loader
    then(self, number, before)


def _whole_of(change: Any, then: Any = dataio.job.live._whole) -> Any:
    def whole(its: Any, values: Any) -> Any:
        state = then(its, values)
        if isinstance(its, torch.optim.Optimizer):
            change(state)
        return state

    return whole


def _keep_first_rate(state: Any) -> None:
    for group in state["param_groups"]:
        group["lr"] = group["initial_lr"]


def _leave_buffers(its: Any, values: Any, then: Any = dataio.job.live._whole) -> Any:
    return its.state_dict() if isinstance(its, torch.nn.Module) else then(its, values)


def _wait_for_nobody(self: Meeting, *args: Any, then: Any = Meeting.agree, **options: Any) -> Any:
    self._patience_s = 0.0
    return then(self, *args, **options)


LIVE_PLANTED: dict[str, tuple[tuple[Any, str, Any], ...]] = {
    "a step counts before the sum": (
        (LiveJob, "average", _count_early), (LiveJob, "step", _count_nothing),
    ),
    "a step counts with the position before it": ((LiveJob, "_count", _count_late),),
    "a loader does not go back to what counted": (
        (Loader, "load_state_dict", lambda self, state: None),
    ),
    "a learning rate is that of the beginning": (
        (dataio.job.live, "_whole", _whole_of(_keep_first_rate)),
    ),
    "an optimizer forgets what it has summed up": (
        (dataio.job.live, "_whole", _whole_of(lambda state: state["state"].clear())),
    ),
    "a buffer is not put back": ((dataio.job.live, "_whole", _leave_buffers),),
    "a meeting waits for nobody": ((Meeting, "agree", _wait_for_nobody),),
}  # fmt: skip
