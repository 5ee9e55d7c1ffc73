"""What each rank of a mesh writes down of a short run, for one process to do the same."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from dataio.rows.samples import Batch
from tonari.trainer.checkpoint.state import plain_name
from tonari.trainer.run.observed import Begun, Observer
from tonari.trainer.run.step import EvaluationMeans, Step, TakesReports

Columns = dict[str, Tensor]


class Cut(NamedTuple):
    """How a tensor is cut along one axis of a mesh.

    Attributes:
        axis: Its name.
        dim: Of the tensor; None: whole on each rank.
        last: Whether other axes cut the same dimension first.
        here: The rank's coordinate.
        parts: Ranks along the axis.
    """

    axis: str
    dim: int | None
    last: bool
    here: int
    parts: int


@dataclass(frozen=True)
class Held:
    """A tensor that a rank holds, whole or a part.

    Attributes:
        kind: ``"weight"``, ``"buffer"``, ``"average"`` of one of these over the steps, or the
            optimizer's name of what it remembers.
        name: Of the parameter or buffer, in the plain module.
        module: What kind of module it belongs to.
        stage: Of the pipeline.
        value: The part that is here.
        cuts: How it was cut.
    """

    kind: str
    name: str
    module: str
    stage: int
    value: Tensor
    cuts: tuple[Cut, ...]

    def part_of(self, whole: Tensor) -> Tensor:
        """Cut what one process holds as this rank's was cut."""
        for cut in sorted(self.cuts, key=lambda each: each.last):
            if cut.dim is not None:
                pieces = whole.chunk(cut.parts, dim=cut.dim)
                empty = whole.narrow(cut.dim, 0, 0)
                whole = pieces[cut.here] if cut.here < len(pieces) else empty
        return whole

    @property
    def shown(self) -> str:
        """Say where it lies."""
        split = [
            f"{cut.axis} {cut.here} of {cut.parts} (cut by dimension {cut.dim})"
            for cut in self.cuts
            if cut.dim is not None and cut.parts > 1
        ]
        return ", ".join([f"stage {self.stage}", *split])


@dataclass(frozen=True)
class RecordedStep:
    """A step as one rank saw it.

    Attributes:
        number: In the run, from 0.
        lr: Its learning rate.
        norm: Of the gradients, on all ranks the same.
        batches: Its columns; none where the rank neither reads nor scores.
        losses: One a row of each batch, where the rank scores.
    """

    number: int
    lr: float
    norm: float
    batches: list[Columns]
    losses: list[Tensor]


@dataclass
class Recorded:
    """What one rank saw of a start of the run.

    Attributes:
        rank: Of the job.
        replica: Its replica.
        place: Its coordinates in the mesh, in words.
        reads, scores: Whether its columns, and its losses, are those of its replica.
        goes_on: Whether the start went on from a checkpoint.
        steps: In their order.
        averaged: Numbers of steps after which batch statistics were averaged.
        evaluations: After which step, the batches, and what came out.
        average_evaluations: What came out of the averaged weights, if there are any.
        states: What it held after a step; that of ``restored`` as it was read from a checkpoint.
    """

    rank: int
    replica: int
    place: str
    reads: bool
    scores: bool
    goes_on: bool
    steps: list[RecordedStep] = field(default_factory=list)
    averaged: list[int] = field(default_factory=list)
    evaluations: list[tuple[int, list[Columns], EvaluationMeans]] = field(default_factory=list)
    average_evaluations: list[EvaluationMeans] = field(default_factory=list)
    states: dict[int, list[Held]] = field(default_factory=dict)
    restored: list[Held] = field(default_factory=list)


class RankState(NamedTuple):
    """What a rank held at a time.

    Attributes:
        rank: What to call it.
        replica: Its replica.
        tensors: Of it.
    """

    rank: str
    replica: int
    tensors: Sequence[Held]


