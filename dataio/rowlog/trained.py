"""Rows that were trained, by column, and where a sampling group's rows stand in an epoch. Pure."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from dataio.plan.epoch import EpochPlan, SamplingGroups
from dataio.plan.layout import Layout
from dataio.plan.order import valid_rows
from dataio.rowlog.attempts import Attempt


class TrainedRows(NamedTuple):
    """Rows that were trained, by column: one value a row in each.

    Attributes:
        step: int64: Of the epoch, from 0 on.
        node: int64: Where that replica is.
        replica: int64: Who trained it.
        position: int64: Its place in the replica's batch.
        slot: int64: In the node's pool.
        sample_id: int64.
        weight: float32: As delivered.
    """

    step: NDArray[np.int64]
    node: NDArray[np.int64]
    replica: NDArray[np.int64]
    position: NDArray[np.int64]
    slot: NDArray[np.int64]
    sample_id: NDArray[np.int64]
    weight: NDArray[np.float32]


_NO_ID = np.empty(0, np.int64)
_NONE = TrainedRows(_NO_ID, _NO_ID, _NO_ID, _NO_ID, _NO_ID, _NO_ID, np.empty(0, np.float32))


@dataclass(frozen=True)
class TrainedGroup:
    """The epoch of one sampling group, as an attempt trained it.

    Attributes:
        attempt: Which.
        layout: Of its ranks.
        sampling: All sampling groups; ``mine`` is this one.
        plan: Its batches, as its first replica has them.
        fewest: Rows of the replica that is dealt the fewest, of all.
        scales: What weights are multiplied by, by batch size and step, as far as it was found.
    """

    attempt: Attempt
    layout: Layout
    sampling: SamplingGroups
    plan: EpochPlan
    fewest: int
    scales: dict[tuple[int, int], np.float32]

    def at(
        self, places: NDArray[np.int64], sample_id: NDArray[np.int64] | None = None
    ) -> TrainedRows:
        """Describe what stands at places of the group's run; ``sample_id`` is to be filled in."""
        order, width = self.plan.order, len(self.plan.order.dealt)
        slots = order.slots_in_run(places) if len(places) else places
        own, batch_size = places // width, order.batch_size
        step = own // batch_size
        weight = np.ones(len(places), np.float32)
        if self.plan.selection.weights is not None:
            weight = self.plan.selection.weights[slots].astype(np.float32)
        # As `EpochPlan.block` scales them: by 1 where no replica pads
        late = (step + 1) * batch_size > self.fewest
        for each in np.unique(step[late]).tolist():
            weight[step == each] *= self._scale(each)
        before = self.attempt.position.num_steps - self.attempt.first
        replica = self.sampling.leader + places % width
        node = np.searchsorted(self.layout.first_replica, replica, side="right") - 1
        return TrainedRows(
            step + before, node, replica, own % batch_size, slots,
            slots if sample_id is None else sample_id, weight,
        )  # fmt: skip

    def _scale(self, step: int) -> np.float32:
        dealt, known = self.plan.dealt, (self.plan.order.batch_size, step)
        if known not in self.scales:
            valid = max(int(valid_rows(dealt, step, known[0])), 1)
            self.scales[known] = np.float32(len(dealt) * known[0] / valid)
        return self.scales[known]

    def places(self, steps: range) -> NDArray[np.int64]:
        """int64[n]: Places of the group's run that some steps of the segment train."""
        order = self.plan.order
        stop = min(steps.stop, order.steps)
        per_step = len(order.dealt) * order.batch_size
        last = min(stop * per_step, int(order.dealt.sum()))
        return np.arange(min(steps.start * per_step, last), last)


def joined(parts: Iterable[TrainedRows]) -> TrainedRows:
    """Put rows one behind the other."""
    parts = [*parts]
    if len(parts) == 1:
        return parts[0]
    columns = zip(_NONE, *parts, strict=True)
    return TrainedRows._make(np.concatenate(column) for column in columns)
