"""What a run's log names: its attempts, and which of their steps are in the weights. Pure.

An *attempt* is what one loader trained of an epoch without a break: it ends with the epoch, at a
restore, or where the process ended. Each names the one that it went on from and the step there:
what that one trained beyond it was thrown away. So the attempts are a tree, and the steps on the
way from the last one back to the first are those that the weights have seen.
"""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dataio.plan.segment import Position


@dataclass(frozen=True, kw_only=True)
class Setup:
    """What a loader was made with, as far as it decides the order of rows.

    Attributes:
        seed: Of every random choice.
        num_samples: Of the dataset, as the loader was made.
        shuffle: The policy as it prints.
        importance: The policy as it prints; "" for none.
        holds_all: Whether every node holds all rows.
        drop_last: Whether steps that not every replica fills are left out.
        accumulate: Batches of an optimizer step.
        source: Name of the dataset.
        made_as: As `Source.made_as`.
        fingerprint: Of the dataset.
        costs: Name of what rows cost; "" where they cost alike.
        order_version: See `dataio.base.seeding`.
    """

    seed: int
    num_samples: int
    shuffle: str
    importance: str
    holds_all: bool
    drop_last: bool
    accumulate: int
    source: str
    made_as: str
    fingerprint: str
    costs: str
    order_version: int

    def to_json(self) -> dict[str, Any]:
        """For the log."""
        return asdict(self)

    @staticmethod
    def from_json(stored: Mapping[str, Any]) -> "Setup":
        """Read back what `to_json` made."""
        return Setup(**{field.name: stored[field.name] for field in fields(Setup)})


@dataclass(frozen=True, kw_only=True)
class Attempt:
    """What one loader trained of an epoch without a break.

    Attributes:
        number: Counts the attempts of a log, from 0.
        setup: What the loader was made with.
        after: The attempt that it went on from, and the step of its segment there; None: a first
            one.
        begins: Whether the run began here; False with ``after`` None: what came before is in no
            log.
        position: Where it began.
        shown: Rows that each sampling group shows; None: all of them.
        stop: Step of the running segment that it came to; rows of steps before that were trained.
        skipped: But for these steps: pairs of a first one and the one behind the last.
        padded: And but for these rows, which could not be read and became padding: step of the
            segment, replica, place in its batch.
    """

    number: int
    setup: Setup
    after: tuple[int, int] | None
    begins: bool
    position: Position
    shown: str | None
    stop: int
    skipped: tuple[tuple[int, int], ...] = ()
    padded: tuple[tuple[int, int, int], ...] = ()

    def pads(
        self, step: NDArray[np.int64], replica: NDArray[np.int64], position: NDArray[np.int64]
    ) -> NDArray[np.bool_]:
        """bool[n]: Whether each of some rows became padding; ``step`` is of the segment."""
        found = np.zeros(len(step), np.bool_)
        if self.padded:
            known = np.array(self.padded, np.int64)
            _, replicas, positions = (known.max(axis=0) + 1).tolist()
            here = np.flatnonzero((replica < replicas) & (position < positions))
            code = (step[here] * replicas + replica[here]) * positions + position[here]
            found[here] = np.isin(code, known @ [replicas * positions, positions, 1])
        return found

    def skips(self, steps: NDArray[np.int64]) -> NDArray[np.bool_]:
        """bool[n]: Whether each of some steps of the segment was passed over."""
        found = np.zeros(len(steps), np.bool_)
        for first, stop in self.skipped:
            found |= (steps >= first) & (steps < stop)
        return found

    @property
    def epoch(self) -> int:
        """The epoch."""
        return self.position.epoch

    @property
    def first(self) -> int:
        """Step of the running segment that it began with."""
        return self.position.running.steps


