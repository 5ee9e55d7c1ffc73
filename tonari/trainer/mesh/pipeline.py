"""One batch forward and back through the stages, on any mesh: gradients, and a score a row."""

import contextlib
import itertools
import math
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from typing import NamedTuple, Protocol, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.pipelining.schedules import (
    PipelineScheduleMulti,
    PipelineScheduleSingle,
    get_schedule_class,
)
from torch.distributed.tensor import DTensor

from dataio.rows.samples import Batch
from tonari.trainer.errors import ConfigError
from tonari.trainer.mesh.average import add_partial_gradients, average_gradients, check_alike
from tonari.trainer.mesh.compress import Compression
from tonari.trainer.mesh.contracts import check_losses, check_outcome
from tonari.trainer.mesh.place import FOLDED, LOOPED, Place, Schedule, num_stages, stages_of
from tonari.trainer.mesh.randomness import Randomness
from tonari.trainer.mesh.stage import Stage
from tonari.trainer.mesh.tied import Ties
from tonari.trainer.mesh.unequal import Unequal, sharing_groups
from tonari.trainer.models.given import Inputs
from tonari.trainer.models.trace import leaves

TORCH_NAMES: dict[Schedule, str] = {
    "gpipe": "GPipe",
    "1f1b": "1F1B",
    "interleaved": "Interleaved1F1B",
    "zero_bubble": "InterleavedZeroBubble",
    "zbv": "ZBVZeroBubble",
    "dualpipev": "DualPipeV",
}


class Scored(NamedTuple):
    """What a batch's rows got, in their order.

    Attributes:
        loss: floating[batch], not weighted, in the precision that it was computed in.
        right_fraction: bool or floating[batch]: The share of a row's answers that are right. None
            where no outcome was asked for.
        confidence: float32[batch]. None where no outcome was asked for.
    """

    loss: Tensor
    right_fraction: Tensor | None = None
    confidence: Tensor | None = None

    @property
    def correct(self) -> Tensor | None:
        """Say which rows are right, bool[batch]: those most of whose answers are."""
        return None if self.right_fraction is None else self.right_fraction > 0.5


class Judge(Protocol):
    """What a pipeline asks of a task."""

    def input(self, batch: Batch) -> Inputs: ...

    def target(self, batch: Batch) -> Tensor: ...

    def losses(self, logits: Tensor, target: Tensor) -> Tensor: ...

    def outcome(self, logits: Tensor, target: Tensor) -> tuple[Tensor, Tensor]: ...


class StagePart(Protocol):
    """What a pipeline asks of a stage's module beside being called."""

    def input_shape(self, batch_size: int) -> Tensor | tuple[Tensor, ...]: ...

    def output_shape(self, batch_size: int) -> Tensor | tuple[Tensor, ...]: ...


