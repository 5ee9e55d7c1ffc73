"""The conductor: the only file that knows the order of the stages.

    staging -> each epoch: selection -> order -> gather -> batches -> reports -> exchange -> commit

Collective, by every rank together: construction, `epochs` at each turn, `set_epoch`, `save`,
`restore`, `evaluation` and `close`. Nothing else talks to other ranks, but for the exchange's own
messages.
"""

import hashlib
import json
import logging
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

import numpy as np
import torch
from numpy.typing import NDArray

from dataio.epoch import find_decks, plan_epoch, plan_refresh
from dataio.errors import StateError, WorldError
from dataio.evaluation import Evaluation
from dataio.fields import Field
from dataio.filesystem import cache_directory, is_named
from dataio.gather import Batch, BatchTransform, Gather, Transform
from dataio.order import num_steps
from dataio.policies import Exchange, Importance, Local, Selection, Shuffle
from dataio.pool import Pool, lay_out
from dataio.prefetch import Prefetcher
from dataio.scores import record, unscored
from dataio.seeding import ORDER_VERSION, generator, key
from dataio.snapshot import NodeSnapshot, find_snapshot, load_node, load_state, save_snapshot
from dataio.source import Source, Throttle, open_source
from dataio.world import World, discover_world

log = logging.getLogger(__name__)

STATE_VERSION = 1


@dataclass
class Figures:
    """Totals since the loader was made; `Loader.stats` adds what is derived."""

    batches: int = 0
    rows: int = 0
    wait_s: float = 0.0
    turn_s: float = 0.0
    exchanged_rows: int = 0
    exchanged_bytes: int = 0
    exchange_messages: int = 0
    exchange_blocked_s: float = 0.0
    exchange_overlap_fraction: float = 0.0


