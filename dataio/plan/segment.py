"""Where a run stands: the epoch, and the segments of it that were trained so far.

A *segment* is a part of an epoch under one layout, batch size and list of samples left out. A run
that goes on under another begins a new one with the rows that no segment before it trained: each
sample of the epoch still comes exactly once. Pure.
"""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import chain, groupby
from typing import Any

from dataio.plan.layout import Layout


@dataclass(frozen=True)
class Segment:
    """What decides which rows a step trains, beside the seed and the epoch.

    Attributes:
        replicas: Replicas on each node, node by node.
        batch_size: Rows a batch.
        first_epoch: In which this layout began, or the dataset last grew.
        steps: Batches delivered, the same on every replica.
        grouped: Whether the rows were ordered as they were being staged.
        grown: Of a dataset that grows: pairs of an epoch and of the samples from there on, since
            the layout began; the last is of ``first_epoch``. Empty where it does not grow.
        excluded: Name of the list of samples left out for good; "" where there is none.
    """

    replicas: tuple[int, ...]
    batch_size: int
    first_epoch: int
    steps: int = 0
    grouped: bool = False
    grown: tuple[tuple[int, int], ...] = ()
    excluded: str = ""

    def layout(self, num_samples: int) -> Layout:
        """Return the layout; ``num_samples`` are those of a dataset that does not grow."""
        if not self.grown:
            return Layout(self.replicas, num_samples)
        return Layout(self.replicas, self.grown[-1][1], self.grown[:-1])

    def has_grown(self, epoch: int, num_samples: int) -> "Segment":
        """Return the segment that an epoch begins with as the dataset grew."""
        return replace(self, first_epoch=epoch, grown=(*self.grown, (epoch, num_samples)))

    @property
    def step_rows(self) -> int:
        """Rows of a step on all replicas, padding included."""
        return sum(self.replicas) * self.batch_size

    def to_json(self) -> dict[str, object]:
        """Small whatever the number of nodes: equal neighbours are counted."""
        runs = [[width, len(list(run))] for width, run in groupby(self.replicas)]
        stored = {**asdict(self), "replicas": runs}
        if not self.grown:
            del stored["grown"]
        if not self.excluded:
            del stored["excluded"]
        return stored

    @staticmethod
    def from_json(stored: Mapping[str, Any]) -> "Segment":
        """Read back what `to_json` made."""
        runs = chain.from_iterable([width] * count for width, count in stored["replicas"])
        grown = tuple((int(epoch), int(count)) for epoch, count in stored.get("grown", ()))
        return Segment(**{**stored, "replicas": tuple(runs), "grown": grown})


@dataclass(frozen=True)
class Position:
    """A point between two batches of a run.

    Attributes:
        epoch: The running epoch.
        segments: Of the epoch; the last is the one under way.
        refresh_step: Batches of hidden rows delivered.
    """

    epoch: int
    segments: tuple[Segment, ...]
    refresh_step: int = 0

    @property
    def running(self) -> Segment:
        """The segment under way."""
        return self.segments[-1]

    @property
    def ended(self) -> tuple[Segment, ...]:
        """The segments before it."""
        return self.segments[:-1]

    @property
    def num_steps(self) -> int:
        """Steps of all of them."""
        return sum(segment.steps for segment in self.segments)

    @property
    def ended_rows(self) -> int:
        """Rows of their steps, padding included."""
        return sum(segment.steps * segment.step_rows for segment in self.ended)

    def at(self, *, steps: int, refresh_step: int) -> "Position":
        """Move on within the segment."""
        return replace(
            self,
            segments=(*self.ended, replace(self.running, steps=steps)),
            refresh_step=refresh_step,
        )

    def resumed(
        self,
        replicas: Sequence[int],
        batch_size: int,
        *,
        excluded: str = "",
        same_steps: bool = False,
    ) -> "Position":
        """Go on in the same segment if it has this layout, batch size and list, else in a new one.

        Another layout begins in this epoch, with its rows where a first layout puts them.

        Args:
            replicas: Replicas on each node, node by node.
            batch_size: Rows a batch.
            excluded: Name of the list of samples left out for good.
            same_steps: Whether the steps train the same rows as before, only dealt to other
                replicas: then the segment goes on too.
        """
        old = self.running
        same_layout, same_list = old.replicas == tuple(replicas), old.excluded == excluded
        if same_layout and old.batch_size == batch_size and same_list:
            return self
        if same_steps and same_list:
            running = replace(old, replicas=tuple(replicas), batch_size=batch_size)
            return replace(self, segments=(*self.ended, running))
        first_epoch, grown = old.first_epoch, old.grown
        if not same_layout:
            first_epoch = self.epoch
            grown = tuple((self.epoch, num_samples) for _, num_samples in old.grown[-1:])
        new = Segment(tuple(replicas), batch_size, first_epoch, grown=grown, excluded=excluded)
        ended = self.segments if old.steps else self.ended
        return Position(self.epoch, (*ended, new))

    def to_json(self) -> dict[str, object]:
        """For `state_dict`."""
        return {
            "epoch": self.epoch,
            "step": self.running.steps,
            "refresh_step": self.refresh_step,
            "stretches": [segment.to_json() for segment in self.segments],
        }

    @staticmethod
    def from_json(stored: Mapping[str, Any]) -> "Position":
        """Read back what `to_json` made."""
        segments = tuple(Segment.from_json(one) for one in stored["stretches"])
        return Position(int(stored["epoch"]), segments, int(stored["refresh_step"]))