def check_microbatches(
    *, batch_size: int, microbatches: int, pp: int, schedule: Schedule, virtual: int = 1
) -> None:
    """Refuse numbers that a schedule cannot divide a batch by.

    Args:
        batch_size: Rows of a replica's batch.
        microbatches: Parts of a batch.
        pp: Ranks of a pipeline.
        schedule: The order of their work.
        virtual: Stages a rank, where the schedule is looped.

    Raises:
        ConfigError: Names the number to change.
    """
    if batch_size % microbatches:
        raise ConfigError(
            f"mesh.microbatches is {microbatches}, which does not divide data.batch_size "
            f"{batch_size}; choose a number that does"
        )
    stages = num_stages(pp, schedule, virtual)
    if schedule in ("1f1b", "dualpipev") and stages > 1 and microbatches < stages:
        raise ConfigError(
            f"mesh.microbatches is {microbatches}, expected at least {stages}: schedule "
            f'"{schedule}" keeps one under way in each of its {stages} stages; choose more, or '
            f"mesh.schedule=gpipe"
        )
    rounds = max(microbatches // pp, 1)
    if schedule in LOOPED and microbatches % rounds:
        raise ConfigError(
            f'mesh.microbatches is {microbatches}, but schedule "{schedule}" deals them in '
            f"{rounds} equal rounds; choose a multiple of mesh.pp, {pp}"
        )


MOST_BATCHES = 1 << 20
"""Of one step; numbers of batches of steps are that far apart."""

MOST_WITHOUT_GRADIENT = 8
"""Passes in a row, from the first on, that may leave out all weights by a draw."""


class Pipeline:
    """Trains and scores batches of one shape. Its methods are collective over a replica.

    Gradients are left where torch leaves them, averaged over the replicas.

    Args:
        parts: The stages that this rank owns, in the order of ``place.stages``.
        place: Who this rank is.
        mesh: With the axes of ``tonari.trainer.mesh.mesh.AXES``.
        task: What to take from a batch, and how to judge the answers.
        schedule: The order of a pipeline's work.
        microbatches: Parts of a batch that are under way at a time.
        batch_size: Rows of a replica's batch.
        device: Where the parts are.
        seed: Of what the model draws, such as dropout.
        sequence_parallel: Whether tp peers hold different activations between layers.
        is_own: Whether the model is the user's: forward passes may leave out weights, and draw.
        compression: Averages gradients over dp_replicate; None: that is done without it.

    Attributes:
        compression: As given.
        parts: As given.
        place: As given.
        mesh: As given.
        device: As given.

    Raises:
        ConfigError: If the numbers do not fit the schedule.
    """

    def __init__(
        self,
        parts: Sequence[nn.Module],
        place: Place,
        mesh: DeviceMesh,
        task: Judge,
        *,
        schedule: Schedule,
        microbatches: int,
        batch_size: int,
        device: torch.device,
        seed: int = 0,
        sequence_parallel: bool = False,
        is_own: bool = True,
        compression: Compression | None = None,
    ) -> None:
        self.compression, self._number = compression, 0
        pp = place.sizes[0]
        check_microbatches(
            batch_size=batch_size, microbatches=microbatches, pp=pp, schedule=schedule,
            virtual=len(parts),
        )  # fmt: skip
        self.parts, self.place, self.mesh, self.device = list(parts), place, mesh, device
        self._task = task
        self._task_draws: bool = vars(type(task)).get("draws", True)
        self._draws = is_own or self._task_draws
        self._cp = mesh["cp"]
        # To ask a mesh takes as long as a small layer.
        self._cp_size = self._cp.size()
        # Each rank of cp has a part of a row's loss, or with tiles all of it.
        self._loss_parts = 1 if place.tiles else self._cp_size
        self._sharing = sharing_groups(mesh)
        # Compression averages over the first of them.
        self._plain_sharing = self._sharing if compression is None else self._sharing[1:]
        plain = [part for part in parts if not isinstance(part, FSDPModule)]
        self._split = plain * (mesh["tp"].size() > 1)
        # What a plan of tp leaves to chance shows in the first gradients.
        self._is_checked = mesh["tp"].size() == 1
        self._rows = torch.arange(batch_size).chunk(microbatches)
        self._batch_size = batch_size
        self._syncs = True
        self._passes_without_gradient: float = 0
        # Of the batch at hand.
        self._target = self._weight = torch.empty(0)
        self._judges = True
        self._share: float | Tensor = 1.0
        self._scores: list[Scored] = []
        self._stages: list[Stage] = []
        self._schedule = None
        pp_rank = {
            stage: row for row in range(pp) for stage in stages_of(row, pp, schedule, len(parts))
        }
        rank_of_stage = [pp_rank[stage] for stage in range(len(pp_rank))]
        self._ties = Ties(self.parts, place.stages, mesh, rank_of_stage)
        # What is drawn of a sample that has tiles is drawn for all of it, and cut.
        apart = 0 if place.tiles else mesh["cp"].get_local_rank()
        if sequence_parallel:
            apart = apart * mesh["tp"].size() + mesh["tp"].get_local_rank()
        # Peers of tp that hold the same values between stages each send a part of them.
        tp = mesh["tp"]
        self._same = tp.get_group() if tp.size() > 1 and not sequence_parallel else None
        self._randomness = Randomness(
            seed=seed, replica=place.replica, microbatches=microbatches, apart=apart, device=device
        )
        for part in self.parts * self._draws:
            self._randomness.attach(part)
        shares = is_own and bool(self._sharing)
        self._unequal = [
            Unequal(part, mesh, ends=pp * len(parts) == 1)
            for part in parts
            if shares and isinstance(part, FSDPModule)
        ]
        if pp > 1:
            self._check_parameters()
        if pp * len(parts) > 1:
            self._stages = self._make_stages()
            self._schedule = self._make_schedule(schedule)

    def train(
        self,
        batch: Batch,
        *,
        share: float | Tensor = 1.0,
        sync: bool = True,
        outcome: bool = True,
        number: int = 0,
    ) -> Scored | None:
        """Add the gradients of a batch's mean of loss x weight.

        Args:
            batch: The columns that this rank needs.
            share: Of this batch in the step, where a step takes several: they sum to 1; float or
                float64[].
            sync: Whether to average what was added up over the replicas: at a step's last batch,
                after which gradients begin at zero again.
            outcome: Whether to judge the answers too, beside the losses: it takes a pass or two
                over all logits. The same on all ranks.
            number: Of the batch in the run, which what the model draws depends on.

        Returns:
            Where this rank owns the last stage, the rows' scores; None elsewhere.

        Raises:
            ValueError: If the batch has another number of rows.
        """
        # torch averages over the ranks of cp, as over replicas.
        self._share = share * self._loss_parts / self._batch_size
        if self.place.has_target:
            self._weight = batch["weight"]
        self._judges, self._number = outcome, number
        with self._randomness.drawing(number) if self._draws else contextlib.nullcontext():
            return self._pass(batch, backward=True, sync=sync)

    @torch.no_grad()
    def forward(self, batch: Batch, *, outcome: bool = True) -> Scored | None:
        """Score a batch as `train` does, and change nothing; evaluation mode is the caller's."""
        self._judges = outcome
        return self._pass(batch, backward=False, sync=False)

    def drawing_alike(self) -> AbstractContextManager[None]:
        """Draw the same whenever it is entered, and leave all generators as they were."""
        return self._randomness.drawing_alike()

    def parameters(self) -> Iterator[nn.Parameter]:
        """List the parameters of all parts."""
        for part in self.parts:
            yield from part.parameters()

    @property
    def of_rank(self) -> dict[str, Tensor]:
        """What a checkpoint holds of this rank alone."""
        return {} if self.compression is None else self.compression.state

    @property
    def task(self) -> Judge:
        """Which columns it reads, and how its answer is judged."""
        return self._task

    @property
    def num_microbatches(self) -> int:
        """Parts of a batch that are under way at a time."""
        return len(self._rows)

    @property
    def again(self) -> set[nn.Parameter]:
        """Parameters that are further copies of a weight of several stages."""
        return self._ties.again

    def _pass(self, batch: Batch, *, backward: bool, sync: bool) -> Scored | None:
        inputs = None
        if self.place.has_input:
            if self._task_draws:
                self._randomness.before_task("input")
            inputs = self._task.input(batch)
            for leaf in leaves(inputs):
                self._take(leaf)
        if self.place.has_target:
            if self._task_draws:
                self._randomness.before_task("target")
            self._target = self._take(self._task.target(batch))
        self._scores = []
        if self._schedule is None:
            assert inputs is not None, "the only stage has the input"
            self._pass_alone(inputs, backward=backward, sync=sync)
        else:
            for stage in self._stages:
                stage.syncs = sync
            self._pass_in_turns(inputs, backward=backward)
        if backward and sync:
            for part in self._split:
                add_partial_gradients(part.parameters(), self.mesh["tp"])
            if not self._is_checked:
                self._is_checked = True
                for part in self.parts:
                    check_alike(part.named_parameters(), self.mesh["tp"])
            for part, group in itertools.product(self.parts, self._plain_sharing):
                whole = [each for each in part.parameters() if not isinstance(each, DTensor)]
                average_gradients(whole, group)
            for each in self._unequal:
                each.settle()
            if self.compression is not None:
                self.compression.average(self._number // MOST_BATCHES)
            self._ties.add_gradients()
        return self._collect() if self.place.has_target else None

    def _pass_alone(self, inputs: Inputs, *, backward: bool, sync: bool) -> None:
        # torch's schedule of one stage would average the gradients after the backward pass; here
        # they are averaged during it.
        (part,) = self.parts
        for number, rows in enumerate(self._rows, 1):
            self._randomness.begin(number - 1)
            losses = self._score(part(_rows_of(inputs, rows)), rows)
            if backward:
                self._set_sync(part, sync and number == len(self._rows))
                # A draw may have left out all weights.
                if losses.requires_grad:
                    # That of the loss below, which to add up forward and back takes operations
                    gradient = _at(self._weight, rows)
                    gradient = gradient.to(torch.promote_types(losses.dtype, gradient.dtype))
                    gradient = (gradient * self._share).to(losses.dtype)
                    losses.backward(gradient)  # type: ignore[no-untyped-call]
                    self._passes_without_gradient = -math.inf
                elif self._passes_without_gradient < MOST_WITHOUT_GRADIENT:
                    self._passes_without_gradient += 1
                else:
                    kind = type(getattr(part, "wrapped", part)).__name__
                    raise ConfigError(
                        f"{kind}: no loss of the first {MOST_WITHOUT_GRADIENT} had a "
                        "gradient, so that nothing was trained; let its forward compute with "
                        "gradients (no torch.no_grad, inference_mode or detach around all of it)"
                    )

    def _set_sync(self, part: nn.Module, sync: bool) -> None:
        if sync != self._syncs and isinstance(part, FSDPModule):
            # Shards of gradients are added up; whole gradients would take a whole part's memory.
            shards = self.mesh["dp_shard"].size() * self._cp_size > 1
            (part.set_requires_all_reduce if shards else part.set_requires_gradient_sync)(sync)
            self._syncs = sync

    def _pass_in_turns(self, inputs: Inputs | None, *, backward: bool) -> None:
        assert self._schedule is not None, "more than one stage"
        run = self._schedule.step if backward else self._schedule.eval
        # Row numbers stand for the target: torch cuts up one tensor, and hands back its pieces.
        target = torch.cat(self._rows) if self.place.has_target else None
        run(*([] if inputs is None else leaves(inputs)), target=target, return_outputs=False)

    def _loss(self, logits: Tensor, rows: Tensor) -> Tensor:
        """Score a microbatch; say its part in the mean of the step."""
        losses = self._score(logits, rows)
        if not torch.is_grad_enabled():
            return losses.sum()
        return (losses * _at(self._weight, rows)).sum() * self._share

    def _score(self, logits: Tensor, rows: Tensor) -> Tensor:
        """Score a microbatch: floating[rows], what is to be descended of each row."""
        target = _at(self._target, rows)
        losses = self._task.losses(logits, target)
        check_losses(losses, rows.shape[0])
        extra = self._extra_loss()
        if extra is not None:
            losses = losses + extra
        scored = Scored(losses.detach())
        if self._judges:
            with torch.no_grad():
                outcome = self._task.outcome(logits.detach(), target)
            check_outcome(*outcome, rows.shape[0])
            scored = Scored(losses.detach(), *outcome)
        self._scores.append(scored)
        return losses

    def _extra_loss(self) -> Tensor | None:
        """Take what the last stage's module wants to descend beside the task's losses, if any."""
        take = getattr(self.parts[-1], "take_extra_loss", None)
        found: Tensor | None = None if take is None else take()
        return found

    def _collect(self) -> Scored:
        scored = self._scores[0]
        if len(self._scores) > 1:
            judged = [[value for value in each if value is not None] for each in self._scores]
            scored = Scored(*map(torch.cat, zip(*judged, strict=True)))
        self._scores = []
        if self._loss_parts > 1:
            dist.all_reduce(scored.loss, group=self._cp.get_group())
        return scored

    def _take(self, column: Tensor) -> Tensor:
        # Stages further on cannot see it: they would wait for rows, or take others' for theirs.
        if column.shape[0] != self._batch_size:
            raise ValueError(
                f"rank {self.place.rank}: a batch of {column.shape[0]} rows, expected "
                f"{self._batch_size}: a pipeline's buffers have one size; pad it with rows of "
                f"weight 0, or make another pipeline for it"
            )
        return column

    def _check_parameters(self) -> None:
        """Refuse a rank that has nothing to train, on all ranks alike. Collective."""
        group = self.mesh.get_group("pp")
        numbers = [torch.zeros((), device=self.device) for _ in range(group.size())]
        mine = sum(1 for _ in self.parameters())
        dist.all_gather(numbers, torch.tensor(float(mine), device=self.device), group=group)
        without = [str(rank) for rank, number in enumerate(numbers) if not number]
        if without:
            raise ConfigError(
                f"mesh.pp: ranks {', '.join(without)} of the pipeline would have layers without "
                "parameters only, expected parameters on each, which its optimizer asks for; "
                "choose a smaller mesh.pp, or put such layers into a block with others"
            )

    def _make_stages(self) -> list[Stage]:
        num_rows = len(self._rows[0])
        for part in self.parts:
            # Schedules that split the backward pass look for weights that the forward pass used.
            # Of blocks that were sharded again they would find none, without an error.
            if isinstance(part, FSDPModule):
                part.set_reshard_after_forward(False)
        # Shapes are given: torch would find them by a first call of the loss, with an answer that
        # no model gave, and would count it.
        return [
            Stage(
                part,
                number,
                self.place.sizes[0] * len(self.parts),
                self.device,
                input_args=cast(StagePart, part).input_shape(num_rows),
                output_args=cast(StagePart, part).output_shape(num_rows),
                group=self.mesh["pp"].get_group(),
                randomness=self._randomness,
                same=self._same,
            )
            for number, part in zip(self.place.stages, self.parts, strict=True)
        ]

    def _make_schedule(self, schedule: Schedule) -> PipelineScheduleSingle | PipelineScheduleMulti:
        several = schedule in LOOPED + FOLDED
        made = get_schedule_class(TORCH_NAMES[schedule])(
            self._stages if several else self._stages[0],
            len(self._rows),
            loss_fn=self._loss,
            # The loss has its scale: torch would pass over all parameters once more.
            scale_grads=False,
        )
        return cast(PipelineScheduleSingle | PipelineScheduleMulti, made)


def _rows_of(inputs: Inputs, rows: Tensor) -> Inputs:
    if isinstance(inputs, Tensor):
        return _at(inputs, rows)
    if isinstance(inputs, dict):
        return {name: _at(each, rows) for name, each in inputs.items()}
    return tuple(_at(each, rows) for each in inputs)


def _at(column: Tensor, rows: Tensor) -> Tensor:
    """Take rows of a batch's column, by their numbers, which follow one another."""
    num_rows = rows.shape[0]
    if num_rows == column.shape[0]:
        return column
    first = int(rows[0])
    return column[first : first + num_rows]