class Loader:
    """Batches of this replica's rows, epoch after epoch; stands where a `DataLoader` stood.

    Collective: every rank makes it with the same arguments. Blocks until the node's part of the
    dataset lies in its cache; a cache that is already there is used.

    Args:
        source: Pattern of shards, such as ``"shards/train-{000000..000127}.tar"``, a list of them,
            or a `Source`.
        batch_size: Rows a batch and replica. Every batch has this many; the last may hold padding
            of weight 0.
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
        prefetch: Batches made ahead.
        throttle: Limits reads from the source.
        progress: Whether rank 0 shows staging on a terminal.

    Attributes:
        epoch: The running epoch.
        step: Batches of it delivered so far.
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
        cache: str | os.PathLike[str] = "auto",
        shuffle: Shuffle | None = None,
        importance: Importance | None = None,
        transform: Transform | None = None,
        batch_transform: BatchTransform | None = None,
        device: torch.device | str | None = None,
        seed: int = 0,
        world: World | None = None,
        num_threads: int | None = None,
        prefetch: int = 2,
        throttle: Throttle | None = None,
        progress: bool = True,
    ) -> None:
        _check_arguments(batch_size=batch_size, prefetch=prefetch, num_threads=num_threads)
        self.world = world if world is not None else discover_world()
        self._owns_world = world is None
        self._root = cache_directory(os.fspath(cache), read_only=True)
        self._foreign = is_named(os.fspath(cache))
        self._throttle = throttle
        self._source = _opened(source, self.world, throttle)
        self.num_samples = self._source.num_samples
        self.batch_size = batch_size
        self.fields = dict(fields)
        self.seed = seed
        self.device = torch.device(device) if device is not None else None
        self._shuffle: Shuffle = shuffle if shuffle is not None else Local()
        self._importance = importance
        self._prefetch = prefetch
        self._progress = progress
        self._num_threads = (
            num_threads if num_threads is not None else _share_of_cores(self.world.local_size)
        )
        self.layout = lay_out(self._source, self.world)
        self._check_batch_size()
        self._check_agreement()
        self._decks = find_decks(
            self.layout, replica=self.world.replica, holds_all=self._shuffle.holds_all
        )
        self._num_leaving = self._shuffle.num_leaving(self.layout)
        self._pool = Pool(
            self._source,
            fields,
            world=self.world,
            root=self._root,
            num_slots=self._decks.num_rows,
            num_leaving=self._num_leaving,
            progress=progress,
            wanted=None if self._num_leaving else self._placement(0),
            uses_scores=importance is not None and importance.uses_scores,
            foreign=self._foreign,
        )
        self._gather = Gather(
            self._pool.cache,
            self.fields,
            num_threads=self._num_threads,
            transform=transform,
            batch_transform=batch_transform,
            seed=seed,
            replica=self.world.replica,
        )
        self.epoch = 0
        self.step = 0
        self.lr_factor = 1.0
        self._refresh_step = 0
        self._num_epochs: int | None = None
        self._begun = False
        self._pending: tuple[dict[str, object], NodeSnapshot | None] | None = None
        self._exchange: Exchange | None = None
        self._first_tag = self.world.open_channel()
        self._prefetcher: Prefetcher[Batch] | None = None
        self._figures = Figures()
        self._evaluations: list[Evaluation] = []
        try:
            self._stage()
        except BaseException:
            # Whoever catches it may try again in this process: the cache must not stay locked.
            self._gather.close()
            self._pool.close()
            raise

    def _check_batch_size(self) -> None:
        rows = self.num_samples // self.layout.num_replicas
        if self.batch_size > rows:
            raise ValueError(
                f"batch_size: {self.batch_size} is more than a replica's share of {rows} rows "
                f"({self.num_samples} samples over {self.layout.num_replicas} replicas); choose "
                f"at most {rows}, or start fewer ranks"
            )

    def _check_agreement(self) -> None:
        mine = {
            "source fingerprint": self._source.fingerprint,
            "batch_size": self.batch_size,
            "seed": self.seed,
            "fields": repr(self.fields),
            "shuffle": repr(self._shuffle),
            "importance": repr(self._importance),
        }
        everyone = self.world.allgather(json.dumps(mine).encode(), doing="compare settings")
        for rank, theirs in enumerate(everyone):
            for name, value in json.loads(theirs).items():
                first = json.loads(everyone[0])[name]
                if value != first:
                    raise WorldError(
                        f"Loader: rank {rank} was made with {name} {value}, rank 0 with {first}; "
                        f"every rank must be given the same arguments and see the same source"
                    )

    def _stage(self) -> None:
        new = self.world.allgather_array(
            np.array([self._pool.holds_nothing()]), doing="look for caches"
        )
        if not self._num_leaving:
            # Rows that never leave lie in the same slots whatever is restored.
            self._pool.ensure(self._placement(0), epoch=0)
        elif new.any():
            # Caches that hold rows keep them: a restore may want just that placement.
            held = self._pool.cache.entries.sample_id
            wanted = self._placement(0) if self._pool.holds_nothing() else held
            self._pool.ensure(wanted, epoch=self._pool.cache.epoch)
        self._mean_row_bytes = self._agree_row_bytes()

    def _agree_row_bytes(self) -> int:
        entries = self._pool.cache.entries
        mean = self._pool.cache.schema.fixed_bytes + int(np.ceil(entries.extent_bytes.mean()))
        most = self.world.allreduce(np.array([mean]), op="max", doing="compare row sizes")
        return max(int(most[0]), 1)

    def _placement(self, epoch: int) -> NDArray[np.int64]:
        if self._shuffle.holds_all:
            return np.arange(self.num_samples, dtype=np.int64)
        return self._shuffle.placement(
            self.layout, node=self.world.node, epoch=epoch, seed=self.seed
        )

    def _begin(self, epoch: int, restored: Selection | None = None) -> None:
        """Decide an epoch: hidden rows, order, weights, refresh. Collective."""
        decks = self._decks
        self.epoch, self.step, self._refresh_step = epoch, 0, 0
        selection = restored if restored is not None else self._select(epoch)
        visible = decks.sizes
        if self._importance is not None:
            visible = self._count(decks.num_rows - len(selection.hidden), "count visible rows")
        self._plan = plan_epoch(
            decks,
            selection,
            visible,
            stream=key(self.seed, "order", epoch=epoch, replica=decks.leader),
            batch_size=self.batch_size,
        )
        self.lr_factor = selection.lr_factor
        due, most = selection.hidden[:0], 0
        if self._importance is not None:
            due = np.sort(self._importance.due(self._plan.selection.hidden, epoch=epoch))
            mine = -(-len(due) // decks.replicas[decks.mine])
            most = int(self._count(mine, "count rows to refresh").max())
        self._refresh_order = plan_refresh(decks, due, most, batch_size=self.batch_size)
        self._begun = True

    def _select(self, epoch: int) -> Selection:
        if self._importance is None:
            return Selection()
        stream = key(self.seed, "importance", epoch=epoch, replica=self._decks.leader)
        return self._importance.select(
            self._pool.scores, epoch=epoch, num_epochs=self._num_epochs, rng=generator(stream)
        )

    def _count(self, mine: int, doing: str) -> NDArray[np.int64]:
        """int64[num_decks]: One number of every deck. Collective.

        Also the point that no rank passes, to report again, before all have read the scores.
        """
        everyone = self.world.allgather_array(np.array([mine]), doing=doing)[:, 0]
        return everyone[[self.world.rank_of_replica(int(r)) for r in self._decks.leaders]]

    def _start_exchange(self, steps: range) -> None:
        self._exchange = self._shuffle.begin(
            self.world,
            self._pool.cache,
            self.layout,
            epoch=self.epoch,
            seed=self.seed,
            steps=steps,
            mean_row_bytes=self._mean_row_bytes,
            first_tag=self._first_tag,
        )

    def _ensure_begun(self) -> None:
        """Begin at epoch 0, or at what was restored. Collective the first time."""
        if self._begun:
            return
        state, node = self._pending if self._pending is not None else ({"epoch": 0}, None)
        self._pending = None
        epoch = int(str(state["epoch"]))
        self._pool.ensure(self._placement(epoch), epoch=epoch)
        if node is not None and self.world.local_rank == 0 and self._pool.keeps_scores:
            self._pool.scores[:] = node.scores
        self.world.barrier(doing="restore scores")
        self._begin(epoch, node.selection if node is not None else None)
        self.step = int(str(state.get("step", 0)))
        self._refresh_step = int(str(state.get("refresh_step", 0)))
        self._open_epoch()

    def _open_epoch(self) -> None:
        last = self._num_epochs is not None and self.epoch + 1 >= self._num_epochs
        if self._num_leaving and not last:
            self._start_exchange(range(self.step, self._plan.order.steps))

    def _turn(self) -> None:
        """Close the running epoch and begin the next. Collective."""
        started = time.perf_counter()
        self._stop_prefetch()
        if self._importance is not None:
            self.world.barrier(doing="report the epoch's scores")
        if self._num_leaving:
            self._finish_exchange()
            self._pool.commit(self.epoch + 1)
        if self._shuffle.holds_all and self._pool.keeps_scores:
            self._spread_scores()
        self._begin(self.epoch + 1)
        self._open_epoch()
        self._figures.turn_s += time.perf_counter() - started

    def _finish_exchange(self) -> None:
        if self._exchange is None:
            self._start_exchange(range(0))
        assert self._exchange is not None
        done = self._exchange.finish(self._pool.scores if self._pool.keeps_scores else None)
        self._exchange = None
        self._figures.exchanged_rows += int(done["rows"])
        self._figures.exchanged_bytes += int(done["sent_bytes"])
        self._figures.exchange_messages += int(done["messages"])
        self._figures.exchange_blocked_s += done["blocked_s"]
        self._figures.exchange_overlap_fraction = done["overlap_fraction"]

    def _spread_scores(self) -> None:
        """Give every node all nodes' reports of the epoch. Collective."""
        scores = self._pool.scores
        mine = np.flatnonzero(scores["epoch"] == self.epoch)
        leads = self.world.local_rank == 0
        slots = mine.tobytes() if leads else b""
        entries = scores[mine].tobytes() if leads else b""
        all_slots = self.world.allgather(slots, doing="spread the slots of scores")
        all_entries = self.world.allgather(entries, doing="spread scores")
        if leads:
            for theirs, data in zip(all_slots, all_entries, strict=True):
                scores[np.frombuffer(theirs, np.int64)] = np.frombuffer(data, scores.dtype)
        self.world.barrier(doing="take in scores")

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
                return
            self._turn()

    def _is_complete(self) -> bool:
        refreshed = self._refresh_step >= self._refresh_order.steps
        return self.step >= self._plan.order.steps and refreshed

    def __len__(self) -> int:
        """Count this epoch's steps, the same on every replica; all rows before the first."""
        return self._plan.order.steps if self._begun else self.max_steps(1)

    def max_steps(self, epochs: int) -> int:
        """Count the steps of some epochs with every row visible: the bound of a schedule."""
        return epochs * num_steps(self.layout.share_rows(0), self.batch_size)

    def set_epoch(self, epoch: int) -> None:
        """Go to an epoch, as `DistributedSampler` would. Collective; cheap for the next epoch.

        Any other epoch than the next rebuilds that epoch's placement, from the source where need
        be, and forgets the scores.
        """
        if epoch < 0:
            raise ValueError(f"epoch: {epoch}; give a number >= 0")
        if not self._begun and self._pending is None:
            self._pending = ({"epoch": epoch}, None)
        self._ensure_begun()
        if epoch == self.epoch + 1:
            self._turn()
        elif epoch != self.epoch:
            self._abandon()
            if self.world.local_rank == 0 and self._pool.keeps_scores:
                self._pool.scores[:] = unscored(len(self._pool.scores))
            self._pending = ({"epoch": epoch}, None)
            self._ensure_begun()

    def __iter__(self) -> Iterator[Batch]:
        """Yield the rest of the epoch's batches."""
        self._ensure_begun()
        if self.step >= self._plan.order.steps and self._num_epochs is None:
            self.step = 0
        self._stop_prefetch()
        steps = range(self.step, self._plan.order.steps)
        for batch in self._batches(self._train_batch, steps):
            if self._exchange is not None:
                self._exchange.progress(self.step)
            self.step += 1
            yield batch

    def refresh(self) -> Iterator[Batch]:
        """Yield hidden rows that are due for a new score, to be passed forward and reported.

        Often none; as many batches on every replica. Padding has weight 0, rows weight 1.
        """
        self._stop_prefetch()
        steps = range(self._refresh_step, self._refresh_order.steps)
        for batch in self._batches(self._refresh_batch, steps):
            self._refresh_step += 1
            yield batch

    def _train_batch(self, step: int) -> Batch:
        chosen = self._plan.order.batch(step)
        weight = self._plan.weight(chosen, step)
        return self._gather.batch(chosen, epoch=self.epoch, step=step, weight=weight)

    def _refresh_batch(self, step: int) -> Batch:
        chosen = self._refresh_order.batch(step)
        weight = (np.arange(self.batch_size) < chosen.num_valid).astype(np.float32)
        return self._gather.batch(chosen, epoch=self.epoch, step=step, weight=weight)

    def _batches(self, make: Callable[[int], Batch], steps: range) -> Iterator[Batch]:
        prefetcher: Prefetcher[Batch] = Prefetcher(
            make,
            steps,
            depth=self._prefetch if self._num_threads else 0,
            timeout_s=self.world.timeout_s,
        )
        self._prefetcher = prefetcher
        batches = iter(prefetcher)
        try:
            while True:
                started = time.perf_counter()
                batch = next(batches, None)
                self._figures.wait_s += time.perf_counter() - started
                if batch is None:
                    return
                self._figures.batches += 1
                yield self._delivered(batch)
        finally:
            prefetcher.close()

    def _delivered(self, batch: Batch) -> Batch:
        if self.device is None or self.device.type == "cpu":
            return batch
        return {
            name: value.to(self.device) if isinstance(value, torch.Tensor) else value
            for name, value in batch.items()
        }

    def report(
        self,
        batch: Batch,
        loss: torch.Tensor,
        correct: torch.Tensor | None = None,
        confidence: torch.Tensor | None = None,
    ) -> None:
        """Tell what a batch's rows cost; padding is passed over. Without importance, does nothing.

        Args:
            batch: As delivered.
            loss: float[batch]: One loss a row.
            correct: bool[batch]: Whether the row was predicted right.
            confidence: float[batch]: In [0, 1].

        Raises:
            ValueError: If a tensor does not have one value a row.
        """
        num_rows = len(batch["slot"])
        for name, value in (("loss", loss), ("correct", correct), ("confidence", confidence)):
            if value is not None and tuple(value.shape) != (num_rows,):
                raise ValueError(
                    f"report: {name} has shape {tuple(value.shape)}, expected ({num_rows},), one "
                    "value a row; "
                    f'compute the loss with reduction="none"'
                )
        if self._importance is None or not self._importance.uses_scores:
            return
        slots = batch["slot"].cpu().numpy()
        valid = slots >= 0
        record(
            self._pool.scores,
            slots[valid],
            loss=np.nan_to_num(_array(loss)[valid], nan=np.inf, posinf=np.inf),
            correct=None if correct is None else _array(correct)[valid].astype(np.bool_),
            confidence=None if confidence is None else _array(confidence)[valid],
            epoch=self.epoch,
        )

    def evaluation(self, source: str | Sequence[str] | Source) -> Evaluation:
        """Open another dataset with the same fields, every sample exactly once. Collective.

        It is closed with the loader, if not before.
        """
        opened = _opened(source, self.world, self._throttle)
        evaluation = Evaluation(
            opened,
            self.fields,
            batch_size=self.batch_size,
            world=self.world,
            root=self._root,
            foreign=self._foreign,
            num_threads=self._num_threads,
            prefetch=self._prefetch,
            progress=self._progress,
            deliver=self._delivered,
        )
        self._evaluations.append(evaluation)
        return evaluation

    def state_dict(self) -> dict[str, object]:
        """Say where the loader stands: a few integers and hashes, JSON, under 1 KB."""
        pending = self._pending[0] if self._pending is not None and not self._begun else {}
        return {
            "version": STATE_VERSION,
            "order_version": ORDER_VERSION,
            "seed": self.seed,
            "num_samples": self.num_samples,
            "num_replicas": self.layout.num_replicas,
            "layout": _digest(repr(self.layout)),
            "shuffle": _digest(repr(self._shuffle)),
            "batch_size": self.batch_size,
            "epoch": self.epoch,
            "step": self.step,
            "refresh_step": self._refresh_step,
            **pending,
        }

    def load_state_dict(self, state: dict[str, object]) -> None:
        """Go on from where `state_dict` was taken. Scores are not in it: `restore` has them.

        Raises:
            StateError: If the state is of another dataset, layout, seed or batch size.
        """
        self._check_state(state)
        if self._importance is not None and self._importance.uses_scores:
            log.warning(
                "[rank %d] load_state_dict: the score history is not part of state_dict, so the "
                "hidden rows start anew; use loader.save and loader.restore to keep them",
                self.world.rank,
            )
        self._reset_to(state, None)

    def _reset_to(self, state: dict[str, object], node: NodeSnapshot | None) -> None:
        self._abandon()
        self._pending = (state, node)

    def _check_state(self, state: dict[str, object]) -> None:
        mine = self.state_dict()
        for name in (
            "version",
            "order_version",
            "seed",
            "num_samples",
            "num_replicas",
            "layout",
            "shuffle",
            "batch_size",
        ):
            if state.get(name) != mine[name]:
                raise StateError(
                    f"checkpoint: {name} is {state.get(name)}, this loader has {mine[name]}; make "
                    f"the loader as it was when the checkpoint was written, on as many ranks a node"
                )

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write position, scores and hidden rows into a directory that all nodes see. Collective.

        A directory of that name is replaced only when the new one is whole.
        """
        self._ensure_begun()
        node = NodeSnapshot(
            self._pool.cache.entries.sample_id, self._pool.scores, self._plan.selection
        )
        save_snapshot(Path(path), self.state_dict(), node, self.world)

    def restore(self, path: str | os.PathLike[str]) -> None:
        """Go on exactly where `save` was called. Collective.

        Raises:
            StateError: If nothing was saved there, or by a loader made otherwise.
        """
        found = find_snapshot(Path(path))
        state = load_state(found)
        self._check_state(state)
        node = load_node(found, self.world.node)
        self._reset_to(state, node)
        epoch = int(str(state["epoch"]))
        if not np.array_equal(node.sample_id, self._placement(epoch)):
            raise StateError(
                f"{found}: the rows saved for node {self.world.node} are not those of epoch "
                f"{epoch}; the checkpoint is damaged or of another run: restore an older one"
            )
        self._ensure_begun()

    def order_hash(self) -> str:
        """Hash the sample ids that this replica is given in this epoch, in order: 16 hex digits."""
        self._ensure_begun()
        slots = self._plan.order.slots_at(np.arange(self._plan.order.num_rows))
        return _digest(self._pool.cache.entries.sample_id[slots].tobytes())

    def stats(self) -> dict[str, float]:
        """Figures of this rank since construction; ``hidden_fraction`` is of this epoch.

        Returns:
            Times in seconds, sizes in bytes: ``wait_s`` blocked on batches, ``turn_s`` in epoch
            turns, ``exchange_blocked_s`` of it waiting for partners,
            ``exchange_overlap_fraction`` of the last epoch's arrivals in before, ``staging_s`` and
            ``source_bytes`` reading the source, ``exchanged_rows`` and ``exchanged_bytes`` sent,
            ``queue_depth`` batches ready now.
        """
        hidden = len(self._plan.selection.hidden) if self._begun else 0
        return {
            **vars(self._figures),
            "epoch": self.epoch,
            "step": self.step,
            "hidden_fraction": hidden / self._pool.cache.num_slots,
            "staging_s": self._pool.staging_s,
            "source_bytes": self._source.bytes_read,
            "queue_depth": self._prefetcher.ready if self._prefetcher is not None else 0,
        }

    def _stop_prefetch(self) -> None:
        if self._prefetcher is not None:
            self._prefetcher.close()
            self._prefetcher = None

    def _abandon(self) -> None:
        """Leave the epoch without its exchange taking effect. Collective while one runs."""
        self._stop_prefetch()
        if self._exchange is not None:
            self._exchange.finish(None)
            self._exchange = None
        self._pool.cache.forget_arrivals()
        self._begun = False

    def close(self) -> None:
        """Stop threads, complete messages under way, release the cache. Collective; idempotent."""
        self._abandon()
        self._release()

    def _release(self) -> None:
        self._stop_prefetch()
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


def _opened(
    source: str | Sequence[str] | Source, world: World, throttle: Throttle | None
) -> Source:
    if isinstance(source, (str, Sequence)):
        return open_source(source, world=world, throttle=throttle)
    return source


def _check_arguments(*, batch_size: int, prefetch: int, num_threads: int | None) -> None:
    if batch_size < 1:
        raise ValueError(f"batch_size: {batch_size}; give a number >= 1")
    if prefetch < 0:
        raise ValueError(f"prefetch: {prefetch}; give a number >= 0")
    if num_threads is not None and num_threads < 0:
        raise ValueError(
            f"num_threads: {num_threads}; give a number >= 0, or None for all this rank's cores"
        )


def _share_of_cores(local_size: int) -> int:
    return max(len(os.sched_getaffinity(0)) // local_size, 1)


def _digest(data: str | bytes) -> str:
    raw = data.encode() if isinstance(data, str) else data
    return hashlib.blake2b(raw, digest_size=8).hexdigest()


def _array(values: torch.Tensor) -> NDArray[np.float32]:
    return np.asarray(values.detach().to("cpu", torch.float32).numpy())
