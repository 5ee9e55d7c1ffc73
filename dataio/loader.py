"""What users hold: it opens and stages, and hands the epochs to the conductor in `epochs`.

Collective, by every rank together: construction, `epochs` or a loop over the batches where they
begin an epoch, `set_epoch`, `save`, `restore`, `evaluation` and `close`. Nothing else talks to
other ranks, but for the exchange's own messages.
"""

import dis
import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from dataio.arguments import Arguments, find_device
from dataio.base.checked import Count, checked, checked_call
from dataio.base.errors import StateError
from dataio.base.filesystem import check_path
from dataio.base.seeding import digest
from dataio.batch.process_checks import STARTED, end_if_unguarded
from dataio.epochs import Conductor
from dataio.evaluation import Evaluation
from dataio.excluding import Exclude
from dataio.opening import Openable
from dataio.options import NodeCache, Reports, Staging, Workers
from dataio.plan.policies import Importance, Shuffle
from dataio.replaying import replay_batch
from dataio.rowlog.answers import Answers
from dataio.rowlog.attempts import find_course
from dataio.rowlog.reading import read_log
from dataio.rows.fields import Field
from dataio.rows.samples import Batch, BatchTransform, Collate, OnError, Transform
from dataio.source.classes import Classes
from dataio.state.report import check_report
from dataio.state.resume import check_excluded, find_num_hidden, warn_without_scores
from dataio.state.saves import clear
from dataio.state.snapshot import find_state, save_snapshot
from dataio.training import TrainingSession, begin_training
from dataio.world import World, discover_world
from dataio.world.agree import together


