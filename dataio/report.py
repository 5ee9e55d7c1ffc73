"""What a training step tells of its rows, checked and written into the scores."""

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from dataio.history import Scores, record

Values = NDArray[np.floating]


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
    """A batch's report on its way from the device.

    Attributes:
        slots: int64[batch], where they were on the host already.
        values: float64[columns, batch], in pinned memory.
        names: Of the columns.
        epoch: The running epoch.
        done: When the values are there.
    """

    slots: NDArray[np.int64] | None
    values: torch.Tensor
    names: tuple[str, ...]
    epoch: int
    done: torch.cuda.Event


class Feedback:
    """Takes reports into a pool's scores.

    From a GPU they come by one copy a step that nobody waits for: what has arrived is written at
    the next report, the rest by `settle`. A row is reported by one rank.

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
        """Take in a batch's report, but for padding; a loss of nan is as inf.

        Args:
            slots: int64[batch]: Of the rows; -1 is padding.
            loss: float[batch].
            correct: bool[batch]; None: nobody said.
            confidence: float[batch], in [0, 1]; None: nobody said.
            epoch: The running epoch.
        """
        told = {"loss": loss, "correct": correct, "confidence": confidence}
        columns = {name: value.detach() for name, value in told.items() if value is not None}
        if loss.device.type == "cuda":
            self._send(slots, columns, epoch)
            while self._under_way and self._under_way[0].done.query():  # type: ignore[no-untyped-call]
                self._take_in(self._under_way.popleft())
            return
        values = {name: _array(value) for name, value in columns.items()}
        self._write(slots.cpu().numpy(), values, epoch)

    def settle(self) -> None:
        """Write all that was reported. Blocks until the device has computed it."""
        while self._under_way:
            report = self._under_way.popleft()
            report.done.synchronize()
            self._take_in(report)

    def _send(self, slots: torch.Tensor, columns: dict[str, torch.Tensor], epoch: int) -> None:
        device = columns["loss"].device
        at_hand = slots.numpy() if slots.device.type == "cpu" else None
        if at_hand is None:
            columns = {"slot": slots, **columns}
        # float64 holds every slot exactly
        packed = torch.stack([value.to(device, torch.float64) for value in columns.values()])
        values = torch.empty(packed.shape, dtype=packed.dtype, pin_memory=True)
        values.copy_(packed, non_blocking=True)
        done = torch.cuda.Event()  # type: ignore[no-untyped-call]
        done.record(torch.cuda.current_stream(device))
        self._under_way.append(_Report(at_hand, values, tuple(columns), epoch, done))

    def _take_in(self, report: _Report) -> None:
        values = dict(zip(report.names, report.values.numpy(), strict=True))
        slots = values.pop("slot").astype(np.int64) if report.slots is None else report.slots
        self._write(slots, values, report.epoch)

    def _write(self, rows: NDArray[np.int64], told: Mapping[str, Values], epoch: int) -> None:
        valid = rows >= 0
        if not valid.all():
            rows, told = rows[valid], {name: value[valid] for name, value in told.items()}
        correct, confidence = told.get("correct"), told.get("confidence")
        record(
            self._scores,
            rows,
            loss=np.nan_to_num(told["loss"], nan=np.inf, posinf=np.inf).astype(np.float32),
            correct=None if correct is None else correct.astype(np.bool_),
            confidence=None if confidence is None else confidence.astype(np.float32),
            epoch=epoch,
        )


def _array(values: torch.Tensor) -> NDArray[np.float32]:
    return np.asarray(values.to("cpu", torch.float32).numpy())
