"""The conductor: the only file that knows the order of the stages.

    staging -> each epoch: selection -> order -> gather -> batches -> reports -> exchange -> commit

Collective, by every rank together: construction, `epochs` at each turn, `set_epoch`, `save`,
`restore`, `evaluation` and `close`. Nothing else talks to other ranks, but for the exchange's own
messages.
"""

import logging
import os
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch.profiler import record_function

from dataio.arguments import (
    check_agreement,
    check_arguments,
    check_batch_size,
    check_scores,
    parse_quota,
    share_of_cores,
)
from dataio.assemble import OnError, Transform
from dataio.dealer import Dealer
from dataio.deliver import Delivery
from dataio.digest import digest
from dataio.epoch import find_decks
from dataio.errors import StateError
from dataio.evaluation import Evaluation
from dataio.feed import Feed
from dataio.fields import Field
from dataio.figures import EpochFigures, Figures, summarise
from dataio.filesystem import cache_directory, is_named
from dataio.gather import Batch, BatchTransform, Collate, Gather
from dataio.history import unscored
from dataio.metrics import add_figures, check_metrics
from dataio.moves import Moves
from dataio.opening import Opener
from dataio.order import Block, num_steps
from dataio.placement import Placements
from dataio.policies import Importance, Local, Selection, Shuffle
from dataio.pool import Pool, lay_out
from dataio.replay import groups_of, trained_samples, trained_slots
from dataio.report import Feedback, check_report
from dataio.resume import Run, load_part
from dataio.scores import spread_scores
from dataio.snapshot import NodeSnapshot, find_snapshot, load_state, save_snapshot
from dataio.source import Retry, Source, Throttle
from dataio.source.transformed import StageTransform
from dataio.stretch import Position, Stretch
from dataio.verify import Verify
from dataio.world import World, discover_world

log = logging.getLogger(__name__)

SPREAD = ("straggler_rank", "wait_max_s", "wait_mean_s")
"""What `Loader.stats` tells of the last epoch over all ranks."""