@checked
class Loader:
    """Batches of this replica's rows, epoch after epoch; stands where a `DataLoader` stood.

    Collective: every rank makes it with the same arguments. Blocks until the node's part of the
    dataset lies in its cache; a cache that is already there is used.

    Args:
        source: Pattern of shards, such as ``"shards/train-{000000..000127}.tar"``, or a path, a
            list of them, `Shards` with limits of their own, `ArrayFiles`, `Anemoi`, a map-style
            dataset of torch or Hugging Face, a dict of arrays, or a `Source`.
        batch_size: Rows a batch and replica. Every batch has this many; the last may hold padding
            of weight 0.
        drop_last: Leave out the batches that some replica could not fill, instead of padding them;
            which rows that is differs from epoch to epoch.
        fields: What to keep of a sample, by the name it gets in the batch. An `Array` may be cut
            among ranks, see `Tiles`.
        cache: Directory in which this node keeps its rows, or a `NodeCache`; ``"auto"`` is
            TONARI_CACHE, else a node-local directory.
        shuffle: Which node holds which row; by default `Local`.
        importance: Which rows an epoch leaves out, or how often they come; by default each once.
        exclude: Samples that no epoch has, whatever the policy: their ids, a bool for each sample,
            their keys, paths of whole shards, or the path of a CSV or Parquet file with a column
            ``sample_id`` or ``key``, or of packed text ``document``. The others keep their order.
            Another list may be given where a run goes on; see docs/exclude.md.
        transform: ``(sample, rng) -> sample``; what it returns decides the batch, see
            docs/transforms.md; rng depends on (seed, epoch, sample_id) alone. Where it draws from a
            global generator instead, this is seeded for each sample, on the loader's own thread.
        batch_transform: ``(batch, rng) -> batch`` on tensors.
        device: Where batches are delivered.
        seed: Of every random choice.
        world: All ranks; by default discovered from the launcher.
        collate: Makes a batch of a list of samples, for samples of varying shape; ``weight``,
            ``sample_id`` and ``slot`` are added to a dict.
        on_error: ``"skip"`` turns a row that is corrupt or does not decode into padding.
        staging: How rows come into the cache.
        workers: Who decodes and transforms.
        reports: What is written of the loader's work.

    Attributes:
        epoch: The running epoch.
        step: Batches of it delivered so far, since the layout or the batch size last changed.
        lr_factor: What the policy multiplies the learning rate by in this epoch.
        needs_outcome: Whether a policy goes by ``correct`` or ``confidence`` of a report.
        lost_with_ranks: What a lost rank takes with it, so that the others could not go on amid an
            epoch; empty: nothing.

    Raises:
        ValueError: If an argument is out of range, such as a batch larger than a replica's rows.
        DataioError: If the source or the cache cannot be used.
    """

    def __init__(
        self,
        source: Openable,
        *,
        batch_size: Count,
        fields: Mapping[str, Field],
        drop_last: bool = False,
        cache: str | os.PathLike[str] | NodeCache = "auto",
        shuffle: Shuffle | None = None,
        importance: Importance | None = None,
        exclude: Exclude | None = None,
        transform: Transform | None = None,
        batch_transform: BatchTransform | None = None,
        collate: Collate | None = None,
        device: torch.device | str | int | None = None,
        seed: int = 0,
        world: World | None = None,
        on_error: OnError = "raise",
        staging: Staging | None = None,
        workers: Workers | None = None,
        reports: Reports | None = None,
    ) -> None:
        if STARTED in os.environ:
            end_if_unguarded()
        arguments = Arguments(
            source=source, batch_size=batch_size, fields=fields, drop_last=drop_last,
            cache=cache if isinstance(cache, NodeCache) else NodeCache(cache), shuffle=shuffle,
            importance=importance, transform=transform, batch_transform=batch_transform,
            collate=collate, device=device, seed=seed, on_error=on_error,
            staging=staging or Staging(), workers=workers or Workers(),
            reports=reports or Reports(), exclude=exclude,
        )  # fmt: skip
        self.device, self.batch_size, self.seed = find_device(device), batch_size, seed
        self.world = world if world is not None else discover_world()
        self._owns_world = world is None
        session, rowlog = begin_training(arguments, self.world)
        self.needs_outcome = session.pool.needs_outcome
        tiles, self._hides = session.lasting.tiles, session.arguments.importance is not None
        self.lost_with_ranks = "tiles with a policy of importance" if tiles and self._hides else ""
        self.fields = session.fields
        self._epochs = Conductor(session, rowlog=rowlog)
        self._run = self._epochs.run
        self._evaluations: list[Evaluation] = []

    def __repr__(self) -> str:
        figures, world = self.stats(), self.world
        return (
            f"Loader({self.num_samples:,} samples{self.excluded}, batches of {self.batch_size}, "
            f"rank {world.rank} of {world.world_size}; epoch {self.epoch}, step {self.step}; read "
            f"{figures['source_bytes'] / 1e6:,.1f} MB from the source, waited "
            f"{figures['wait_s']:.1f} s)"
        )

    @property
    def _session(self) -> TrainingSession:
        return self._run.session

    @property
    def num_samples(self) -> int:
        return self._session.source.num_samples

    @property
    def excluded(self) -> str:
        """How much ``exclude`` leaves out, such as " (3 samples and 12 documents excluded)"."""
        gone = self._session.exclusion
        beyond = 0 if self.grows else len(gone.beyond())
        counts = {"samples": gone.num_excluded, "documents": beyond}
        words = " and ".join(f"{count:,} {what}" for what, count in counts.items() if count)
        return f" ({words} excluded)" * bool(words)

    @property
    def grows(self) -> bool:
        return self._session.growing is not None

    @property
    def epoch(self) -> int:
        return self._run.epoch

    @property
    def step(self) -> int:
        return self._run.step

    @property
    def lr_factor(self) -> float:
        return self._run.lr_factor

    @checked_call
    def epochs(self, num_epochs: int) -> Iterator[int]:
        """Yield the epochs that remain of a run. Collective at each epoch's end.

        After a restore it goes on: first what is left of the interrupted epoch, if anything. In
        each epoch loop once over the batches.

        Args:
            num_epochs: Length of the whole run.
        """
        if num_epochs < 0:
            raise ValueError(f"num_epochs: {num_epochs}; give a number >= 0")
        yield from self._epochs.up_to(num_epochs)

    def is_used_up(self) -> bool:
        """Whether all the epoch's batches were delivered. Collective before the first."""
        return self._epochs.is_used_up()

    @property
    def progress(self) -> float:
        """How much of the run is done, in [0, 1], the same on every rank.

        What a schedule by steps needs, as epochs get shorter: the epochs behind, and of this one
        the batches delivered, the one in hand included, over all that it has.

        Raises:
            StateError: If nobody said how many epochs the run has.
        """
        return self._epochs.progress(len(self))

    @property
    def steps_before(self) -> float:
        """Steps that the rows trained before this epoch's first would make here, on every rank.

        0 unless the epoch goes on from one that other replicas, or other batches, began.
        """
        position = self._run.position
        return position.ended_rows / position.running.step_rows

    def __len__(self) -> int:
        """Count this epoch's steps, the same on every replica: ``step`` done, the others to come.

        Where an epoch goes on with other ranks or batches, it is what was left of it: `step` begins
        at 0. Before the first loop it is the most that this may be, as of all rows. At an epoch's
        end it is still that epoch's: the next begins with the loop over it.
        """
        if self._run.is_running:
            return self._run.running.plan.order.steps
        return self._session.most_steps(self._run.position.ended_rows) or self.max_steps(1)

    @checked_call
    def max_steps(self, epochs: int) -> int:
        """Count the steps of some epochs with every row visible: the bound of a schedule.

        A policy that draws has its rows shared out evenly; see `importance.Weighted` for more.
        Rows that are left out for good are not counted, but where rows move between nodes: how many
        a node has then differs from epoch to epoch, and the bound is that of a node with none.
        """
        return epochs * self._session.most_steps()

    @checked_call
    def set_epoch(self, epoch: int) -> None:
        """Go to an epoch, as `DistributedSampler` would. Collective; cheap for the next epoch.

        The loop that follows is of that epoch, even if it is the running one and at its end. Any
        other epoch than the next rebuilds that epoch's placement, from the other nodes' caches,
        and forgets the scores.

        Raises:
            ValueError: If it is negative.
        """
        if epoch < 0:
            raise ValueError(f"epoch: {epoch}; give a number >= 0")
        self._epochs.go_to(epoch)

    def __iter__(self) -> Iterator[Batch]:
        """Yield the rest of the epoch's batches; if there are none, those of the next epoch.

        So one loop after the other is one epoch after the other, the same as by `epochs`, and one
        that was broken off goes on, after a restore too. Refresh hidden rows, and save, behind a
        loop. After `set_epoch` it is that epoch. Collective where it begins an epoch.

        Raises:
            StateError: If it is the second whole loop in one epoch of `epochs`; or from ``next``,
                if another loop has begun since: all loops over a loader share its place.
            TypeError: If the loop takes each batch apart, as ``for image, label in loader`` does.
        """
        # Python's own words would be "too many values to unpack", of the dict's names.
        loop = sys._getframe(1)
        calls = [
            each.opname for each in dis.get_instructions(loop.f_code) if each.offset >= loop.f_lasti
        ]
        if calls[:3:2] == ["GET_ITER", "UNPACK_SEQUENCE"]:
            self._check_collated()
        return self._epochs.batches()

    def _check_collated(self) -> None:
        if self._session.arguments.collate is None:
            names = [*self.fields]
            raise TypeError(
                "Loader: this loop takes each batch apart, but a batch is a dict; write `for batch "
                f"in loader` and batch[{names[0]!r}], or `for {', '.join(names)} in "
                f"dataio.Tuples(loader, {str(names)[1:-1]})`, where drop_last=True leaves no "
                "padding"
            )

    @checked_call
    def skip(self, num_batches: int) -> None:
        """Pass over the next batches of the epoch: no rank trains them, and none is read.

        Outside of a loop over the batches, by every rank alike; the loop that follows goes on
        behind them. Their rows do not come again in this epoch, whatever it goes on from, keep
        their scores, and are "skipped" in the log of rows. Collective where it begins an epoch.

        Args:
            num_batches: On each replica.

        Raises:
            ValueError: If the epoch has not as many left.
        """
        self._epochs.skip(num_batches)

    def refresh(self) -> Iterator[Batch]:
        """Yield hidden rows that are due for a new score, to be passed forward and reported.

        Often none; as many batches on every replica. Padding has weight 0, rows weight 1.
        """
        return self._epochs.refresh()

    def look_ahead(self, take: Callable[[Batch], None]) -> None:
        """Call ``take`` with each batch before the one in front of it is delivered.

        Position and figures count what was delivered: the next loop takes again what was not.
        """
        self._session.feed.take = take

    def report(
        self,
        batch: Batch,
        loss: torch.Tensor,
        correct: torch.Tensor | None = None,
        confidence: torch.Tensor | None = None,
    ) -> None:
        """Report what a batch's rows cost; padding is ignored. Without importance, does nothing.

        Before the epoch ends: later it goes only to those of its rows that still lie on this node
        and were not reported since; what of the others is lost, ``stats`` count.

        Args:
            batch: As delivered.
            loss: float[batch]: One loss a row.
            correct: bool[batch]: Whether the row was predicted right.
            confidence: float[batch]: In [0, 1].

        Raises:
            ValueError: If a tensor does not have one value a row, or the batch is not as delivered.
        """
        check_report(batch, {"loss": loss, "correct": correct, "confidence": confidence})
        if self._session.pool.keeps_scores:
            self._session.feedback.add(
                batch["slot"], batch["sample_id"], loss, correct, confidence, epoch=self.epoch,
                step=self.step,
            )  # fmt: skip

    @checked_call
    def evaluation(
        self,
        source: Openable,
        *,
        fields: Mapping[str, Field] | None = None,
        transform: Transform | None = None,
        batch_transform: BatchTransform | None = None,
        collate: Collate | None = None,
        classes: Classes = "same",
    ) -> Evaluation:
        """Open another dataset, every sample exactly once. Collective; closed with the loader.

        Args:
            source: The dataset.
            fields: Its fields; None: the loader's own, if they draw no crop, flip or patch.
            transform: Its own: that of training is not used.
            batch_transform: Its own too.
            collate: Its own too.
            classes: Where both have names for the numbers of classes, as image folders and the
                ``ClassLabel`` of Hugging Face have: ``"same"`` refuses other names, or another
                order. ``"training"`` numbers a folder that lacks some as training does. ``"own"``
                leaves it its own numbers.

        Raises:
            SourceError: If it has other classes.
        """
        evaluation = self._session.open_evaluation(
            source, fields, classes=classes, transform=transform, batch_transform=batch_transform,
            collate=collate,
        )  # fmt: skip
        self._evaluations.append(evaluation)
        return evaluation

    def state_dict(self) -> dict[str, object]:
        """Describe where the loader stands: a few integers and hashes, JSON, under 1 KB."""
        run = self._run
        return self._session.identity.to_state(
            run.position, num_hidden=run.num_hidden, rows=run.log_place
        )

    @checked_call
    def load_state_dict(self, state: dict[str, object]) -> None:
        """Go on from where `state_dict` was taken. Scores start anew: only `restore` has them.

        Ranks, nodes, threads and batch size may be others than then: the rest of the epoch is dealt
        anew, each of its samples once.

        Raises:
            StateError: If the state is damaged; or of another dataset, seed or shuffle; or from the
                middle of an epoch with hidden rows, and the layout or batch size is another. When
                the epoch begins: if it hid another number of rows than a policy without scores now
                does.
        """
        position = self._run.find_position(state)
        num_hidden = find_num_hidden(
            state, position, hides=self._session.arguments.importance is not None
        )
        check_excluded(position, self._session.exclusion.name)
        if self._session.pool.keeps_scores:
            warn_without_scores(position, num_hidden, rank=self.world.rank)
        self._run.choose(position, num_hidden=num_hidden, state=state)

    def remember(self) -> Any:
        """Remember from now on, as a policy hides rows, what `go_on` needs; for `dataio.live`.

        Returns:
            What outlives the loader, and changes as it goes on. None: without a policy.
        """
        if self._hides:
            self._run.remembered = []
        return self._run.remembered

    def count(self, state: dict[str, object]) -> None:
        """Take notice that a step counts, behind which `state_dict` gave this."""
        self._run.count(state)

    def go_on(self, state: dict[str, object], remembered: Sequence[Any]) -> None:
        """Go on where other ranks stood, some of which are lost. Collective.

        Args:
            state: What `state_dict` gave there.
            remembered: What `remember` gave on this rank, of the loaders before; None of some.

        Raises:
            StateError: As `load_state_dict`; and if no rank knows which rows the epoch hides.
        """
        if not self._hides:
            self.load_state_dict(state)
        elif "hidden" not in state:  # no epoch has begun
            self._run.choose(self._run.find_position(state), state=state)
        else:
            self._run.go_on(state, [each for one in remembered for each in one or ()])
            self._run.ensure_running()

    @checked_call
    def save(self, path: str | os.PathLike[str]) -> None:
        """Write position, scores and hidden rows into a directory that all nodes see. Collective.

        Args:
            path: A directory of its own: new, empty, or an earlier save, which is replaced when the
                new one is whole.

        Raises:
            StateError: On all ranks, and nothing is changed, if anything else lies there; or if it
                cannot be written.
        """
        check_path(path, "Loader.save: path")
        self.flush()
        session, tiles = self._session, self._session.lasting.tiles

        def write() -> None:
            if tiles is not None and tiles.whole is not tiles.part and tiles.index:
                return
            node, figures = self._run.snapshot(), session.lasting.line.so_far()
            save_snapshot(Path(path), self.state_dict(), node, session.world, figures=figures)

        # All tiles have the same rows and scores: one is written, for any tiles or none
        write() if tiles is None else together(tiles.whole, write, doing="save one tile's rows")

    def flush(self) -> None:
        """Bring cache, scores and the log of rows to where it stands: `save` begins so. Collective.

        For a loader that goes on from what another one of the same rows has saved.
        """
        self._run.ensure_running()
        # A checkpoint is never ahead of the caches: they cannot step forward.
        self._session.pool.cache.await_commit()
        self._session.feedback.flush()
        if self._run.rowlog is not None:
            self._run.rowlog.flush()

    @checked_call
    def restore(self, path: str | os.PathLike[str]) -> None:
        """Go on exactly where `save` was called. Collective.

        Ranks, nodes, threads, batch size and what to exclude may be others than then: the rest of
        the epoch is dealt anew, each of its samples once; scores and hidden rows follow their
        samples.

        Raises:
            StateError: On all ranks, if nothing was saved there, if it is damaged, or by a loader
                made otherwise.
        """
        check_path(path, "Loader.restore: path")
        saved = find_state(Path(path), self.world)
        self._run.restore(saved, self._run.find_position(saved.state))
        self._run.ensure_running()
        if self.world.rank == 0:
            clear(saved.path.parent)

    def replay(self, epoch: int, step: int, *, replica: int | None = None) -> Batch:
        """Make a batch that was trained again, on the host: its bytes, crops and transforms.

        It is read from the source, by this rank alone; the loader stays where it is. For one that
        was trained before a restore too, on other ranks or in other batches. See `tonari.rows`,
        which does so without a loader.

        Args:
            epoch: Whose.
            step: Batch of the epoch, from 0 on, those before a restore included.
            replica: Whose batch; None: this rank's.

        Raises:
            StateError: If the loader has no log of rows, ``Reports(rows=...)``.
            ValueError: If the step was never reached.
        """
        arguments = self._session.arguments
        if arguments.reports.rows is None:
            raise StateError(
                "Loader.replay: the loader has no log of rows, expected one, as only that has on "
                "which ranks a step was trained; give reports=Reports(rows=DIRECTORY)"
            )
        logged = read_log(Path(arguments.reports.rows))
        answers = Answers(find_course(logged.attempts), logged, arguments.shuffle_or_local)
        rows = answers.batch(
            *answers.course.find(epoch, step),
            replica=self._session.world.replica if replica is None else replica,
        )
        return replay_batch(rows, arguments)

    def order_hash(self) -> str:
        """Hash the sample ids that this replica is given in this epoch, in order: 16 hex digits."""
        self._run.ensure_running()
        order = self._run.running.plan.order
        slots = order.slots_at(np.arange(order.num_rows))
        return digest(self._session.pool.sample_ids[slots].tobytes())

    def stats(self) -> dict[str, float]:
        """Figures of this rank since construction; of importance, of this epoch.

        Returns:
            What `dataio.stats` lists, by name.
        """
        return self._epochs.stats()

    def close(self) -> None:
        """Stop threads, complete messages under way, release the cache. Collective; idempotent."""
        try:
            self._run.abandon()
        finally:
            # Whoever catches what a partner's end raises may go on: the cache must not stay locked.
            self._release()

    def _release(self) -> None:
        for evaluation in self._evaluations:
            evaluation.close()
        self._session.close()
        if self._run.rowlog is not None:
            self._run.rowlog.close()
        if self._owns_world:
            self.world.close()

    def __enter__(self) -> "Loader":
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        # After an error the other ranks may never come: only let go.
        if kind is None:
            self.close()
        else:
            self._release()
