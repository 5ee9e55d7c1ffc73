"""A run, asked for its rows: `open(run).at(...)` and `.of(...)`, as Arrow tables."""

import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from dataio import Field, Source
from dataio.arguments import Arguments
from dataio.options import Staging
from dataio.plan.policies import Shuffle
from dataio.replaying import replay_batch
from dataio.rowlog.answers import Answers, State
from dataio.rowlog.attempts import AttemptSteps, Setup
from dataio.rowlog.reading import find_log
from dataio.rowlog.trained import TrainedRows
from dataio.rows.samples import Batch, BatchTransform, Collate, Transform
from dataio.source.base import ShardedSource
from dataio.source.names import find_name, read_names
from dataio.source.wrap.packed import SequenceSource
from dataio.source.wrap.transformed import StageTransform
from tonari.hardest.samples import find_places
from tonari.rows.dataset import Given, check_ids, find_key, find_shard, open_dataset
from tonari.rows.find import find_run_course, find_shuffle
from tonari.rows.losses import with_losses
from tonari.rows.table import LISTED, STATES, Columns, make_table, missed_rows, trained_rows

Steps = int | np.integer[Any] | range | tuple[int, int] | slice
"""A step, or those from the first up to and without the second."""


def open(
    run: str | os.PathLike[str],
    *,
    source: Source | str | Sequence[str] | None = None,
    shuffle: Shuffle | None = None,
    log: str | os.PathLike[str] | None = None,
) -> "RunRows":
    """Open a run to ask which rows it trained when; reads its log, and nothing of the dataset.

    Args:
        run: A run's directory, or what `Reports` had as ``rows``: up to its last step. Or a
            checkpoint, or what `Loader.save` wrote: up to there.
        source: The dataset, for keys and shards; None: the one that the log names, once it is
            asked for.
        shuffle: The run's policy, where it is none of `shuffle`'s.
        log: The log's directory, where it does not lie beside ``run``.

    Raises:
        StateError: If there is no log, or it is damaged.
        ValueError: If the policy is not the run's.
    """
    logged = find_log(run, log=log)
    course = find_run_course(run, logged)
    answers = Answers(course, logged, find_shuffle(course, shuffle))
    return RunRows(str(run), answers, source)


