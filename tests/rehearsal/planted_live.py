"""Bugs to plant in `dataio.live`: each breaks a promise that a rehearsal is to find broken."""

import contextlib
import json
import os
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch

import dataio.job.live
from dataio import LiveJob, Loader
from dataio.base.atomic import write_file
from dataio.base.errors import WorldError
from dataio.job.meeting import Meeting
from dataio.state.remembered import Remembered
from dataio.state.report import Feedback


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


def _take_own(self: LiveJob, state: Any, donors: Any, then: Any = LiveJob._take_over) -> Any:
    found = then(self, state, donors)
    return found if self.counted is None else self.counted.state()


def _publish_over(self: Meeting, ranks: list[int]) -> None:
    mine = self._directory / f"list-{self._rank}"
    write_file(mine, json.dumps(ranks).encode())
    os.replace(mine, self._directory / "members")


def _come_late(self: Meeting, *args: Any, then: Any = Meeting.agree, **options: Any) -> Any:
    try:
        return then(self, *args, **options)
    except WorldError:
        return tuple(sorted({*(self.read() or ()), self._rank}))


def _wait_for_nobody(self: Meeting, *args: Any, then: Any = Meeting.agree, **options: Any) -> Any:
    self._patience_s = 0.0
    return then(self, *args, **options)


def _find_untrained(self: Remembered, group: int, steps: int, then: Any = Remembered.of) -> Any:
    return then(self, group, steps if group == self.sampling.mine else 0)


def _write_all(self: Feedback, *args: Any, epoch: int, then: Any = Feedback.settle) -> None:
    scores, ids, trained = args
    then(self, scores, ids, np.ones_like(trained), epoch=epoch)


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
    "what a lost node trained is not known": ((Remembered, "of", _find_untrained),),
    "reports of steps that do not count are kept": ((Feedback, "settle", _write_all),),
}  # fmt: skip
COURSES_PLANTED: dict[str, tuple[tuple[Any, str, Any], ...]] = {
    "a rank keeps its weights where others have newer ones": ((LiveJob, "_take_over", _take_own),),
    "two lists of members are made": ((Meeting, "_publish", _publish_over),),
    "a rank that is left out goes on": ((Meeting, "agree", _come_late),),
}
"""Those that `tests/dataio/job/test_live_schedules.py` finds."""
