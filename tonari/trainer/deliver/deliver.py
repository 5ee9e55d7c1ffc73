"""One loader for all ranks of a replica: one of them reads, the others get what their stages need.

The reader alone has a `dataio.Loader`, in a world of the readers. A replica of one rank is served
by it directly. Where the last stage, on another node, reads its targets, the scorer has a loader
too, in a world of the scorers; the two deal the same rows, as all that they know is the same, the
losses included. All methods are collective among the ranks of a replica, which run the same loop.
"""

import math
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from typing_extensions import Self

import dataio
from dataio.batch.feed import DeviceDelivery
from dataio.rows.samples import Batch
from dataio.source import Shards, Source
from dataio.source.classes import Classes
from dataio.state.report import check_report
from dataio.world import World
from tonari.trainer.deliver.evaluation import ReplicaEvaluation
from tonari.trainer.deliver.losses import MeanLoss
from tonari.trainer.deliver.reader_pair import meet
from tonari.trainer.deliver.relay import END, HEADER_TAG, NUM_TAGS, SCORE_TAG, STATE, RelayRoute
from tonari.trainer.deliver.scores import Awaited, ScoreReceiver, Scores, ScoreSender
from tonari.trainer.deliver.stream import Stream
from tonari.trainer.mesh.place import Place, Targets, feed_of, last_stage_reads, tile_of

ROW_COLUMNS = ("weight", "sample_id", "slot")
"""What the loader adds to a batch; the last stage takes it."""

OWN = ("_s", "_bytes", "_written", "batches")
"""Ends of the names of figures that are a loader's own: times, bytes and the batches that it gave,
not rows or shares."""

OpenLoader = Callable[[World, torch.device | None, Collection[str]], dataio.Loader]


