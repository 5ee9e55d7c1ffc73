"""What a training step tells of its rows, checked and written into the scores."""

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import groupby, takewhile
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from dataio.history import Scores, record

STEPS_AT_ONCE = 16

_Values = NDArray[Any]


def check_report(num_rows: int, values: Mapping[str, torch.Tensor | None]) -> None:
    """Refuse what does not have one value for each row of a batch.

    Raises:
        ValueError: It names the first such value.
    """
    for name, value in values.items():
        if value is not None and tuple(value.shape) != (num_rows,):
            raise ValueError(
                f"report: {name} has shape {tuple(value.shape)}, expected ({num_rows},), one "
                "value a row; "
                f'compute the loss with reduction="none"'
            )


@dataclass(frozen=True)
class _Report:
    """A batch's report, some of it perhaps on its way from a device.

    Attributes:
        at_hand: dtype[batch] each: What was on the host.
        names: Of what was not.
        sent: float64[len(names), batch], in pinned memory; None if all was at hand.
        done: When it is there.
        epoch: The running epoch.
    """

    at_hand: Mapping[str, _Values]
    names: tuple[str, ...]
    sent: torch.Tensor | None
    done: torch.cuda.Event | None
    epoch: int

    @property
    def told(self) -> frozenset[str]:
        """Names of all its columns."""
        return frozenset([*self.at_hand, *self.names])

    def is_there(self) -> bool:
        return self.done is None or bool(self.done.query())  # type: ignore[no-untyped-call]

    def values(self) -> dict[str, _Values]:
        """Give all of it; blocks until it is there."""
        if self.sent is None or self.done is None:
            return dict(self.at_hand)
        self.done.synchronize()
        return {**self.at_hand, **dict(zip(self.names, self.sent.numpy(), strict=True))}


class Feedback:
    """Takes reports into a pool's scores, in the order in which they were made.

    From a GPU they come by one copy a step that nobody waits for. What has arrived is written some
    steps at a time, as between steps all code is cold; the rest by `settle`. A row is reported by
    one rank.

    Args:
        scores: Of the pool.
    """

    def __init__(self, scores: Scores) -> None:
        self._scores = scores
        self._under_way: deque[_Report] = deque()

    def add(
        self,
        slots: torch.Tensor,
        loss: torch.Tensor,
        correct: torch.Tensor | None,
        confidence: torch.Tensor | None,
        *,
        epoch: int,
    ) -> None:
        """Take in a batch's report, but for padding; a loss of nan is as inf, such a confidence 0.

        Each tensor may be on the host or on a GPU; other devices are waited for.

        Args:
            slots: int64[batch]: Of the rows; -1 is padding.
            loss: float[batch].
            correct: bool[batch]; None: nobody said.
            confidence: float[batch], in [0, 1]; None: nobody said.
            epoch: The running epoch.
        """
        told = {"slot": slots, "loss": loss, "correct": correct, "confidence": confidence}
        columns = {name: value for name, value in told.items() if value is not None}
        away = {name: value.detach() for name, value in columns.items() if value.is_cuda}
        at_hand = {name: _array(value) for name, value in columns.items() if name not in away}
        # The caller may write over its tensors before the report's turn comes.
        at_hand = {name: value.copy() for name, value in at_hand.items()}
        sent, done = _send(list(away.values())) if away else (None, None)
        self._under_way.append(_Report(at_hand, tuple(away), sent, done, epoch))
        if len(self._under_way) % STEPS_AT_ONCE == 0:
            self._write(list(takewhile(_Report.is_there, self._under_way)))

    def settle(self) -> None:
        """Write all that was reported. Blocks until the device has computed it."""
        self._write(list(self._under_way))

    def forget(self) -> None:
        """Drop what was not written yet. Waits for nothing."""
        self._under_way.clear()

    def _write(self, reports: list[_Report]) -> None:
        """Write the first reports under way, those of one epoch and the same columns at once."""
        for _ in reports:
            self._under_way.popleft()
        for (epoch, _), alike in groupby(reports, key=lambda report: (report.epoch, report.told)):
            parts = [report.values() for report in alike]
            told = {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}
            valid = told["slot"] >= 0
            if not valid.all():
                told = {name: value[valid] for name, value in told.items()}
            if len(parts) == 1 or len(np.unique(told["slot"])) == len(told["slot"]):
                self._record(told, epoch)
            else:  # a row was reported twice: its reports count one after the other
                for part in parts:
                    valid = part["slot"] >= 0
                    self._record({name: value[valid] for name, value in part.items()}, epoch)

    def _record(self, told: Mapping[str, _Values], epoch: int) -> None:
        correct, confidence = told.get("correct"), told.get("confidence")
        with np.errstate(over="ignore"):  # what float32 does not hold is infinite
            record(
                self._scores,
                told["slot"].astype(np.int64, copy=False),
                # Of a nan and a number it takes the number
                loss=np.fmin(told["loss"], np.inf).astype(np.float32, copy=False),
                correct=None if correct is None else correct.astype(np.bool_, copy=False),
                confidence=None
                if confidence is None
                else np.fmax(confidence, 0).astype(np.float32, copy=False),
                epoch=epoch,
            )


def _send(columns: list[torch.Tensor]) -> tuple[torch.Tensor, torch.cuda.Event]:
    """Begin one copy of all columns to the host, behind the work that makes them."""
    device = columns[0].device
    # float64 holds every slot exactly
    packed = torch.stack([value.to(device, torch.float64) for value in columns])
    sent = torch.empty(packed.shape, dtype=packed.dtype, pin_memory=True)
    sent.copy_(packed, non_blocking=True)
    done = torch.cuda.Event()  # type: ignore[no-untyped-call]
    done.record(torch.cuda.current_stream(device))
    return sent, done


def _array(values: torch.Tensor) -> _Values:
    if values.is_floating_point():  # NumPy has no bfloat16
        values = values.detach().to("cpu", torch.float32)
    return values.cpu().numpy()
