"""One loader for all ranks of a replica: one of them reads, the others get what their stages need.

The reader alone has a `dataio.Loader`, in a world of the readers. A replica of one rank is served
by it directly. All methods are collective among the ranks of a replica, which run the same loop.
"""

import math
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from pathlib import Path
from types import TracebackType
from typing import Self

import numpy as np
import torch
from torch import Tensor

import dataio
from dataio.deliver import Delivery
from dataio.evaluation import Evaluation
from dataio.report import check_report
from dataio.source import Source
from dataio.world import World
from trainer.deliver_relay import END, NUM_TAGS, SCORE_TAG, STATE, Batch
from trainer.deliver_scores import ScoreReceiver, Scores, ScoreSender
from trainer.deliver_stream import Stream
from trainer.place import Place

ROW_COLUMNS = ("weight", "sample_id", "slot")
"""What the loader adds to a batch; the last stage takes it."""

OpenLoader = Callable[[World, torch.device | None], dataio.Loader]


class ReplicaLoader:
    """Stands where a `dataio.Loader` stood, on every rank of a mesh.

    Collective: every rank makes it with the same arguments. Blocks until the readers' nodes have
    staged the data. Batches hold the input columns on ranks that own the first stage; the target
    columns, ``weight``, ``sample_id`` and ``slot`` on those that own the last; nothing elsewhere.

    Args:
        open_loader: Makes the loader in the world of all readers, delivering to a device; called
            on readers alone.
        world: All ranks.
        place: This rank's.
        inputs: Columns that the first stage takes.
        targets: Columns that the last stage takes.
        device: Where batches are delivered.
        guard: Whether every rank of a replica checks that it got the bytes that were read.
        shared_memory: Whether ranks of a node share the reader's batches; off, they get messages.

    Attributes:
        epoch: The running epoch.
        lr_factor: What the policy multiplies the learning rate by in this epoch.

    Raises:
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
        device: torch.device | None = None,
        guard: bool = True,
        shared_memory: bool = True,
    ) -> None:
        self.epoch, self.lr_factor = 0, 1.0
        self._world, self._place = world, place
        self._inputs, self._targets = tuple(inputs), (*targets, *ROW_COLUMNS)
        self._guard, self._shared = guard, shared_memory
        self._tag, self._num_streams = world.open_channel(), 0
        self._is_lone = len(place.ranks) == 1
        self._delivery = Delivery(None if self._is_lone else device)
        self._step = self._num_steps = 0
        self._loss_sum, self._num_losses = torch.zeros((), dtype=torch.float64), 0
        self._loader: dataio.Loader | None = None
        if place.reads:
            whole = len(place.readers) == world.world_size
            readers = world if whole else world.part(place.readers)
            self._loader = open_loader(readers, device if self._is_lone else None)
        self._trains = True
        self._evaluations: list[ReplicaEvaluation] = []
        self._stream = self._open_stream(self._targets)
        self._sender, self._receiver = self._open_scores()
        self._exchange_state(limit_s=math.inf)

    @property
    def step(self) -> int:
        """Batches of the epoch delivered so far."""
        return self._loader.step if self._loader is not None else self._step

    @property
    def held_bytes(self) -> int:
        """Bytes of a batch that this rank takes from the reader; 0 on the reader."""
        return self._stream.held_bytes

    def __len__(self) -> int:
        """Count this epoch's steps, the same on every rank."""
        return len(self._loader) if self._loader is not None else self._num_steps

    def epochs(self, num_epochs: int) -> Iterator[int]:
        """Yield the epochs that remain of a run; see `dataio.Loader.epochs`."""
        if self._loader is None:
            while self._exchange_state(ends=True):
                yield self.epoch
                self._settle()
            return
        for epoch in self._loader.epochs(num_epochs):
            self._exchange_state()
            yield epoch
            # The turn that follows goes by the losses.
            self._settle()
        self._stream.tell(END)

    def __iter__(self) -> Iterator[Batch]:
        """Yield the rest of the epoch's batches."""
        return self._batches(self._loader, trains=True)

    def refresh(self) -> Iterator[Batch]:
        """Yield hidden rows that are due for a new score, to be passed forward and reported."""
        hidden = self._loader.refresh() if self._loader is not None else None
        return self._batches(hidden, trains=False)

    def report(self, batch: Batch, loss: Tensor, correct: Tensor, confidence: Tensor) -> None:
        """Tell what a batch's rows cost; to be called where the last stage is.

        All ranks there give the same; the scorer's counts.

        Args:
            batch: As delivered.
            loss: float[batch]: One loss a row.
            correct: bool[batch]: Whether the row was predicted right.
            confidence: float[batch]: In [0, 1].

        Raises:
            ValueError: If a tensor does not have one value a row, or the batch is none that waits
                for its losses.
        """
        told = {"loss": loss, "correct": correct, "confidence": confidence}
        check_report(len(batch["slot"]), told)
        scores = Scores(loss.detach(), correct, confidence)
        if self._sender is not None:
            self._sender.send(batch["slot"], scores)
        elif self._loader is not None and self._receiver is None:
            self._take(batch["slot"], batch["weight"], scores, self._trains)

    def mean_loss(self) -> float | None:
        """Average the weighted losses of the training batches since the last call.

        Returns:
            The mean over this replica's batches; None if there were none, and on ranks other than
            the reader.
        """
        self._settle()
        if not self._num_losses:
            return None
        mean = float(self._loss_sum) / self._num_losses
        self._loss_sum, self._num_losses = torch.zeros((), dtype=torch.float64), 0
        return mean

    def evaluation(self, source: str | Sequence[str] | Source) -> "ReplicaEvaluation":
        """Open another dataset with the same fields; the last stage gets ``valid`` too."""
        opened = self._loader.evaluation(source) if self._loader is not None else None
        evaluation = ReplicaEvaluation(opened, self._open_stream((*self._targets, "valid")))
        self._evaluations.append(evaluation)
        return evaluation

    def stats(self) -> dict[str, float]:
        """Figures of the reader's loader; none on other ranks."""
        return self._loader.stats() if self._loader is not None else {}

    def order_hash(self) -> str:
        """Hash the sample ids of this epoch, in order; empty on ranks other than the reader."""
        return self._loader.order_hash() if self._loader is not None else ""

    def save(self, path: Path) -> None:
        """Write position, scores and hidden rows, as `dataio.Loader.save`; the readers do."""
        self._settle()
        if self._loader is not None:
            self._loader.save(path)

    def restore(self, path: Path) -> None:
        """Go on exactly where `save` was called; meshes may differ."""
        self._settle()
        if self._loader is not None:
            self._loader.restore(path)
        self._exchange_state(limit_s=math.inf)

    def close(self) -> None:
        """Take in what is under way, release cache and memory. Idempotent."""
        try:
            self._settle()
            if self._loader is not None:
                self._loader.close()
        finally:
            self._let_go()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if error is None:
            self.close()
            return
        # The other ranks may never come: only let go.
        self._let_go()
        if self._loader is not None:
            self._loader.__exit__(kind, error, trace)

    def _batches(self, batches: Iterable[Batch] | None, *, trains: bool) -> Iterator[Batch]:
        for delivered in self._stream.run(batches, first_step=self.step if trains else 0):
            self._trains = trains
            self._step += trains
            number, batch, whole = delivered
            if self._receiver is not None:
                self._receiver.expect(number, whole["slot"], whole["weight"], trains=trains)
            elif self._sender is not None:
                self._sender.expect(number, batch["slot"])
            # Whoever waits for this rank to ask again keeps no batch for it.
            del delivered, whole
            yield batch

    def _take(self, slot: Tensor, weight: Tensor, scores: Scores, trains: bool) -> None:
        assert self._loader is not None, "only the reader takes scores"
        self._loader.report({"slot": slot}, scores.loss, scores.correct, scores.confidence)
        if trains:
            self._loss_sum = self._loss_sum.to(weight.device) + (scores.loss * weight).mean()
            self._num_losses += 1

    def _open_stream(self, targets: Collection[str]) -> Stream:
        first_tag = self._tag + NUM_TAGS * self._num_streams
        self._num_streams += 1
        return Stream(
            self._world, self._place, inputs=self._inputs, targets=targets, first_tag=first_tag,
            guard=self._guard, shared=self._shared, delivery=self._delivery,
        )  # fmt: skip

    def _open_scores(self) -> tuple[ScoreSender | None, ScoreReceiver | None]:
        place, tag = self._place, self._tag + SCORE_TAG
        if place.scorer == place.reader:
            return None, None
        if place.rank == place.scorer:
            return ScoreSender(self._world, reader=place.reader, tag=tag), None
        if place.reads:
            return None, ScoreReceiver(self._world, scorer=place.scorer, tag=tag, take=self._take)
        return None, None

    def _exchange_state(self, *, ends: bool = False, limit_s: float | None = None) -> bool:
        """Tell all ranks of the replica where the reader stands; say whether the run goes on."""
        if self._loader is not None:
            self.epoch, self.lr_factor = self._loader.epoch, self._loader.lr_factor
            factor = int(np.float64(self.lr_factor).view(np.int64))
            self._stream.tell(STATE, self.epoch, self._loader.step, len(self._loader), factor)
            return True
        told = self._stream.hear(*((STATE, END) if ends else (STATE,)), limit_s=limit_s)
        if told is None:
            return False
        self.epoch, self._step, self._num_steps, factor = told[:4]
        self.lr_factor = float(np.int64(factor).view(np.float64))
        return True

    def _settle(self) -> None:
        """Bring all losses that were reported to the reader."""
        if self._sender is not None:
            self._sender.settle()
        if self._receiver is not None:
            self._receiver.settle()

    def _let_go(self) -> None:
        self._stream.close()
        for evaluation in self._evaluations:
            evaluation.close()
        if self._receiver is not None:
            self._receiver.close()


class ReplicaEvaluation:
    """Batches of an evaluation on every rank of a replica; made by `ReplicaLoader.evaluation`."""

    def __init__(self, evaluation: Evaluation | None, stream: Stream) -> None:
        self._evaluation, self._stream = evaluation, stream
        if evaluation is not None:
            self._num_steps = len(evaluation)
            stream.tell(STATE, self._num_steps)
        else:
            # Until its reader has staged it.
            told = stream.hear(STATE, limit_s=math.inf)
            assert told is not None, "nothing ends here"
            self._num_steps = told[0]

    def __len__(self) -> int:
        """Count the batches, the same on every rank."""
        return self._num_steps

    def __iter__(self) -> Iterator[Batch]:
        """Yield all batches."""
        return (delivered.batch for delivered in self._stream.run(self._evaluation))

    def close(self) -> None:
        """Release cache and memory; idempotent."""
        self._stream.close()
        if self._evaluation is not None:
            self._evaluation.close()
