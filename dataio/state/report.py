"""What a training step reports of its rows, checked and written into the scores.

Where a policy goes by losses, the ranks ask once an epoch whether the rows were reported.
"""

import logging
import math
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import groupby, takewhile
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from dataio.base.errors import StateError
from dataio.plan.history import Scores, record
from dataio.plan.policies import Importance
from dataio.world import World

STEPS_AT_ONCE = 16

_Values = NDArray[Any]
HeldIds = Callable[[NDArray[np.int64] | slice], NDArray[np.int64]]
"""Returns the samples that some slots of the pool hold in the running epoch."""

log = logging.getLogger(__name__)


def check_report(
    batch: Mapping[str, torch.Tensor], values: Mapping[str, torch.Tensor | None]
) -> None:
    """Refuse a batch that does not name its rows, and what does not have one value for each.

    Raises:
        ValueError: It names the first such value.
    """
    if not isinstance(batch, Mapping):
        raise TypeError(
            f"Loader.report: batch is {batch!r:.100}, expected one as delivered; give that one"
        )
    for name, value in values.items():
        if value is not None and not isinstance(value, torch.Tensor):
            raise TypeError(
                f"Loader.report: {name} is {value!r:.100}, expected a tensor of one value a row; "
                "give it as the model computed it"
            )
    for name in ("slot", "sample_id"):
        if name not in batch:
            raise ValueError(
                f"report: the batch has no {name!r}, expected one as delivered by the loader; "
                "give that one, not what was made of it"
            )
    num_rows = batch["slot"].shape[0]
    for name, value in values.items():
        if value is not None and value.shape != (num_rows,):
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
        step: Batches of it that were delivered.
    """

    at_hand: Mapping[str, _Values]
    names: tuple[str, ...]
    sent: torch.Tensor | None
    done: torch.cuda.Event | None
    epoch: int
    step: int

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

    A report goes by sample: where it comes so late that its slots hold other rows, to those of its
    own rows that still lie here and were not reported since. The others' are lost, which is
    logged once.

    From a GPU they come by one copy a step that nobody waits for. What has arrived is written some
    steps at a time, as between steps all code is cold; the rest by `flush`. A row is reported by
    one rank.

    Args:
        scores: Of the pool.
        held: Returns the samples of its slots.
        rank: Of this process, for the log.
        num_lost: Rows whose reports were lost before, by one of fewer samples.

    Attributes:
        num_rows: Rows whose reports were written or lost.
        num_lost: Rows whose reports were lost.
        upto: Step up to which reports are written before a `flush`: under `dataio.live` the last
            that counts, as others are dealt again.
    """

    upto = math.inf

    def __init__(self, scores: Scores, held: HeldIds, *, rank: int = 0, num_lost: int = 0) -> None:
        self._scores = scores
        self._held = held
        self._rank = rank
        self._under_way: deque[_Report] = deque()
        self.num_rows, self.num_lost = 0, num_lost

    def add(
        self,
        slots: torch.Tensor,
        sample_ids: torch.Tensor,
        loss: torch.Tensor,
        correct: torch.Tensor | None,
        confidence: torch.Tensor | None,
        *,
        epoch: int,
        step: int = 0,
    ) -> None:
        """Take in a batch's report, but for padding; a loss of nan is as inf, such a confidence 0.

        Each tensor may be on the host or on a GPU; other devices are waited for.

        Args:
            slots: int64[batch]: Of the rows; -1 is padding.
            sample_ids: int64[batch]: Of the rows.
            loss: float[batch].
            correct: bool[batch]; None: it was not computed.
            confidence: float[batch], in [0, 1]; None: it was not computed.
            epoch: The running epoch.
            step: Batches of it that were delivered.
        """
        given = {
            "slot": slots, "sample_id": sample_ids, "loss": loss, "correct": correct,
            "confidence": confidence,
        }  # fmt: skip
        columns = {name: value for name, value in given.items() if value is not None}
        away = {name: value.detach() for name, value in columns.items() if value.is_cuda}
        at_hand = {name: _array(value) for name, value in columns.items() if name not in away}
        # The caller may write over its tensors before the report is written.
        at_hand = {name: value.copy() for name, value in at_hand.items()}
        sent, done = _send(list(away.values())) if away else (None, None)
        self._under_way.append(_Report(at_hand, tuple(away), sent, done, epoch, step))
        if len(self._under_way) % STEPS_AT_ONCE == 0:
            whole = takewhile(lambda one: one.step <= self.upto and one.is_there(), self._under_way)
            self._write(list(whole))

    def flush(self) -> None:
        """Write all that was reported. Blocks until the device has computed it."""
        self._write(list(self._under_way))

    def forget(self) -> None:
        """Drop what was not written yet. Waits for nothing."""
        self._under_way.clear()

    def settle(
        self, scores: Scores, ids: NDArray[np.int64], trained: NDArray[np.bool_],
        again: NDArray[np.bool_], *, epoch: int, steps: int,
    ) -> None:  # fmt: skip
        """Write what was reported of an epoch's trained rows into scores, and forget the rest.

        The pool may be closed.

        Args:
            scores: scores[num_slots].
            ids: int64[num_slots]: What the slots held.
            trained: bool[num_slots]: Whether a step that counts trained the row in the epoch.
            again: bool[num_slots]: Whether one that does not count may have, too.
            epoch: The epoch.
            steps: Those of it that count.
        """
        self._scores, self._held = scores, ids.__getitem__
        self._under_way = deque(
            one for one in self._under_way
            if one.epoch == epoch and trained[(slot := one.values()["slot"])[slot >= 0]].all()
            and (one.step <= steps or not again[slot[slot >= 0]].any())
        )  # fmt: skip
        self.flush()

    def _write(self, reports: list[_Report]) -> None:
        """Write the first reports under way, those of one epoch and the same columns at once."""
        for _ in reports:
            self._under_way.popleft()
        for (epoch, _), alike in groupby(
            reports, key=lambda one: (one.epoch, frozenset([*one.at_hand, *one.names]))
        ):
            parts = [report.values() for report in alike]
            rows = {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}
            valid = rows["slot"] >= 0
            if not valid.all():
                rows = {name: value[valid] for name, value in rows.items()}
            self.num_rows += len(rows["slot"])
            slots = rows["slot"] = rows["slot"].astype(np.int64, copy=False)
            in_place = np.array_equal(self._held(slots), rows["sample_id"])
            if in_place and (len(parts) == 1 or len(np.unique(slots)) == len(slots)):
                self._record(rows, epoch)
                continue
            for part in parts:  # a row was reported twice: its reports count one after the other
                valid = part["slot"] >= 0
                one = {name: value[valid] for name, value in part.items()}
                self._record(one if in_place else self._found(one, epoch), epoch)

    def _found(self, rows: dict[str, _Values], epoch: int) -> dict[str, _Values]:
        """Follow rows that lie elsewhere than when their batch was delivered."""
        slots, ids = rows["slot"].astype(np.int64), rows["sample_id"].astype(np.int64)
        strayed = np.flatnonzero(self._held(slots) != ids)
        if not len(strayed):
            return rows
        held = self._held(slice(None))
        order = np.argsort(held, kind="stable")
        places = np.searchsorted(held, ids[strayed], sorter=order)
        slots[strayed] = order[np.minimum(places, len(order) - 1)]
        is_here = held[slots] == ids
        lost = len(ids) - int(np.count_nonzero(is_here))
        if lost and not self.num_lost:
            log.warning(
                "[rank %d] report: epoch %d has come, and %d of the %d rows of a batch of an "
                "earlier one lie on another node now: what was reported of them is lost (counted "
                "as lost_reports in stats); report each batch before the epoch ends",
                self._rank, epoch, lost, len(ids),
            )  # fmt: skip
        self.num_lost += lost
        # What was reported in this epoch is newer; whoever trained the row wrote it.
        is_here[strayed] &= self._scores["epoch"][slots[strayed]] < epoch
        return {name: value[is_here] for name, value in (rows | {"slot": slots}).items()}

    def _record(self, rows: Mapping[str, _Values], epoch: int) -> None:
        correct, confidence = rows.get("correct"), rows.get("confidence")
        with np.errstate(over="ignore"):  # what float32 does not hold is infinite
            record(
                self._scores,
                rows["slot"].astype(np.int64, copy=False),
                # Of a nan and a number it takes the number
                loss=np.fmin(rows["loss"], np.inf).astype(np.float32, copy=False),
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


REPORTED_FRACTION = 0.9
"""Of the rows trained must be reported, else a message says so: the last batch may come later."""

CALL = "loader.report(batch, loss, *importance.outcome(logits, labels))"


class Reported:
    """Misses the reports of an epoch.

    Args:
        feedback: Counts the rows that were reported on this rank.
        world: All ranks.
        importance: The policy, for messages.
        keeps_scores: Whether it keeps what is reported.
        earlier: One of the same run, of fewer samples: what it saw is remembered.
    """

    def __init__(
        self,
        feedback: Feedback,
        world: World,
        importance: Importance | None,
        *,
        keeps_scores: bool,
        earlier: "Reported | None" = None,
    ) -> None:
        self._feedback = feedback
        self._world = world
        self._importance = importance
        self._keeps_scores = keeps_scores
        # Of all ranks: whether rows were reported, and whether it was logged that too few were.
        self._has_any: bool = earlier is not None and earlier._has_any
        self._has_warned: bool = earlier is not None and earlier._has_warned

    def check(self, num_rows: int, *, epoch: int) -> None:
        """Refuse an epoch of which nothing was reported to a policy that keeps it. Collective.

        Also the point that no rank passes before all have reported.

        Args:
            num_rows: Rows that this rank trained in the epoch.
            epoch: The epoch.

        Raises:
            StateError: On all ranks, if no row was reported so far.
        """
        reported, self._feedback.num_rows = self._feedback.num_rows, 0
        mine = np.array([num_rows, reported])
        trained, reported = self._world.allreduce(mine, op="sum", doing="report scores").tolist()
        self._has_any |= reported > 0
        if not self._keeps_scores or reported >= REPORTED_FRACTION * trained:
            return
        if not self._has_any:
            raise StateError(
                f"Loader: epoch {epoch} ended and no row was reported, expected all, as "
                f"importance is {self._importance}, which goes by losses: call {CALL} after each "
                "step, or give no importance",
                on_all_ranks=True,
            )
        if not self._has_warned and self._world.rank == 0:
            log.warning(
                "[rank 0] epoch %d: %d of %d rows that were trained were reported, and importance "
                "goes by losses: call %s after each step",
                epoch, reported, trained, CALL,
            )  # fmt: skip
        self._has_warned = True
