"""The conductor, which knows the order of the stages; how an epoch begins is in `run_state`.

    staging -> each epoch: selection -> order -> gather -> batches -> reports -> exchange -> commit

Collective, by every rank together: construction, `epochs` or a loop over the batches where they
begin an epoch, `set_epoch`, `save`, `restore`, `evaluation` and `close`. Nothing else talks to
other ranks, but for the exchange's own messages.
"""

import os
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Literal

import numpy as np
import torch
from torch.profiler import record_function

from dataio.arguments import Arguments, find_device
from dataio.base.checked import checked, checked_call
from dataio.base.digest import digest
from dataio.base.errors import StateError
from dataio.batch.values import Batch, BatchTransform, Collate, OnError, Transform
from dataio.batch.verify import Verify
from dataio.evaluation import Evaluation
from dataio.iterations import Iterations
from dataio.parts import build_parts
from dataio.plan.epoch import EpochPlan
from dataio.plan.order import num_steps
from dataio.plan.policies import Importance, Shuffle
from dataio.plan.segment import Position
from dataio.pool.epoch_end import end_epoch
from dataio.rows.fields import Field
from dataio.run_state import RunState
from dataio.source import Retry, Source, Throttle
from dataio.source.transformed import StageTransform
from dataio.state.report import check_report
from dataio.state.resume import find_num_hidden, warn_without_scores
from dataio.state.saves import clear
from dataio.state.scores import spread_scores
from dataio.state.snapshot import find_state, save_snapshot
from dataio.stats import collect_stats
from dataio.world import World, discover_world