class Loader:
    """Batches of this replica's rows, epoch after epoch; stands where a `DataLoader` stood.

    Collective: every rank makes it with the same arguments. Blocks until the node's part of the
    dataset lies in its cache; a cache that is already there is used.

    Args:
        source: Pattern of shards, such as ``"shards/train-{000000..000127}.tar"``, a list of them,
            or a `Source`.
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
            alone.
        batch_transform: ``(batch, rng) -> batch`` on tensors.
        device: Where batches are delivered.
        seed: Of every random choice.
        world: All ranks; by default discovered from the launcher.
        num_threads: Threads that decode and transform; by default the rank's part of the cores. 0:
            none.
        num_processes: Processes that decode and transform instead, for transforms that hold the
            interpreter; torch's global generator is then seeded for every sample.
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
        metrics: File to which rank 0 adds a line of JSON at the end of each epoch.
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
        source: str | Sequence[str] | Source,
        *,
        batch_size: int,
        fields: Mapping[str, Field],
        drop_last: bool = False,
        cache: str | os.PathLike[str] = "auto",
        shuffle: Shuffle | None = None,
        importance: Importance | None = None,
        transform: Transform | None = None,
        batch_transform: BatchTransform | None = None,
        device: torch.device | str | None = None,
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
        check_arguments(
            batch_size=batch_size, prefetch=prefetch, num_threads=num_threads, stage=stage
        )
        quota_bytes = parse_quota(quota, stage=stage)
        check_scores(shuffle, importance)
        self.world = world if world is not None else discover_world()
        self._owns_world = world is None
        self._root = cache_directory(os.fspath(cache), read_only=True)
        self._foreign = is_named(os.fspath(cache))
        self._opener = Opener(
            self._root, throttle, retry, dict(fields), stage_transform, self.world
        )
        self._staging_readers, self._staging_bandwidth = staging_readers, staging_bandwidth
        self._source, fields = self._opener.open(source)
        self.num_samples = self._source.num_samples
        self.batch_size = batch_size
        self._drop_last = drop_last
        self._overlaps = stage == "overlap"
        self._metrics = Path(metrics) if metrics is not None else None
        if self._metrics is not None and self.world.rank == 0:
            check_metrics(self._metrics)
        self.fields = dict(fields)
        self.seed = seed
        self.device = torch.device(device) if device is not None else None
        self._shuffle: Shuffle = shuffle if shuffle is not None else Local()
        self._importance = importance
        self._prefetch = prefetch
        self._progress = progress
        self._num_threads = (
            num_threads if num_threads is not None else share_of_cores(self.world.local_size)
        )
        self.layout = lay_out(self._source, self.world)
        check_batch_size(batch_size, self.layout)
        check_agreement(self._settings(quota_bytes), self.world)
        self._run = Run(seed, self.num_samples, self._shuffle)
        self._decks = find_decks(
            self.layout, replica=self.world.replica, holds_all=self._shuffle.holds_all
        )
        self._dealer = Dealer(
            self._decks,
            world=self.world,
            importance=importance,
            seed=seed,
            batch_size=batch_size,
            drop_last=drop_last,
        )
        self._num_leaving = self._shuffle.num_leaving(self.layout)
        self._placements = Placements(
            self._shuffle,
            self.layout,
            self.world.node,
            self._decks.num_rows,
            seed,
            self._num_leaving,
        )
        self._position = self._start_of(0)
        self._pool = Pool(
            self._source,
            fields,
            world=self.world,
            root=self._root,
            num_slots=self._decks.num_rows,
            num_leaving=self._num_leaving,
            progress=progress,
            wanted=None if self._num_leaving else self._placements.of(0, first_epoch=0),
            columns=importance.columns if importance is not None else (),
            foreign=self._foreign,
            readers=staging_readers,
            bandwidth=staging_bandwidth,
            quota_bytes=quota_bytes,
            batch_size=batch_size,
        )
        self._feedback = Feedback(self._pool.scores)
        self._delivery = Delivery(self.device)
        self._gather = Gather(
            self._pool.cache,
            self.fields,
            num_threads=self._num_threads,
            transform=transform,
            batch_transform=batch_transform,
            seed=seed,
            replica=self.world.replica,
            prefetch=prefetch,
            timeout_s=self.world.timeout_s,
            num_processes=num_processes,
            collate=collate,
            verify=verify,
            on_error=on_error,
            repair=self._pool.repair,
            pinned=self._delivery.pinned,
        )
        self.epoch = 0
        self.step = 0
        self.lr_factor = 1.0
        self._refresh_step = 0
        self._num_epochs: int | None = None
        self._begun = False
        self._scores_used = False
        # Rows that a loaded state's epoch hides; None: not known, or nothing was loaded.
        self._told_hidden: int | None = None
        self._restored: NodeSnapshot | None = None
        self._first_tag = self.world.open_channel()
        self._moves = Moves(self._pool, self._placements, first_tag=self._first_tag)
        self._figures = Figures()
        self._feed = Feed(self._pool, self._gather, self._delivery, figures=self._figures)
        self._epoch_figures: dict[str, float] = {}
        self._seen: NDArray[np.bool_] | None = None
        self._evaluations: list[Evaluation] = []
        try:
            if not self._overlaps:  # which stages when the first epoch begins
                self._moves.stage()
        except BaseException:
            # Whoever catches it may try again in this process: the cache must not stay locked.
            self._gather.close()
            self._pool.close()
            raise

    def _settings(self, quota_bytes: int | None) -> dict[str, object]:
        """What must be the same on all ranks."""
        return {
            "quota": quota_bytes,
            "source fingerprint": self._source.fingerprint,
            "batch_size": self.batch_size,
            "drop_last": self._drop_last,
            "stage": "overlap" if self._overlaps else "before",
            "seed": self.seed,
            "fields": repr(self.fields),
            "shuffle": repr(self._shuffle),
            "importance": repr(self._importance),
        }

    def _start_of(self, epoch: int, first_epoch: int = 0) -> Position:
        grouped = self._overlaps and epoch == 0
        stretch = Stretch(self.layout.replicas, self.batch_size, first_epoch, grouped=grouped)
        return Position(epoch, (stretch,))

    def _begin(
        self,
        position: Position,
        restored: Selection | None = None,
        seen: NDArray[np.bool_] | None = None,
        losses: NDArray[np.float32] | None = None,
    ) -> None:
        """Decide what is left of an epoch: hidden rows, order, weights, refresh. Collective."""
        self._position, self._seen = position, seen
        self._moves.keep_losses(losses)
        self.epoch, self._refresh_step = position.epoch, position.refresh_step
        self.step = position.running.steps
        self._plan, self._refresh_order = self._dealer.deal(
            position,
            self._pool.scores,
            self._held_ids,
            num_epochs=self._num_epochs,
            restored=restored,
            seen=seen,
        )
        self._moves.hidden = self._plan.selection.hidden
        self.lr_factor = self._plan.selection.lr_factor
        self._begun = self._scores_used = True

    def _ensure_begun(self) -> None:
        """Begin at epoch 0, or at what was restored. Collective the first time."""
        if self._begun:
            return
        position, node = self._position, self._restored
        self._restored = None
        self._pool.finish_staging()
        groups = None
        if position.running.grouped and not position.running.steps:
            groups = groups_of(self._decks, seed=self.seed).bounds.tolist()
        self._pool.ensure(self._moves.take_placement(position), groups=groups)
        # Past `ensure`, where all ranks meet: none reports of what it has left any more.
        if self.world.local_rank == 0 and self._pool.keeps_scores:
            scores = self._pool.scores
            if node is not None:
                scores[:] = node.scores
            elif self._scores_used:
                scores[:] = unscored(len(scores), scores.dtype)
        self.world.barrier(doing="restore scores")
        selection = node.selection if node is not None else None
        losses = node.losses if node is not None else None
        self._begin(position, selection, self._seen_before(position, node), losses)
        self._check_hidden(position)
        self._open_epoch()

    def _check_hidden(self, position: Position) -> None:
        """Refuse to go on amid an epoch that hid other rows; who keeps scores has been warned."""
        told, self._told_hidden = self._told_hidden, None
        found = self._plan.num_hidden
        if told in (None, found) or not position.running.steps or self._pool.keeps_scores:
            return
        self._begun = False
        raise StateError(
            f"checkpoint: epoch {position.epoch} hides {told} rows, with the importance of this "
            f"loader {found}, so samples would be skipped or repeated; make the loader as it was "
            "when the checkpoint was written"
        )

    def _seen_before(
        self, position: Position, node: NodeSnapshot | None
    ) -> NDArray[np.bool_] | None:
        """bool[rows of the deck]: What the ended stretches of an epoch trained. Collective."""
        if not position.ended:
            return None
        if node is not None:
            # Restored into the stretch that it was saved in, its own rows are still to be counted.
            return node.trained == 1 if position.running.steps else node.trained > 0
        seen = trained_samples(
            position.ended,
            num_samples=self.num_samples,
            shuffle=self._shuffle,
            seed=self.seed,
            epoch=position.epoch,
            world=self.world,
        )
        return seen[self._held_ids()]

    def _held_ids(self) -> NDArray[np.int64]:
        """int64[num_slots]: The sample of every slot, those still being staged included."""
        if self._pool.is_staging:
            first_epoch = self._position.running.first_epoch
            return self._placements.sample_ids(self.epoch, first_epoch=first_epoch)
        return self._pool.sample_ids

    def _open_epoch(self) -> None:
        last = self._num_epochs is not None and self.epoch + 1 >= self._num_epochs
        if self._num_leaving and not last and not self._pool.is_staging:
            self._moves.begin(self._position, range(self.step, self._plan.order.steps))

    def _turn(self) -> None:
        """Close the running epoch and begin the next. Collective."""
        with record_function("tonari: epoch turn"):
            self._close_and_begin()

    def _close_and_begin(self) -> None:
        started = time.perf_counter()
        self._feed.stop()
        self._pool.finish_staging()
        figures = self._end_figures()
        exchanges = self._moves.by_exchange
        self._feedback.settle()
        if self._importance is not None:
            self.world.barrier(doing="report the epoch's scores")
        if exchanges:
            self._figures.take_in(self._moves.finish(self._position))
            self._pool.seal(self.epoch + 1)
        # Past this point all ranks have sealed.
        self._summarise(figures, "make arrivals durable" if exchanges else "end the epoch")
        if exchanges:
            self._gather.forget(self._pool.turn(self.epoch + 1))
        elif self._num_leaving:
            self._moves.refill(self._position)
        if self._shuffle.holds_all and self._pool.keeps_scores:
            spread_scores(self._pool.scores, epoch=self.epoch, world=self.world)
        self._begin(self._start_of(self.epoch + 1, self._position.running.first_epoch))
        self._open_epoch()
        self._figures.turn_s += time.perf_counter() - started

    def _end_figures(self) -> EpochFigures:
        return self._figures.end_epoch(source_bytes=self._source.bytes_read)

    def _summarise(self, mine: EpochFigures, doing: str) -> None:
        """Bring the ranks' figures of the epoch together; rank 0 speaks for all. Collective."""
        ranks = self.world.allgather_array(mine.to_array(), doing=doing)
        self._epoch_figures = summarise(self.epoch, ranks)
        if self.world.rank == 0 and self._metrics is not None:
            add_figures(self._metrics, self._epoch_figures | {"rank_0": self.stats()})

    def epochs(self, num_epochs: int) -> Iterator[int]:
        """Yield the epochs that remain of a run. Collective at each turn.

        After a restore it goes on: first what is left of the interrupted epoch, if anything.

        Args:
            num_epochs: Length of the whole run.
        """
        if num_epochs < 0:
            raise ValueError(f"num_epochs: {num_epochs}; give a number >= 0")
        self._num_epochs = num_epochs
        self._ensure_begun()
        if self._is_complete():
            if self.epoch + 1 >= num_epochs:
                return
            self._turn()
        while self.epoch < num_epochs:
            yield self.epoch
            if self.epoch + 1 >= num_epochs:
                self._feedback.settle()
                self._summarise(self._end_figures(), "end the epoch")
                return
            self._turn()

    def _is_complete(self) -> bool:
        refreshed = self._refresh_step >= self._refresh_order.steps
        return self.is_used_up() and refreshed

    def is_used_up(self) -> bool:
        """Say whether all the epoch's batches were delivered. Collective before the first."""
        self._ensure_begun()
        return self.step >= self._plan.order.steps

    @property
    def progress(self) -> float:
        """Tell how much of the run is done, in [0, 1], the same on every rank.

        What a schedule by steps needs, as epochs get shorter: the epochs behind, and of this one
        the batches delivered, the one in hand included, over all that it has. Collective before the
        first batch.

        Raises:
            StateError: If nobody said how many epochs the run has.
        """
        if self._num_epochs is None:
            raise StateError(
                f"Loader.progress: at epoch {self.epoch} the number of epochs is not known; "
                f"iterate with `for epoch in loader.epochs(n)`, or count epochs yourself"
            )
        self._ensure_begun()
        done, left = self._position.ended_rows, self._position.running.step_rows
        done, whole = done + self.step * left, done + len(self) * left
        epochs = self.epoch + (done / whole if whole else 1.0)
        return min(epochs / self._num_epochs, 1.0) if self._num_epochs else 1.0

    @property
    def steps_before(self) -> float:
        """Steps that the rows trained before this epoch's first would make here, on every rank.

        0 unless the epoch goes on from one that other replicas, or other batches, began.
        """
        return self._position.ended_rows / self._position.running.step_rows

    def __len__(self) -> int:
        """Count this epoch's steps, the same on every replica; all rows before the first."""
        return self._plan.order.steps if self._begun else self.max_steps(1)

    def max_steps(self, epochs: int) -> int:
        """Count the steps of some epochs with every row visible: the bound of a schedule."""
        last = self.layout.num_replicas - 1
        dealt = np.array([self.layout.share_rows(0), self.layout.share_rows(last)])
        return epochs * num_steps(dealt, self.batch_size, drop_last=self._drop_last)

    def set_epoch(self, epoch: int) -> None:
        """Go to an epoch, as `DistributedSampler` would. Collective; cheap for the next epoch.

        Any other epoch than the next rebuilds that epoch's placement, from the other nodes' caches,
        and forgets the scores.

        Raises:
            StateError: If the shuffle goes by scores, and placed the rows of that epoch.
        """
        if epoch < 0:
            raise ValueError(f"epoch: {epoch}; give a number >= 0")
        if epoch != self.epoch and (not self._begun or epoch != self.epoch + 1):
            self._check_known(Position(epoch, self._position.stretches), "set_epoch")
        if not self._begun and self._position == self._start_of(0):
            self._position = self._start_of(epoch)
        self._ensure_begun()
        if epoch == self.epoch + 1:
            self._turn()
        elif epoch != self.epoch:
            self._abandon()
            first_epoch = min(self._position.running.first_epoch, epoch)
            self._position = self._start_of(epoch, first_epoch)
            self._ensure_begun()

    def __iter__(self) -> Iterator[Batch]:
        """Yield the rest of the epoch's batches."""
        self._ensure_begun()
        if self.step >= self._plan.order.steps and self._num_epochs is None:
            self.step = 0
        self._feed.stop()
        steps = range(self.step, self._plan.order.steps)
        order = self._plan.order
        for batch in self._feed.batches(self._train_block, order, steps, epoch=self.epoch):
            self._moves.progress(self.step)
            self.step += 1
            yield batch

    def refresh(self) -> Iterator[Batch]:
        """Yield hidden rows that are due for a new score, to be passed forward and reported.

        Often none; as many batches on every replica. Padding has weight 0, rows weight 1.
        """
        self._feed.stop()
        steps = range(self._refresh_step, self._refresh_order.steps)
        order = self._refresh_order
        for batch in self._feed.batches(order.even_block, order, steps, epoch=self.epoch):
            self._refresh_step += 1
            yield batch

    def _train_block(self, first_step: int, num_steps: int) -> Block:
        if not self._pool.is_staging:
            return self._plan.block(first_step, num_steps)
        # Rows come in as they are trained: what is not asked for yet is not waited for.
        block = self._plan.block(first_step, 1)
        self._pool.await_rows(block.slots[0])
        return block

    def report(
        self,
        batch: Batch,
        loss: torch.Tensor,
        correct: torch.Tensor | None = None,
        confidence: torch.Tensor | None = None,
    ) -> None:
        """Tell what a batch's rows cost; padding is passed over. Without importance, does nothing.

        Before the epoch turns: its slots hold other rows then.

        Args:
            batch: As delivered.
            loss: float[batch]: One loss a row.
            correct: bool[batch]: Whether the row was predicted right.
            confidence: float[batch]: In [0, 1].

        Raises:
            ValueError: If a tensor does not have one value a row.
        """
        outcome = {"loss": loss, "correct": correct, "confidence": confidence}
        check_report(len(batch["slot"]), outcome)
        if self._pool.keeps_scores:
            self._feedback.add(batch["slot"], loss, correct, confidence, epoch=self.epoch)

    def evaluation(self, source: str | Sequence[str] | Source) -> Evaluation:
        """Open another dataset with the same fields, every sample exactly once. Collective.

        It is closed with the loader, if not before.
        """
        opened, _ = self._opener.open(source)
        evaluation = Evaluation(
            opened,
            self.fields,
            batch_size=self.batch_size,
            world=self.world,
            root=self._root,
            foreign=self._foreign,
            readers=self._staging_readers,
            bandwidth=self._staging_bandwidth,
            num_threads=self._num_threads,
            prefetch=self._prefetch,
            progress=self._progress,
            delivery=self._delivery,
        )
        self._evaluations.append(evaluation)
        return evaluation

    def state_dict(self) -> dict[str, object]:
        """Say where the loader stands: a few integers and hashes, JSON, under 1 KB."""
        position = self._position
        if self._begun:
            position = position.at(steps=self.step, refresh_step=self._refresh_step)
        placed = {} if self._placements.traced else {"placement": self._moves.digest}
        hidden = self._plan.num_hidden if self._begun else self._told_hidden
        told = {} if hidden is None else {"hidden": hidden}
        return {**self._run.to_json(), **placed, **position.to_json(), **told}

    def load_state_dict(self, state: dict[str, object]) -> None:
        """Go on from where `state_dict` was taken. Scores start anew: only `restore` has them.

        Ranks, nodes, threads and batch size may be others than then: the rest of the epoch is dealt
        anew, each of its samples once.

        Raises:
            StateError: If the state is of another dataset, seed or shuffle; or it is from the
                middle of an epoch with hidden rows, and the layout or batch size is another; or
                the shuffle goes by scores, and placed the rows of that epoch. When the epoch
                begins: if it hid another number of rows than a policy without scores now does.
        """
        position = self._position_in(state)
        hidden = state.get("hidden")
        if position.ended and (hidden or self._importance is not None):
            raise StateError(
                f"checkpoint: epoch {position.epoch} was begun on other ranks or with another "
                "batch size, and state_dict does not say which rows it hid; use loader.save and "
                "loader.restore"
            )
        self._check_known(position, "load_state_dict")
        if self._pool.keeps_scores:
            log.warning(
                "[rank %d] load_state_dict: the score history is not part of state_dict, so the "
                "hidden rows start anew%s; use loader.save and loader.restore to keep them",
                self.world.rank,
                ", and what is left of this epoch skips some samples and repeats others"
                if hidden and position.running.steps
                else "",
            )
        self._abandon()
        self._position = position
        self._told_hidden = hidden if isinstance(hidden, int) else None

    def _check_known(self, position: Position, call: str) -> None:
        first_epoch = position.running.first_epoch
        self._placements.check_known(position.epoch, first_epoch=first_epoch, call=call)

    def _position_in(self, state: dict[str, object]) -> Position:
        """Check a saved state, and find where this loader goes on from it."""
        return self._run.find_position(state, layout=self.layout, batch_size=self.batch_size)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write position, scores and hidden rows into a directory that all nodes see. Collective.

        A directory of that name is replaced only when the new one is whole.
        """
        self.settle()
        trained = np.zeros(self._decks.num_rows, np.uint8)
        if self._seen is not None:
            trained[self._seen] = 1
        trained[trained_slots(self._plan.order, self.step)] = 2
        node = NodeSnapshot(
            self._held_ids(), self._pool.scores, self._plan.selection, trained, self._moves.losses
        )
        save_snapshot(Path(path), self.state_dict(), node, self.world)

    def settle(self) -> None:
        """Bring cache and scores to where this loader stands: what `save` begins with. Collective.

        For a loader that goes on from what another one of the same rows has saved.
        """
        self._ensure_begun()
        # A checkpoint is never ahead of the caches: they cannot step forward.
        self._pool.settle()
        self._feedback.settle()

    def restore(self, path: str | os.PathLike[str]) -> None:
        """Go on exactly where `save` was called. Collective.

        Ranks, nodes, threads and batch size may be others than then: the rest of the epoch is dealt
        anew, each of its samples once; scores and hidden rows follow their samples.

        Raises:
            StateError: If nothing was saved there, or by a loader made otherwise.
        """
        found = find_snapshot(Path(path))
        state = load_state(found)
        position = self._position_in(state)
        self._abandon()
        self._position, self._told_hidden = position, None
        epoch, first_epoch = position.epoch, position.running.first_epoch
        wanted = None
        if self._placements.knows(epoch, first_epoch=first_epoch):
            wanted = self._placements.sample_ids(epoch, first_epoch=first_epoch)
        node = load_part(
            found, state, wanted, self._pool.scores.dtype, layout=self.layout, world=self.world,
            tag=self._first_tag,
        )  # fmt: skip
        if not self._moves.is_as_saved(node.sample_id, wanted, state.get("placement")):
            raise StateError(
                f"{found}: the rows saved for node {self.world.node} are not those of epoch "
                f"{epoch}; the checkpoint is damaged or of another run: restore an older one"
            )
        if wanted is None:
            self._moves.follow(node.sample_id, epoch=epoch, saved=str(state["placement"]))
        self._restored = node
        self._ensure_begun()

    def order_hash(self) -> str:
        """Hash the sample ids that this replica is given in this epoch, in order: 16 hex digits."""
        self._ensure_begun()
        slots = self._plan.order.slots_at(np.arange(self._plan.order.num_rows))
        return digest(self._held_ids()[slots].tobytes())

    def stats(self) -> dict[str, float]:
        """Figures of this rank since construction; of importance, of this epoch.

        Returns:
            Times in seconds, sizes in bytes: ``wait_s`` blocked on batches and its percentiles
            ``wait_p50_s``, ``wait_p95_s``, ``wait_p99_s``; ``turn_s`` in epoch turns,
            ``exchange_blocked_s`` of it waiting for partners, ``exchange_cpu_s`` of a core,
            ``exchange_overlap_fraction`` of the
            last epoch's arrivals in before, ``staging_s`` reading the source; bytes by where they
            came from: ``source_bytes`` (indexes and the counting of samples included),
            ``disk_bytes`` (read by this process, as the kernel counts), ``page_cache_bytes`` (the
            rest of the batches), ``peer_bytes``; ``pulled_rows`` that came from other nodes because
            a cache was lost, older or laid out otherwise;
            with a quota ``resident_fraction`` of this node's rows that stay, ``streamed_rows`` and
            ``streamed_bytes`` read from the source because they do not, ``window_wait_s`` (part of
            ``wait_s``) blocked on them;
            ``disk_bytes_written`` to the node's cache, ``exchanged_rows`` sent, ``queue_depth``
            batches ready now, ``skipped_rows`` that became padding by ``on_error``; of the last
            epoch over all ranks ``straggler_rank``, who waited longest, ``wait_max_s`` and
            ``wait_mean_s``. Of importance ``hidden_fraction`` of this node's rows, and the policy's
            own, such as Kakurenbo's ``hidden_cap`` and ``moved_back``.
        """
        hidden = len(self._plan.selection.hidden) if self._begun else 0
        spread = {name: self._epoch_figures[name] for name in SPREAD if self._epoch_figures}
        return {
            **self._figures.to_stats(
                cache_bytes=self._gather.num_bytes, pulled_bytes=self._pool.pulled_bytes
            ),
            **spread,
            "epoch": self.epoch,
            "step": self.step,
            "hidden_fraction": hidden / self._pool.cache.num_slots,
            **(self._plan.selection.figures if self._begun else {}),
            "disk_bytes_written": self._pool.cache.bytes_written,
            "staging_s": self._pool.staging_s,
            "pulled_rows": self._pool.pulled_rows,
            "source_bytes": self._source.bytes_read,
            "resident_fraction": self._pool.resident_fraction,
            "streamed_rows": self._pool.streamed.rows,
            "streamed_bytes": self._pool.streamed.bytes,
            "window_wait_s": self._pool.streamed.wait_s,
            "queue_depth": self._gather.ready,
            "skipped_rows": self._gather.num_skipped,
        }

    def _abandon(self) -> None:
        """Leave the epoch without its exchange taking effect. Collective while one runs."""
        self._feed.stop()
        self._feedback.forget()
        self._moves.abandon()
        self._begun = False

    def close(self) -> None:
        """Stop threads, complete messages under way, release the cache. Collective; idempotent."""
        try:
            self._abandon()
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
