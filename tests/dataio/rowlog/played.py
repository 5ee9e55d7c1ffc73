"""Random histories of a run, played for real: what was trained, and what its log answers."""

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from dataio import Loader, NodeCache, Reports, Staging
from dataio.rowlog.answers import Answers
from dataio.rowlog.attempts import AttemptSteps, find_course
from dataio.rowlog.reading import read_log
from dataio.rowlog.trained import TrainedRows
from dataio.rows.samples import Batch
from dataio.world import World, run_threads, thread_worlds
from importance import Weighted
from tests.dataio.exclude_run import NUM_SAMPLES, POLICIES, make, some
from tests.importance.hidden import SHUFFLES, losses
from tests.memory_source import MemorySource, payload

LAYOUTS = [(1,), (2,), (1, 1), (2, 1), (1, 1, 1), (2, 2)]
ALL_POLICIES = {**POLICIES, "drawn": Weighted(np.arange(NUM_SAMPLES) % 3, num_samples=90)}
EPOCHS = 3


class Wide(MemorySource):
    """Samples of which not all fit under `QUOTA`."""

    @staticmethod
    def payload(sample_id: int) -> bytes:
        return payload(sample_id) * 300


QUOTA = 380_000

Row = tuple[int, int, int, int, int, int, float]
"""Epoch, step of the epoch, replica, place in the batch, slot, sample, weight."""


@dataclass(frozen=True)
class PlayedLeg:
    """One start of a run, on these ranks.

    Attributes:
        layout: Replicas on each node.
        batch_size: Rows a batch.
        exclude: Samples that are left out.
        steps: Batches until it saves.
        unsaved: Batches that it trains beyond, and throws away.
        skip: Batches that it passes over after the first that it trains, as far as there are.
    """

    layout: tuple[int, ...]
    batch_size: int
    exclude: tuple[int, ...]
    steps: int
    unsaved: int
    skip: int = 0


@dataclass(frozen=True)
class History:
    """A run: what its loaders are made with, and its legs."""

    shuffle: str
    policy: str
    drop_last: bool
    overlap: bool
    quota: bool
    legs: tuple[PlayedLeg, ...]


def draw(seed: int) -> History:
    """Draw a history."""
    rng, skips = np.random.default_rng(seed), np.random.default_rng([seed, 1])
    policy = str(rng.choice(list(ALL_POLICIES)))
    first = LAYOUTS[rng.integers(len(LAYOUTS))], int(rng.integers(3, 7))
    excluded: tuple[int, ...] = ()
    legs = []
    for _ in range(rng.integers(1, 5)):
        if rng.random() < 0.4:
            excluded = tuple(some(float(rng.choice([0.0, 0.05, 0.3])), seed=int(rng.integers(99))))
        if rng.random() < 0.5:
            first = LAYOUTS[rng.integers(len(LAYOUTS))], int(rng.integers(3, 7))
        steps, unsaved = int(rng.integers(1, 25)), int(rng.choice([0, 0, 1, 5, 14]))
        skip = int(skips.choice([0, 0, 1, 4, 99]))
        legs.append(PlayedLeg(*first, excluded, steps, unsaved, skip))
    whole = policy != "keep_agreed"  # which goes by a field, so all rows are in the caches
    overlap = bool(whole and rng.random() < 0.3)
    return History(
        str(rng.choice(list(SHUFFLES))), policy, bool(rng.random() < 0.3), overlap,
        bool(whole and not overlap and rng.random() < 0.2), tuple(legs),
    )  # fmt: skip