class ReplicaLoader:
    """Stands where a `dataio.Loader` stood, on every rank of a mesh.

    Collective: every rank makes it with the same arguments. Blocks until the readers' nodes have
    staged the data. Batches hold the input columns on ranks that own the first stage; the target
    columns, ``weight``, ``sample_id`` and ``slot`` on those that own the last; nothing elsewhere.

    Args:
        open_loader: Makes the loader in the world of all readers, delivering to a device, with
            these columns at least; called on readers alone.
        world: All ranks.
        place: This rank's.
        inputs: Columns that the first stage takes.
        targets: Columns that the last stage takes.
        targets_by: How the last stage gets its columns where it is on another node than the first:
            ``"send"``: from the reader. ``"read"``: the scorer reads them, and only them.
        by_tile: Whether each tile of a sample has a reader of its own, in a world of these. All
            deal the same rows. The first tile's stands for the replica.
        device: Where batches are delivered.
        guard: Whether every rank of a replica checks that it got the bytes that were read, and the
            reader that the rows scored were those.
        shared_memory: Whether ranks of a node share the reader's batches; off, they get messages.

    Attributes:
        epoch: The running epoch.
        lr_factor: What the policy multiplies the learning rate by in this epoch.
        steps_before: As `dataio.Loader.steps_before`.
        needs_outcome: As `dataio.Loader.needs_outcome`; the same on all ranks of a replica.

    Raises:
        ConfigError: If the scorers cannot read their targets: see `last_stage_reads`.
        StallError: From any method, if the reader or the scorer does not come in time.
        DeliveryError: If a batch came otherwise than it was read, or columns have no fixed shape.
    """

    def __init__(
        self,
        open_loader: OpenLoader,
        *,
        world: World,
        place: Place,
        inputs: Collection[str],
        targets: Collection[str],
        targets_by: Targets = "send",
        by_tile: bool = False,
        device: torch.device | None = None,
        guard: bool = True,
        shared_memory: bool = True,
    ) -> None:
        self.epoch, self.lr_factor, self.steps_before = 0, 1.0, 0.0
        self.needs_outcome = False
        self._is_reader, (*_, cp, tp) = place.reads, place.sizes
        # Of this replica, one for each tile.
        self._readers = [place.reader + tile * tp for tile in range(cp if by_tile else 1)]
        place = tile_of(place) if by_tile else place
        self._world, self._place = world, place
        apart = last_stage_reads(place, world.topology.node_of_rank, targets_by)
        self._feed = feed = feed_of(place, last_stage_reads=apart)
        self._inputs = tuple(inputs) if feed.input_ranks else ()
        self._targets = (*targets, *ROW_COLUMNS) if feed.target_ranks else ()
        self._guard, self._shared = guard, shared_memory
        self._tag, self._num_streams = world.open_channel(), 0
        self._delivery = DeviceDelivery(None if place.is_lone else device)
        self._step = self._num_steps = 0
        self._losses = MeanLoss()
        self._loader: dataio.Loader | None = None
        if feed.reads:
            whole = len(feed.readers) == world.world_size
            readers = world if whole else world.part(feed.readers)
            columns = {*self._inputs, *self._targets}.difference(ROW_COLUMNS)
            self._loader = open_loader(readers, device if place.is_lone else None, columns)
        self._trains = True
        self._evaluations: list[ReplicaEvaluation] = []
        self._stream = self._open_stream(self._targets)
        if self._loader is not None and self._stream.goes_ahead:
            self._loader.look_ahead(self._stream.take_ahead)
        self._sender, self._receiver = self._open_scores()
        self._meet()
        self._exchange_state(limit_s=math.inf)

    @property
    def step(self) -> int:
        """Batches of the epoch delivered so far."""
        return self._loader.step if self._loader is not None else self._step

    @property
    def num_samples(self) -> int:
        """Samples of the dataset; 0 where nothing is read."""
        return 0 if self._loader is None else self._loader.num_samples

    @property
    def excluded(self) -> str:
        """How much of them is left out; see `dataio.Loader.excluded`."""
        return "" if self._loader is None else self._loader.excluded

    @property
    def lost_with_ranks(self) -> str:
        """As `dataio.Loader.lost_with_ranks`."""
        return "" if self._loader is None else self._loader.lost_with_ranks

    @property
    def held_bytes(self) -> int:
        """Bytes of a batch that this rank takes from its reader; 0 on a rank that reads."""
        return self._stream.held_bytes

    def __len__(self) -> int:
        """Count this epoch's steps, the same on every rank."""
        return len(self._loader) if self._loader is not None else self._num_steps

    def epochs(self, num_epochs: int) -> Iterator[int]:
        """Yield the epochs that remain of a run; see `dataio.Loader.epochs`."""
        if self._loader is None:
            while self._exchange_state(ends=True):
                yield self.epoch
                self._complete_scores()
            return
        for epoch in self._loader.epochs(num_epochs):
            self._exchange_state()
            yield epoch
            # The end of the epoch, which follows, goes by the losses.
            self._complete_scores()
        self._stream.send_header(END)

    def __iter__(self) -> Iterator[Batch]:
        """Yield the rest of the epoch's batches."""
        return self._batches(self._loader, trains=True)

    def skip(self, num_batches: int) -> None:
        """Pass over the next batches of the epoch; see `dataio.Loader.skip`."""
        self._complete_scores()
        self._stream.break_off()
        if self._loader is not None:
            self._loader.skip(num_batches)
        self._step += num_batches

    def refresh(self) -> Iterator[Batch]:
        """Yield hidden rows that are due for a new score, to be passed forward and reported."""
        hidden = self._loader.refresh() if self._loader is not None else None
        return self._batches(hidden, trains=False)

    def report(
        self,
        batch: Batch,
        loss: Tensor,
        correct: Tensor | None = None,
        confidence: Tensor | None = None,
    ) -> None:
        """Report what a batch's rows cost; to be called where the last stage is.

        All ranks there give the same; the scorer's counts.

        Args:
            batch: As delivered.
            loss: float[batch]: One loss a row.
            correct: bool[batch]: Whether the row was predicted right. None, with confidence, where
                nobody goes by it: see ``needs_outcome``.
            confidence: float[batch]: In [0, 1].

        Raises:
            ValueError: If a tensor does not have one value a row, or the batch is none that waits
                for its losses.
        """
        if self._loader is None or self._receiver is not None:
            check_report(batch, {"loss": loss, "correct": correct, "confidence": confidence})
        scores = Scores(loss.detach() if loss.requires_grad else loss, correct, confidence)
        if self._sender is not None:
            self._sender.send(batch["slot"], scores)
        if self._loader is not None and self._receiver is None:
            self._take(batch, scores, trains=self._trains)

    def mean_loss(self) -> float | None:
        """Average the weighted losses of the training batches since the last call.

        Returns:
            The mean over this replica's batches; None if there were none, and on ranks other than
            the reader.
        """
        self._complete_scores()
        return self._losses.take()

    def evaluation(
        self,
        source: str | Sequence[str] | Source | Shards,
        *,
        fields: Mapping[str, dataio.Field] | None = None,
        transform: Callable[..., Any] | None = None,
        classes: Classes = "same",
    ) -> ReplicaEvaluation:
        """Open another dataset; the last stage gets ``valid`` too.

        Args:
            source: The dataset.
            fields: Its fields, of all columns; None: the loader's own.
            transform: Of a sample, as of `dataio.Loader.evaluation`.
            classes: As of `dataio.Loader.evaluation`.
        """
        opened = None
        if self._loader is not None:
            own = self._loader.fields
            if fields is not None:
                fields = {name: field for name, field in fields.items() if name in own}
            opened = self._loader.evaluation(
                source, fields=fields, transform=transform, classes=classes
            )
        self._meet()
        targets = (*self._targets, "valid") if self._targets else ()
        evaluation = ReplicaEvaluation(opened, self._open_stream(targets))
        self._evaluations.append(evaluation)
        return evaluation

    def stats(self) -> dict[str, float]:
        """Figures of the reader's loader; of a scorer's own its times and bytes; or no figures."""
        figures = self._loader.stats() if self._loader is not None else {}
        if self._is_reader:
            return figures
        return {name: value for name, value in figures.items() if name.endswith(OWN)}

    def order_hash(self) -> str:
        """Hash the sample ids of this epoch, in order; empty on ranks that do not read."""
        return self._loader.order_hash() if self._loader is not None else ""

    def save(self, path: Path) -> None:
        """Write position, scores and hidden rows, as `dataio.Loader.save`; the readers do."""
        self._complete_scores()
        if self._loader is not None and self._is_reader:
            self._loader.save(path)
        elif self._loader is not None:
            # It goes on from what the readers write: the same.
            self._loader.flush()

    def restore(self, path: Path) -> None:
        """Go on exactly where `save` was called; meshes may differ."""
        self._complete_scores()
        if self._loader is not None:
            self._loader.restore(path)
        self._meet()
        self._exchange_state(limit_s=math.inf)

    def state_dict(self) -> dict[str, object]:
        """Where the readers stand; empty on ranks that do not read."""
        return self._loader.state_dict() if self._loader is not None else {}

    def remember(self) -> Any:
        """As `dataio.Loader.remember`."""
        return None if self._loader is None else self._loader.remember()

    def count(self, state: dict[str, object]) -> None:
        """As `dataio.Loader.count`."""
        if self._loader is not None:
            self._loader.count(state)

    def go_on(self, state: dict[str, object], remembered: Sequence[Any]) -> None:
        """As `dataio.Loader.go_on`, on the same coordinates but for replicas."""
        if self._loader is not None:
            self._loader.go_on(state, remembered)
            self._loader.is_used_up()  # the epoch runs from here on
        self._meet()
        self._exchange_state(limit_s=math.inf)

    def close(self) -> None:
        """Take in what is under way, release cache and memory. Idempotent."""
        try:
            self._complete_scores()
            self._stream.break_off()
            if self._loader is not None:
                self._loader.close()
        finally:
            self._let_go()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is None:
            self.close()
            return
        # The other ranks may never come: only let go.
        self._let_go()
        if self._loader is not None:
            self._loader.__exit__(kind)

    def _batches(self, batches: Iterable[Batch] | None, *, trains: bool) -> Iterator[Batch]:
        first_step = self.step if trains else 0
        stream = self._stream.run(batches, first_step=first_step)
        for step, delivered in enumerate(stream, first_step):
            self._trains = trains
            self._step += trains
            number, batch, whole, ids_hash = delivered
            if self._receiver is not None:
                rows = {name: whole[name] for name in ROW_COLUMNS}
                awaited = Awaited(rows=rows, ids_hash=ids_hash, step=step, trains=trains)
                self._receiver.expect(number, awaited)
            elif self._sender is not None:
                self._sender.expect(number, batch["slot"], ids_hash=ids_hash)
            # Whoever waits for this rank to ask again keeps no batch for it.
            del delivered, whole
            yield batch

    def _take_awaited(self, batch: Awaited, scores: Scores) -> None:
        self._take(batch.rows, scores, trains=batch.trains)

    def _take(self, batch: Batch, scores: Scores, *, trains: bool) -> None:
        assert self._loader is not None, "only who reads takes scores"
        self._loader.report(batch, scores.loss, scores.correct, scores.confidence)
        if trains and self._is_reader:
            self._losses.add(scores.loss, batch["weight"])

    def _open_stream(self, targets: Collection[str]) -> Stream:
        first_tag = self._tag + NUM_TAGS * self._num_streams
        self._num_streams += 1
        route = RelayRoute(
            world=self._world, place=self._feed, inputs=self._inputs, targets=targets,
            first_tag=first_tag, guard=self._guard, shared=self._shared,
        )  # fmt: skip
        return Stream(route, self._delivery)

    def _open_scores(self) -> tuple[ScoreSender | None, ScoreReceiver | None]:
        place, tag = self._place, self._tag + SCORE_TAG
        if place.scorer == place.reader:
            return None, None
        if place.rank == place.scorer:
            return ScoreSender(self._world, reader=place.reader, tag=tag), None
        if place.reads:
            receiver = ScoreReceiver(
                self._world, scorer=place.scorer, tag=tag, take=self._take_awaited
            )
            return None, receiver
        return None, None

    def _meet(self) -> None:
        """Wait, where several ranks read for a replica, until all of them have their rows."""
        place, loader = self._place, self._loader
        if loader is None:
            return
        others = []
        if self._feed.ranks != place.ranks:
            others.append(place.scorer if place.reads else place.reader)
        if place.reads:
            others += self._readers[1:] if self._is_reader else self._readers[:1]
        for other in others:
            meet(loader, world=self._world, other=other, tag=self._tag + HEADER_TAG)

    def _exchange_state(self, *, ends: bool = False, limit_s: float | None = None) -> bool:
        """Send all ranks of the feed the position of its reader; return whether the run goes on."""
        if self._loader is not None:
            self.epoch, self.lr_factor = self._loader.epoch, self._loader.lr_factor
            self.steps_before = self._loader.steps_before
            self.needs_outcome = self._loader.needs_outcome
            words = np.array([self.lr_factor, self.steps_before]).view(np.int64).tolist()
            self._stream.send_header(
                STATE, self.epoch, self._loader.step, len(self._loader), *words, self.needs_outcome
            )
            return True
        header = self._stream.receive_header(*((STATE, END) if ends else (STATE,)), limit_s=limit_s)
        if header is None:
            return False
        self.epoch, self._step, self._num_steps, *words, needs_outcome = header[:6]
        self.needs_outcome = bool(needs_outcome)
        self.lr_factor, self.steps_before = np.array(words).view(np.float64).tolist()
        return True

    def _complete_scores(self) -> None:
        """Bring all losses that were reported to the replica's reader."""
        if self._sender is not None:
            self._sender.complete()
        if self._receiver is not None:
            self._receiver.complete()

    def _let_go(self) -> None:
        self._stream.close()
        for evaluation in self._evaluations:
            evaluation.close()
        if self._receiver is not None:
            self._receiver.close()