@dataclass(frozen=True)
class AttemptSteps:
    """Steps that one attempt trained.

    Attributes:
        attempt: Which.
        steps: Of its running segment.
        run_step: Optimizer steps of the run before them.
        kept: Whether they are in the weights.
    """

    attempt: Attempt
    steps: range
    run_step: int
    kept: bool

    @property
    def epoch_steps(self) -> range:
        """The same steps, counted from the epoch's first."""
        before = self.attempt.position.num_steps - self.attempt.first
        return range(self.steps.start + before, self.steps.stop + before)

    @property
    def run_steps(self) -> range:
        """Optimizer steps of the run that they are, the first of a run being 1."""
        count = -(-len(self.steps) // self.attempt.setup.accumulate)
        return range(self.run_step + 1, self.run_step + 1 + count)

    def since(self, epoch_step: NDArray[np.int64]) -> NDArray[np.int64]:
        """int64[n]: Steps of the segment that some steps of the epoch are."""
        return epoch_step - self.epoch_steps.start + self.steps.start

    def steps_of(self, run_step: int) -> range:
        """Find the steps of the epoch that one of ``run_steps`` is made of."""
        size, steps = self.attempt.setup.accumulate, self.epoch_steps
        start = steps.start + (run_step - self.run_steps.start) * size
        return range(start, min(start + size, steps.stop))


@dataclass(frozen=True)
class Course:
    """The steps that led to some weights, and those that were thrown away.

    Attributes:
        kept: In the order of training.
        discarded: In the order of training too.
        is_whole: Whether all that the weights have seen is known, from the run's beginning on.
        attempts: All of the log.
    """

    kept: tuple[AttemptSteps, ...]
    discarded: tuple[AttemptSteps, ...]
    is_whole: bool
    attempts: tuple[Attempt, ...]

    def find(self, epoch: int, step: int) -> tuple[AttemptSteps, int]:
        """Find the piece that trained a step of an epoch, the last one that did.

        Raises:
            ValueError: If none did.
        """
        of_epoch = [piece for piece in self.kept if piece.attempt.epoch == epoch]
        for piece in reversed(of_epoch):
            if step in piece.epoch_steps:
                return piece, step
        if not of_epoch:
            known = [piece.attempt.epoch for piece in self.kept] or [0]
            raise ValueError(
                f"epoch {epoch} was never begun, expected one in [{min(known)}, {max(known)}]; "
                "give one of these"
            )
        count = max(piece.epoch_steps.stop for piece in of_epoch)
        raise ValueError(
            f"step {step} of epoch {epoch} was never reached, expected one in [0, {count}); give "
            "such a one"
        )


def find_course(attempts: Sequence[Attempt], *, tip: tuple[int, int] | None = None) -> Course:
    """Follow the attempts back from the last one, or from where something was saved.

    Args:
        attempts: Of a log, by number.
        tip: The attempt, and the step of its segment, that the weights in question come from;
            None: the last attempt's end.
    """
    if tip is not None:  # what came later is of no concern to these weights
        attempts = [
            replace(attempt, stop=tip[1]) if attempt.number == tip[0] else attempt
            for attempt in attempts
            if attempt.number <= tip[0]
        ]
    if not attempts:
        return Course((), (), False, ())
    by_number = {attempt.number: attempt for attempt in attempts}
    last = attempts[-1]
    place: tuple[int, int] | None = (last.number, last.stop)
    stops: dict[int, int] = {}
    is_whole = False
    while place is not None and (attempt := by_number.get(place[0])) is not None:
        stops[attempt.number] = place[1]
        is_whole, place = attempt.begins, attempt.after
    root = by_number[max(stops)].setup
    # What is older than a gap may be in the weights, or not
    since = 0 if is_whole else min(stops)
    kept, discarded, bases = [], [], dict[int, int]()
    for attempt in attempts:
        base = bases[attempt.number] = _base(attempt, by_number, bases)
        stop = stops.get(attempt.number, attempt.first)
        if attempt.number in stops:  # it may have trained nothing, as one from an epoch's end on
            kept.append(AttemptSteps(attempt, range(attempt.first, stop), base, True))
        is_same_run = (attempt.setup.source, attempt.setup.seed) == (root.source, root.seed)
        if attempt.stop > stop and is_same_run and attempt.number >= since:
            base += num_updates(attempt, stop)
            discarded.append(AttemptSteps(attempt, range(stop, attempt.stop), base, False))
    return Course(tuple(kept), tuple(discarded), is_whole, tuple(attempts))


def num_updates(attempt: Attempt, stop: int) -> int:
    """Count the optimizer steps of an attempt up to a step of its segment."""
    return -(-(stop - attempt.first) // attempt.setup.accumulate)


def _base(attempt: Attempt, by_number: Mapping[int, Attempt], bases: Mapping[int, int]) -> int:
    """Count the optimizer steps before an attempt, as far back as is known."""
    if attempt.after is None or (parent := by_number.get(attempt.after[0])) is None:
        return 0
    return bases[parent.number] + num_updates(parent, attempt.after[1])