class Ranks:
    """What all ranks saw of one start of the run.

    Args:
        found: Of each, in their order.
    """

    def __init__(self, found: Sequence[Recorded]) -> None:
        self._found = found
        self.num_replicas = 1 + max(each.replica for each in found)

    @property
    def first(self) -> Recorded:
        """Rank 0, for what all ranks saw alike."""
        return self._found[0]

    def step_batches(self, step: int) -> list[list[Columns]]:
        """Take the rows of a step, by its place: of each batch those of each replica."""
        count = len(self.first.steps[step].batches)
        return [
            [
                _join(each.steps[step].batches[number] for each in self._of(replica))
                for replica in range(self.num_replicas)
            ]
            for number in range(count)
        ]

    def evaluation_batches(self, number: int) -> list[list[Columns]]:
        """Take the rows of an evaluation, by its place: of each replica its batches."""
        count = len(self.first.evaluations[number][1])
        return [
            [
                _join(each.evaluations[number][1][batch] for each in self._of(replica))
                for batch in range(count)
            ]
            for replica in range(self.num_replicas)
        ]

    def losses(self, step: int, batch: int, replica: int) -> Tensor:
        """Take the losses of a batch's rows, where they were computed."""
        (scorer,) = [each for each in self._of(replica) if each.scores]
        return scorer.steps[step].losses[batch]

    def states(self, number: int | None) -> list[RankState]:
        """List what ranks held after a step of that number; None: as a checkpoint was read."""
        return [
            RankState(
                f"rank {each.rank}: {each.place}", each.replica,
                each.restored if number is None else each.states[number],
            )
            for each in self._found
        ]  # fmt: skip

    def _of(self, replica: int) -> Iterator[Recorded]:
        yield from (each for each in self._found if each.replica == replica)


def _join(columns: Iterable[Columns]) -> Columns:
    """Put the columns of a replica's reader and of its scorer together."""
    found: Columns = {}
    for each in columns:
        found |= each
    return found