@checked
class Loader:
    """Batches of this replica's rows, epoch after epoch; stands where a `DataLoader` stood.

    Collective: every rank makes it with the same arguments. Blocks until the node's part of the
    dataset lies in its cache; a cache that is already there is used.

    Args:
        source: Pattern of shards, such as ``"shards/train-{000000..000127}.tar"``, or a path, a
            list of them, or a `Source`; a torch dataset as a `DatasetSource`.
        batch_size: Rows a batch and replica. Every batch has this many; the last may hold padding
            of weight 0.
        drop_last: Leave out the batches that some replica could not fill, instead of padding them;
            which rows that is differs from epoch to epoch.
        fields: What to keep of a sample, by the name it gets in the batch.
        cache: Cache directory of this node; ``"auto"`` is TONARI_CACHE, else a node-local
            directory.
        shuffle: Which node holds which row; by default `Local`.
        importance: Which rows an epoch leaves out; by default none.
        transform: ``(sample, rng) -> sample`` on arrays; rng depends on (seed, epoch, sample_id)
            alone. Where it draws from torch's, NumPy's or Python's global generator instead, these
            are seeded alike for each sample, and it is called on the loader's own thread.
        batch_transform: ``(batch, rng) -> batch`` on tensors.
        device: Where batches are delivered.
        seed: Of every random choice.
        world: All ranks; by default discovered from the launcher.
        num_threads: Threads that decode and transform; by default the rank's part of the cores. 0:
            none.
        num_processes: Processes that decode and transform instead, for transforms that hold the
            interpreter, or draw from global generators.
        prefetch: Batches made ahead.
        staging_readers: Shards that each rank reads at once while staging.
        staging_bandwidth: Bytes/s that this node may read from the source while staging; 0: as
            fast as it can.
        stage_transform: ``sample -> sample`` on decoded arrays, applied once, as rows are staged;
            what it returns is stored in place of ``fields``. See `TransformedSource`.
        stage: ``"before"``: training begins when the pool is staged. ``"overlap"``: it begins with
            the first of 16 groups of rows; epoch 0 is then shuffled group by group, whether or not
            the cache was warm, so that its order stays a function of the seed.
        quota: Bytes that this node's cache of the dataset may take, such as ``"200GB"``; not that
            of an evaluation. Rows that do not fit are read from the source in every epoch, ahead of
            their batches, which are the same ones. None: as much as the rows need.
        metrics: File to which rank 0 adds a line of JSON at the end of each epoch: of all its
            steps, also after `restore`; else from its ``first_step`` on.
        collate: Makes a batch of a list of samples, for samples of varying shape; ``weight``,
            ``sample_id`` and ``slot`` are added to a dict.
        verify: When a row's checksum is checked: ``"once"``, ``"always"`` or ``"never"``.
        on_error: ``"skip"`` turns a row that is corrupt or does not decode into padding.
        retry: How long a request to the source may last, and be repeated.
        throttle: Limits reads from the source.
        progress: Whether rank 0 shows staging on a terminal.

    Attributes:
        epoch: The running epoch.
        step: Batches of it delivered so far, since the layout or the batch size last changed.
        lr_factor: What the policy multiplies the learning rate by in this epoch.

    Raises:
        ValueError: If an argument is out of range, such as a batch larger than a replica's rows.
        DataioError: If the source or the cache cannot be used.
    """

    def __init__(
        self,
        source: str | os.PathLike[str] | Sequence[str | os.PathLike[str]] | Source,
        *,
        batch_size: int,
        fields: Mapping[str, Field],
        drop_last: bool = False,
        cache: str | os.PathLike[str] = "auto",
        shuffle: Shuffle | None = None,
        importance: Importance | None = None,
        transform: Transform | None = None,
        batch_transform: BatchTransform | None = None,
        device: torch.device | str | int | None = None,
        seed: int = 0,
        world: World | None = None,
        num_threads: int | None = None,
        num_processes: int = 0,
        prefetch: int = 2,
        stage: Literal["before", "overlap"] = "before",
        stage_transform: StageTransform | None = None,
        staging_readers: int = 2,
        staging_bandwidth: float = 0.0,
        collate: Collate | None = None,
        verify: Verify = "once",
        on_error: OnError = "raise",
        retry: Retry | None = None,
        throttle: Throttle | None = None,
        quota: str | int | None = None,
        metrics: str | os.PathLike[str] | None = None,
        progress: bool = True,
    ) -> None:
        arguments = Arguments(
            source=source, batch_size=batch_size, fields=fields, drop_last=drop_last, cache=cache,
            shuffle=shuffle, importance=importance, transform=transform,
            batch_transform=batch_transform, device=device, seed=seed, num_threads=num_threads,
            num_processes=num_processes, prefetch=prefetch, stage=stage,
            stage_transform=stage_transform, staging_readers=staging_readers,
            staging_bandwidth=staging_bandwidth, collate=collate, verify=verify, on_error=on_error,
            retry=retry, throttle=throttle, quota=quota, metrics=metrics, progress=progress,
        )  # fmt: skip
        self.device = find_device(device)
        self.batch_size = batch_size
        self.seed = seed
        self.world = world if world is not None else discover_world()
        self._owns_world = world is None
        self._parts = parts = build_parts(arguments, self.world)
        self.num_samples = parts.source.num_samples
        self.fields = parts.fields
        self.layout = parts.layout
        self._shuffle, self._importance = parts.placements.shuffle, importance
        self._num_leaving = parts.placements.num_leaving
        self._pool, self._moves = parts.pool, parts.moves
        self._feedback, self._figures = parts.feedback, parts.figures
        self._gather, self._feed = parts.gather, parts.feed
        self._iterations = Iterations("Loader")
        self._run = RunState(parts, self._iterations)
        self._evaluations: list[Evaluation] = []

    @property
    def epoch(self) -> int:
        return self._run.epoch

    @property
    def step(self) -> int:
        return self._run.step

    @property
    def lr_factor(self) -> float:
        return self._run.lr_factor

    @property
    def _plan(self) -> EpochPlan:
        return self._run.running.plan

    @property
    def _position(self) -> Position:
        return self._run.position

    def _turn(self) -> None:
        """Close the running epoch and begin the next. Collective."""
        with record_function("tonari: epoch turn"):
            self._close_and_begin()

    def _close_and_begin(self) -> None:
        started, parts, line = time.perf_counter(), self._parts, self._parts.line
        self._run.begin_waiting_exchange()
        self._feed.stop()
        self._pool.finish_staging()
        figures = line.end()
        self._feedback.flush()
        if self._importance is not None:
            parts.reported.check(figures.rows, epoch=self.epoch)

        def agree(doing: str, exchange: Mapping[str, float] | None) -> None:
            if exchange is not None:
                self._figures.take_in(exchange)
            line.write(figures, doing, stats=self.stats)

        position = self._run.position
        self._gather.forget(end_epoch(self._pool, self._moves, position, agree=agree))
        if self._shuffle.holds_all and self._pool.keeps_scores:
            spread_scores(self._pool.scores, epoch=self.epoch, world=self.world)
        self._run.begin(self._run.start_of(self.epoch + 1, position.running.first_epoch))
        self._run.begin_exchange()
        self._figures.turn_s += time.perf_counter() - started

    @checked_call
    def epochs(self, num_epochs: int) -> Iterator[int]:
        """Yield the epochs that remain of a run. Collective at each turn.

        After a restore it goes on: first what is left of the interrupted epoch, if anything. In
        each epoch loop once over the batches.

        Args:
            num_epochs: Length of the whole run.
        """
        if num_epochs < 0:
            raise ValueError(f"num_epochs: {num_epochs}; give a number >= 0")
        self._run.num_epochs = num_epochs
        self._run.ensure_running()
        self._run.begin_waiting_exchange()
        if self._is_complete():
            if self.epoch + 1 >= num_epochs:
                return
            self._turn()
        with self._iterations.led():
            while self.epoch < num_epochs:
                yield self.epoch
                if self.epoch + 1 >= num_epochs:
                    self._feedback.flush()
                    line = self._parts.line
                    line.write(line.end(), "end the epoch", stats=self.stats)
                    return
                self._turn()

    def _is_complete(self) -> bool:
        running = self._run.running
        return self.is_used_up() and running.refresh_step >= running.refresh_order.steps

    def is_used_up(self) -> bool:
        """Say whether all the epoch's batches were delivered. Collective before the first."""
        running = self._run.ensure_running()
        return self.step >= running.plan.order.steps

    @property
    def progress(self) -> float:
        """Tell how much of the run is done, in [0, 1], the same on every rank.

        What a schedule by steps needs, as epochs get shorter: the epochs behind, and of this one
        the batches delivered, the one in hand included, over all that it has. Collective before the
        first batch.

        Raises:
            StateError: If nobody said how many epochs the run has.
        """
        num_epochs = self._run.num_epochs
        if num_epochs is None:
            raise StateError(
                f"Loader.progress: at epoch {self.epoch} the number of epochs is not known; "
                f"iterate with `for epoch in loader.epochs(n)`, or count epochs yourself"
            )
        self._run.ensure_running()
        done, left = self._position.ended_rows, self._position.running.step_rows
        done, whole = done + self.step * left, done + len(self) * left
        epochs = self.epoch + (done / whole if whole else 1.0)
        return min(epochs / num_epochs, 1.0) if num_epochs else 1.0

    @property
    def steps_before(self) -> float:
        """Steps that the rows trained before this epoch's first would make here, on every rank.

        0 unless the epoch goes on from one that other replicas, or other batches, began.
        """
        return self._position.ended_rows / self._position.running.step_rows

    def __len__(self) -> int:
        """Count this epoch's steps, the same on every replica; all rows before the first.

        At an epoch's end it is still that epoch's: the next begins with the loop over it.
        """
        return self._plan.order.steps if self._run.is_running else self.max_steps(1)

    @checked_call
    def max_steps(self, epochs: int) -> int:
        """Count the steps of some epochs with every row visible: the bound of a schedule."""
        last = self.layout.num_replicas - 1
        dealt = np.array([self.layout.share_rows(0), self.layout.share_rows(last)])
        return epochs * num_steps(dealt, self.batch_size, drop_last=self._parts.arguments.drop_last)

    @checked_call
    def set_epoch(self, epoch: int) -> None:
        """Go to an epoch, as `DistributedSampler` would. Collective; cheap for the next epoch.

        The loop that follows is of that epoch, even if it is the running one and at its end. Any
        other epoch than the next rebuilds that epoch's placement, from the other nodes' caches,
        and forgets the scores.

        Raises:
            StateError: If the shuffle goes by scores, and placed the rows of that epoch.
        """
        if epoch < 0:
            raise ValueError(f"epoch: {epoch}; give a number >= 0")
        run = self._run
        if epoch != self.epoch and not (run.is_running and epoch == self.epoch + 1):
            position = Position(epoch, run.position.segments)
            self._parts.placements.check_known(position, call="set_epoch")
        run.start_with(epoch)
        run.ensure_running()
        if epoch == self.epoch + 1:
            self._turn()
        elif epoch != self.epoch:
            first_epoch = min(run.position.running.first_epoch, epoch)
            run.choose(run.start_of(epoch, first_epoch))
            run.ensure_running()
        self._iterations.ask()

    def __iter__(self) -> Iterator[Batch]:
        """Yield the rest of the epoch's batches; if there are none, those of the next epoch.

        So one loop after the other is one epoch after the other, the same as by `epochs`, and one
        that was broken off goes on, after a restore too. Refresh hidden rows, and save, behind a
        loop. After `set_epoch` it is that epoch. Collective where it begins an epoch.

        Raises:
            StateError: If it is the second whole loop in one epoch of `epochs`.
        """
        is_used_up = self.is_used_up()
        start = self._iterations.start(self.epoch, is_used_up=is_used_up)
        if start == "next epoch":
            self._turn()
        elif start == "again":
            self._run.step = 0
        self._run.begin_waiting_exchange()
        self._feed.stop()
        plan = self._plan
        steps = range(self.step, plan.order.steps)
        for batch in self._feed.training(plan, steps, epoch=self.epoch):
            self._moves.progress(self.step)
            self._run.step += 1
            yield batch
        self._iterations.end()

    def refresh(self) -> Iterator[Batch]:
        """Yield hidden rows that are due for a new score, to be passed forward and reported.

        Often none; as many batches on every replica. Padding has weight 0, rows weight 1.
        """
        self._feed.stop()
        running = self._run.running
        order = running.refresh_order
        steps = range(running.refresh_step, order.steps)
        for batch in self._feed.batches(order.even_block, order, steps, epoch=self.epoch):
            running.refresh_step += 1
            yield batch

    def report(
        self,
        batch: Batch,
        loss: torch.Tensor,
        correct: torch.Tensor | None = None,
        confidence: torch.Tensor | None = None,
    ) -> None:
        """Tell what a batch's rows cost; padding is passed over. Without importance, does nothing.

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
        if self._pool.keeps_scores:
            self._feedback.add(
                batch["slot"], batch["sample_id"], loss, correct, confidence, epoch=self.epoch
            )

    @checked_call
    def evaluation(
        self, source: str | os.PathLike[str] | Sequence[str | os.PathLike[str]] | Source
    ) -> Evaluation:
        """Open another dataset with the same fields, every sample exactly once. Collective.

        It is closed with the loader, if not before.
        """
        evaluation = self._parts.open_evaluation(source)
        self._evaluations.append(evaluation)
        return evaluation

    def state_dict(self) -> dict[str, object]:
        """Say where the loader stands: a few integers and hashes, JSON, under 1 KB."""
        parts, run = self._parts, self._run
        placement = None if parts.placements.traced else parts.moves.digest
        return parts.identity.to_state(run.position, num_hidden=run.num_hidden, placement=placement)

    @checked_call
    def load_state_dict(self, state: dict[str, object]) -> None:
        """Go on from where `state_dict` was taken. Scores start anew: only `restore` has them.

        Ranks, nodes, threads and batch size may be others than then: the rest of the epoch is dealt
        anew, each of its samples once.

        Raises:
            StateError: If the state is damaged; or of another dataset, seed or shuffle; or from the
                middle of an epoch with hidden rows, and the layout or batch size is another; or the
                shuffle goes by scores, and placed the rows of that epoch. When the epoch
                begins: if it hid another number of rows than a policy without scores now does.
        """
        position = self._position_in(state)
        num_hidden = find_num_hidden(state, position, hides=self._importance is not None)
        self._parts.placements.check_known(position, call="load_state_dict")
        if self._pool.keeps_scores:
            warn_without_scores(position, num_hidden, rank=self.world.rank)
        self._run.choose(position, num_hidden=num_hidden)

    def _position_in(self, state: dict[str, object]) -> Position:
        """Check a saved state, and find where this loader goes on from it."""
        return self._parts.identity.find_position(
            state, layout=self.layout, batch_size=self.batch_size
        )

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
        self.settle()
        node, figures = self._run.snapshot(), self._parts.line.so_far()
        save_snapshot(Path(path), self.state_dict(), node, self.world, figures=figures)

    def settle(self) -> None:
        """Bring cache and scores to where this loader stands: what `save` begins with. Collective.

        For a loader that goes on from what another one of the same rows has saved.
        """
        self._run.ensure_running()
        # A checkpoint is never ahead of the caches: they cannot step forward.
        self._pool.settle()
        self._feedback.flush()

    @checked_call
    def restore(self, path: str | os.PathLike[str]) -> None:
        """Go on exactly where `save` was called. Collective.

        Ranks, nodes, threads and batch size may be others than then: the rest of the epoch is dealt
        anew, each of its samples once; scores and hidden rows follow their samples.

        Raises:
            StateError: On all ranks, if nothing was saved there, if it is damaged, or by a loader
                made otherwise.
        """
        saved = find_state(Path(path), self.world)
        self._run.restore(saved, self._position_in(saved.state))
        self._run.ensure_running()
        if self.world.rank == 0:
            clear(saved.path.parent)

    def order_hash(self) -> str:
        """Hash the sample ids that this replica is given in this epoch, in order: 16 hex digits."""
        self._run.ensure_running()
        slots = self._plan.order.slots_at(np.arange(self._plan.order.num_rows))
        return digest(self._pool.sample_ids[slots].tobytes())

    def stats(self) -> dict[str, float]:
        """Figures of this rank since construction; of importance, of this epoch.

        Returns:
            What `dataio.stats` lists, by name.
        """
        return collect_stats(
            self._pool,
            self._gather,
            self._feedback,
            self._figures,
            epoch=self.epoch,
            step=self.step,
            selection=self._plan.selection if self._run.is_running else None,
            last_epoch=self._parts.line.last,
        )

    def close(self) -> None:
        """Stop threads, complete messages under way, release the cache. Collective; idempotent."""
        try:
            self._run.abandon()
        finally:
            # Whoever catches what a partner's end raises may go on: the cache must not stay locked.
            self._release()

    def _release(self) -> None:
        self._feed.stop()
        self._moves.stop()
        for evaluation in self._evaluations:
            evaluation.close()
        self._gather.close()
        self._pool.close()
        if self._owns_world:
            self.world.close()

    def __enter__(self) -> "Loader":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        # After an error the other ranks may never come: only let go.
        if error is None:
            self.close()
        else:
            self._release()