@dataclass
class RunRows:
    """What a run trained.

    Attributes:
        name: Of the run, for messages.
        answers: Computes what was trained.
        given: The dataset as it was given, or what opens it.
    """

    name: str
    answers: Answers
    given: Given = None
    _source: Source | None = None

    @property
    def is_whole(self) -> bool:
        """Whether all that the weights have seen is known; False: the log began in mid-run."""
        return self.answers.course.is_whole

    @property
    def setup(self) -> Setup:
        """What the run's loader was made with."""
        return self.answers.course.kept[-1].attempt.setup

    @property
    def num_steps(self) -> int:
        """Optimizer steps that are in the weights."""
        return self.answers.course.kept[-1].run_steps.stop - 1

    @property
    def num_epochs(self) -> int:
        """Epochs that were begun, the last one included."""
        return max(piece.attempt.epoch for piece in self.answers.course.kept) + 1

    @property
    def num_samples(self) -> int:
        """Samples of the dataset, as the run last had it."""
        attempt = self.answers.course.kept[-1].attempt
        return attempt.position.running.layout(attempt.setup.num_samples).num_samples

    def source(self) -> Source:
        """Open the dataset.

        Raises:
            ValueError: If it is not at hand, or not the one that was trained on.
            DataioError: If it cannot be read.
        """
        if self._source is None:
            self._source = open_dataset(self.name, self.setup, self.given)
        return self._source

    def at(
        self,
        *,
        epoch: int | None = None,
        steps: Steps | None = None,
        step: int | None = None,
        discarded: bool = False,
    ) -> pa.Table:
        """List the rows of some steps, of all replicas.

        Args:
            epoch: Whose steps.
            steps: Batches of the epoch, from 0 on; None: all.
            step: An optimizer step of the run instead, from 1 on, as metrics.jsonl has it.
            discarded: Those that were thrown away too, when the run went on from an earlier save.

        Returns:
            Columns of `table.SCHEMA`, a row for each row trained or skipped, step by step.

        Raises:
            ValueError: If neither or both are given, or a step was never reached.
        """
        if (epoch is None) == (step is None):
            raise ValueError("rows: give epoch=, perhaps with steps=, or step=, and not both")
        course = self.answers.course
        pieces = [*course.kept, *(course.discarded if discarded else ())]
        asked: list[tuple[AttemptSteps, range]] = []
        for piece in pieces:
            known = piece.epoch_steps
            wanted = known
            if step is not None:
                if step not in piece.run_steps:
                    continue
                wanted = piece.steps_of(step)
            elif piece.attempt.epoch != epoch:
                continue
            elif steps is not None:
                chosen = _as_range(steps, known.stop)
                wanted = range(max(known.start, chosen.start), min(known.stop, chosen.stop))
            if len(wanted):
                asked.append((piece, wanted))
        if not asked:
            raise self._never(epoch, steps, step)
        return make_table([trained_rows(piece, self._rows(piece, steps)) for piece, steps in asked])

    def of(
        self,
        *,
        sample_id: int | np.integer[Any] | Iterable[int] | None = None,
        key: str | None = None,
        shard: str | None = None,
        epoch: int | None = None,
    ) -> pa.Table:
        """List what became of samples, epoch by epoch: where they were trained, or why not.

        Args:
            sample_id: Its number in the dataset, or several.
            key: Its name in the dataset, whose names are all read for it.
            shard: Path of a file of the dataset: all samples in it.
            epoch: In which; None: in all of them.

        Returns:
            Columns of `table.SCHEMA`: a row for each time that a sample was trained, kept or not;
            and one for each epoch of the run that did not train it.

        Raises:
            ValueError: If there is no such sample, key, shard or epoch.
        """
        if sum(given is not None for given in (sample_id, key, shard)) != 1:
            raise ValueError("rows: give one of sample_id=, key= and shard=")
        if sample_id is not None:
            given = [int(sample_id)] if isinstance(sample_id, int | np.integer) else sample_id
            ids = check_ids(self.name, given, self.num_samples)
        elif key is not None:
            ids = np.array([find_key(self.name, self.source(), key)])
        else:
            ids = find_shard(self.name, self.source(), str(shard))
        course, epochs = self.answers.course, dict[int, list[AttemptSteps]]()
        for piece in course.kept:
            if epoch in (None, piece.attempt.epoch):
                epochs.setdefault(piece.attempt.epoch, []).append(piece)
        if not epochs:
            raise self._never(epoch, None, None)
        parts = [part for pieces in epochs.values() for part in self._of_epoch(pieces, ids)]
        for piece in course.discarded:
            if epoch in (None, piece.attempt.epoch):
                parts.append(trained_rows(piece, self.answers.of(piece, ids).rows))
        return make_table(parts)

    def replay(
        self,
        *,
        epoch: int | None = None,
        step: int,
        replica: int = 0,
        fields: Mapping[str, Field],
        transform: Transform | None = None,
        batch_transform: BatchTransform | None = None,
        collate: Collate | None = None,
        stage_transform: StageTransform | None = None,
    ) -> Batch:
        """Make a replica's batch again in this process, from the dataset; see `Loader.replay`.

        Args:
            epoch: Of which ``step`` is a batch, from 0 on; None: it is an optimizer step of the
                run, from 1 on, whose first batch it is.
            step: Which.
            replica: Whose.
            fields: As the loader was given them, and so on.
            transform: Likewise.
            batch_transform: Likewise.
            collate: Likewise.
            stage_transform: That of `Staging`.

        Raises:
            ValueError: If the step was never reached, or the dataset is not at hand.
            DataioError: If it cannot be read.
        """
        course = self.answers.course
        if epoch is not None:
            piece, number = course.find(epoch, step)
        else:
            found = [piece for piece in course.kept if step in piece.run_steps]
            if not found:
                raise self._never(None, None, step)
            piece, number = found[-1], found[-1].steps_of(step).start
        rows = self.answers.batch(piece, number, replica=replica)
        arguments = Arguments(
            source=self.source(), batch_size=len(rows.sample_id), fields=fields,
            seed=piece.attempt.setup.seed, transform=transform, batch_transform=batch_transform,
            collate=collate, staging=Staging(transform=stage_transform),
        )  # fmt: skip
        return replay_batch(rows, arguments)

    def named(self, table: pa.Table) -> pa.Table:
        """Add the columns ``shard``, a path, and ``key``, null where the dataset has none.

        Of packed text also ``documents``: the numbers of those that a sequence holds.

        Raises:
            ValueError: If the dataset is not at hand.
            DataioError: If it cannot be read.
        """
        source, ids = self.source(), table.column("sample_id").to_numpy()
        each, which = np.unique(ids, return_inverse=True)
        places: list[str | None] = [None] * len(each)
        if isinstance(source, ShardedSource):
            places = [path for path, _ in find_places(source, each)]
        field = find_name(source)
        keys = [None] * len(each) if field is None else [*read_names(source, field, each)]
        for name, values in (("shard", places), ("key", keys)):
            column = pa.array(values, pa.string()).take(pa.array(which))
            table = table.append_column(name, column)
        if isinstance(source, SequenceSource):
            documents = pa.array(source.documents(each), pa.list_(pa.int64()))
            table = table.append_column("documents", documents.take(pa.array(which)))
        return table

    def losses(self, table: pa.Table) -> pa.Table:
        """Add the column ``loss``, of the run's newest save; see the score column ``history``.

        It is null of steps behind that save, of steps that were thrown away, and of epochs too long
        ago; without the column the table stays as it is.

        Raises:
            StateError: If the save is damaged.
        """
        return with_losses(table, Path(self.name), self.answers.course)

    def _of_epoch(self, pieces: Sequence[AttemptSteps], ids: NDArray[np.int64]) -> list[Columns]:
        """List what became of samples in an epoch that the weights have seen."""
        parts: list[Columns] = []
        states: list[State | None] = [None] * len(ids)
        for piece in pieces:
            fates = self.answers.of(piece, ids)
            parts.append(trained_rows(piece, fates.rows))
            for number, state in enumerate(fates.states):
                if state is not None and states[number] not in LISTED:
                    states[number] = state
        missed = [n for n, state in enumerate(states) if state not in (None, *LISTED)]
        if missed:
            what = [STATES.index(state) for n in missed if (state := states[n]) is not None]
            parts.append(missed_rows(pieces[-1], np.array(what), ids[missed]))
        return parts

    def _rows(self, piece: AttemptSteps, epoch_steps: range) -> TrainedRows:
        back = piece.epoch_steps.start - piece.steps.start
        return self.answers.at(piece, range(epoch_steps.start - back, epoch_steps.stop - back))

    def _never(self, epoch: int | None, steps: Steps | None, step: int | None) -> ValueError:
        if step is not None:
            whole = "" if self.is_whole else " since its log began"
            return ValueError(
                f"{self.name}: optimizer step {step} was never reached, expected one in [1, "
                f"{self.num_steps}], as many as the run has{whole}; give one of these"
            )
        course = self.answers.course
        count = max(
            (p.epoch_steps.stop for p in course.kept if p.attempt.epoch == epoch), default=0
        )
        if count:
            asked = str(steps)
            if isinstance(steps, range | slice):
                asked = f"{steps.start}:{'' if steps.stop is None else steps.stop}"
            return ValueError(
                f"{self.name}: steps {asked} of epoch {epoch} were never reached, expected some in "
                f"[0, {count}); give such ones"
            )
        known = [piece.attempt.epoch for piece in course.kept]
        return ValueError(
            f"{self.name}: epoch {epoch} was never begun, expected one in [{min(known)}, "
            f"{max(known)}]; give one of these"
        )


def _as_range(steps: Steps, end: int) -> range:
    if isinstance(steps, int | np.integer):
        return range(int(steps), int(steps) + 1)
    if isinstance(steps, tuple):
        return range(*steps)
    if isinstance(steps, slice):
        return range(*steps.indices(end))
    if not isinstance(steps, range):
        raise TypeError(
            f"rows: steps is {steps!r}, expected a number, a range, a slice or two numbers; give "
            "one of these"
        )
    return steps