class StepRecorder(Observer):
    """Writes down a start of a run.

    Args:
        keep: Numbers of the steps after which the whole state is kept.
    """

    def __init__(self, keep: Iterable[int]) -> None:
        self._keep = frozenset(keep)
        self.found: Recorded | None = None
        self._batches: list[Columns] = []
        self._losses: list[Tensor] = []
        self._done = 0

    def begin(self, run: Begun) -> None:
        """Find who this rank is, and its parameters: FSDP shows gathered ones later."""
        place, sizes = run.pipeline.place, run.pipeline.mesh
        axes = sizes.mesh_dim_names or ()
        here = [
            f"{axis} {sizes.get_local_rank(axis)} of {size}"
            for axis, size in zip(axes, sizes.shape, strict=True)
            if size > 1
        ]
        self.found = Recorded(
            rank=place.rank, replica=place.replica, place=", ".join(here) or "alone",
            reads=place.reads, scores=place.rank == place.scorer,
            goes_on=run.checkpoint is not None,
        )  # fmt: skip
        self._parts, self._optimizer = run.pipeline.parts, run.optimizer
        self._stages, self._average = place.stages, run.average or {}
        self._parameters = [dict(part.named_parameters()) for part in self._parts]
        self._done = run.progress.steps
        if run.checkpoint is not None:
            self.found.restored = self._state()

    @property
    def wants_norm(self) -> bool:
        return True

    def reports(self, loader: TakesReports) -> TakesReports:
        """Note the losses on their way to the loader."""
        self._losses = []
        return Noting(loader, self._losses)

    def stepping(self, batches: Sequence[Batch]) -> None:
        """Copy what the next step is given."""
        self._batches = [self._columns(batch) for batch in batches]

    def step(self, batches: Sequence[Batch], step: Step, *, number: int, lr: float) -> None:
        """Note the step, and the state after it."""
        assert self.found is not None, "a run begins"
        assert step.norm is not None, "asked for"
        self._done = number + 1
        self.found.steps.append(
            RecordedStep(number, lr, float(step.norm), self._batches, self._losses)
        )
        if number in self._keep:
            self.found.states[number] = self._state()

    def buffers_averaged(self) -> None:
        """Note after which step."""
        if self.found is not None:
            self.found.averaged.append(self._done - 1)

    def evaluating(self, batches: Iterable[Batch]) -> Iterator[Batch]:
        """Note the batches of an evaluation."""
        self._evaluated: list[Columns] = []
        for batch in batches:
            self._evaluated.append(self._columns(batch))
            yield batch

    def evaluated(self, found: EvaluationMeans) -> None:
        """Note what it gave."""
        assert self.found is not None, "a run begins"
        self.found.evaluations.append((self._done - 1, self._evaluated, found))

    def average_evaluated(self, found: EvaluationMeans) -> None:
        """Note what the averaged weights gave."""
        assert self.found is not None, "a run begins"
        self.found.average_evaluations.append(found)

    def _columns(self, batch: Batch) -> Columns:
        assert self.found is not None, "a run begins"
        if not (self.found.reads or self.found.scores):
            return {}
        return tensors_of(batch)

    def _state(self) -> list[Held]:
        found: list[Held] = []
        for number, (part, stage) in enumerate(zip(self._parts, self._stages, strict=True)):
            for name, parameter in self._parameters[number].items():
                first = plain_name(f"{number}.{name}", self._parts)
                kind = _owner(part, name)
                found.append(_held("weight", first, kind, stage, parameter))
                if (mean := self._average.get(f"{number}.{name}")) is not None:
                    found.append(_held("average", first, kind, stage, mean))
                for what, value in sorted(self._optimizer.state.get(parameter, {}).items()):
                    if isinstance(value, (Tensor, int, float)):
                        remembered = value if isinstance(value, Tensor) else torch.tensor(value)
                        found.append(_held(what, first, kind, stage, remembered))
            saved = set(part.state_dict())
            first_names = {id(buffer): name for name, buffer in part.named_buffers()}
            for name, buffer in part.named_buffers(remove_duplicate=False):
                if name in saved:
                    plain, kind = plain_name(f"{number}.{name}"), _owner(part, name)
                    found.append(_held("buffer", plain, kind, stage, buffer))
                    mean = self._average.get(f"{number}.{first_names[id(buffer)]}")
                    if mean is not None:
                        found.append(_held("average", plain, kind, stage, mean))
        return found


class Noting:
    """Stands before a loader and keeps the losses that it is given."""

    def __init__(self, loader: TakesReports, losses: list[Tensor]) -> None:
        self._loader, self._losses = loader, losses

    @property
    def needs_outcome(self) -> bool:
        return self._loader.needs_outcome

    def report(
        self, batch: Batch, loss: Tensor, correct: Tensor | None, confidence: Tensor | None
    ) -> None:
        self._losses.append(loss.detach().cpu().clone())
        self._loader.report(batch, loss, correct, confidence)


def tensors_of(batch: Batch) -> Columns:
    """Copy the columns of a batch: the loader may write the next one where it lies.

    Numbers of 16 bits without a sign become wider, as torch does not pickle them.
    """
    return {
        name: value.detach().to("cpu", torch.int32 if value.dtype == torch.uint16 else None).clone()
        for name, value in batch.items()
        if isinstance(value, Tensor)
    }


def _owner(part: nn.Module, name: str) -> str:
    return type(part.get_submodule(name.rpartition(".")[0])).__name__


def _held(kind: str, name: str, module: str, stage: int, value: Tensor) -> Held:
    cuts: list[Cut] = []
    value = value.detach()
    if isinstance(value, DTensor):
        mesh = value.device_mesh
        for axis, placement in enumerate(value.placements):
            names = mesh.mesh_dim_names
            cuts.append(
                Cut(
                    names[axis] if names else str(axis), getattr(placement, "dim", None),
                    hasattr(placement, "split_factor"), mesh.get_local_rank(axis), mesh.size(axis),
                )
            )  # fmt: skip
        value = value.to_local()
    return Held(kind, name, module, stage, value.cpu().clone(), tuple(cuts))