def play(root: Path, history: History) -> tuple[Counter[Row], Counter[Row]]:
    """Play a history; return the rows of batches that are in the weights, and of those thrown away.

    The last leg is followed to the run's end.
    """
    kept: list[Row] = []
    discarded: list[Row] = []
    for number, leg in enumerate(history.legs):
        is_last = number + 1 == len(history.legs)

        def on_rank(world: World, leg=leg, number=number, is_last=is_last) -> Any:
            options: dict[str, Any] = {
                "shuffle": SHUFFLES[history.shuffle](), "importance": ALL_POLICIES[history.policy],
                "drop_last": history.drop_last, "batch_size": leg.batch_size,
                "exclude": list(leg.exclude) or None,
                "staging": Staging(when="overlap" if history.overlap else "before"),
                "reports": Reports(progress=False, rows=root / "rows"),
                "cache": NodeCache(root / "cache", quota=QUOTA if history.quota else None),
            }  # fmt: skip
            source = Wide(NUM_SAMPLES) if history.quota else None
            with make(world, root, source=source, **options) as loader:
                if number:
                    loader.restore(root / f"saved{number - 1}")
                before = _train(loader, None if is_last else leg.steps, skip=leg.skip)
                if is_last:
                    return before, []
                loader.save(root / f"saved{number}")
                return before, _train(loader, leg.unsaved)

        for saved, unsaved in run_threads(thread_worlds(list(leg.layout), timeout_s=60), on_rank):
            kept += saved
            discarded += unsaved
    return Counter(kept), Counter(discarded)


def _train(loader: Loader, steps: int | None, *, skip: int = 0) -> list[Row]:
    rows: list[Row] = []
    if steps == 0:
        return rows
    for epoch in loader.epochs(EPOCHS):
        for batch in _but_for(loader, skip if not rows else 0):
            loader.report(batch, *losses(batch["sample_id"], epoch))
            step = loader._run.position.num_steps - 1
            slots, ids = batch["slot"].tolist(), batch["sample_id"].tolist()
            weights = batch["weight"].tolist()
            rows += [
                (epoch, step, loader.world.replica, place, slot, ids[place], weights[place])
                for place, slot in enumerate(slots)
                if slot >= 0
            ]
            if steps is not None:
                steps -= 1
                if not steps:
                    return rows
        for batch in loader.refresh():
            loader.report(batch, *losses(batch["sample_id"], epoch))
    return rows


def _but_for(loader: Loader, skip: int) -> Iterator[Batch]:
    """Yield an epoch's batches, but for some behind the first."""
    for batch in loader:
        yield batch
        if skip:
            break
    else:
        return
    loader.skip(min(skip, len(loader) - loader.step))
    yield from loader


def answers(root: Path, history: History) -> Answers:
    """Read the log."""
    logged = read_log(root / "rows")
    return Answers(find_course(logged.attempts), logged, SHUFFLES[history.shuffle]())


def forward(found: Answers) -> tuple[Counter[Row], Counter[Row]]:
    """Ask for all steps: those kept, and those thrown away."""
    kept, discarded = Counter[Row](), Counter[Row]()
    for pieces, total in ((found.course.kept, kept), (found.course.discarded, discarded)):
        for piece in pieces:
            total.update(_trained(piece, found.at(piece, piece.steps)))
    return kept, discarded


def inverse(found: Answers, sample_id: np.ndarray) -> tuple[Counter[Row], Counter[Row]]:
    """Ask for all that became of samples."""
    kept, discarded = Counter[Row](), Counter[Row]()
    for pieces, total in ((found.course.kept, kept), (found.course.discarded, discarded)):
        for piece in pieces:
            total.update(_trained(piece, found.of(piece, sample_id).rows))
    return kept, discarded


def _trained(piece: AttemptSteps, rows: TrainedRows) -> list[Row]:
    """List the rows that were not skipped."""
    since = rows.step - piece.epoch_steps.start + piece.steps.start
    is_trained = ~piece.attempt.skips(since)
    return as_rows(piece.attempt.epoch, TrainedRows._make(c[is_trained] for c in rows))


def as_rows(epoch: int, rows: TrainedRows) -> list[Row]:
    """List rows as `play` does."""
    columns = (rows.step, rows.replica, rows.position, rows.slot, rows.sample_id, rows.weight)
    return [(epoch, *row) for row in zip(*(c.tolist() for c in columns), strict=True)]
