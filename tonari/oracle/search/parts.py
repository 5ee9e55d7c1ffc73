"""What the parts of a model compute, send and keep: each is traced alone, on tensors without data.

Parts are the input layers, each kind of block, and the output layers. A part is traced at one row
and at two, whole, split over tp and over cp, each in the fewest ranks that the search tries. From
these its figures follow for any rows and any number of ranks: each is a constant and a share of
the rows, and of both a part that every rank of tp has whole and a part that they share.
"""

import copy
import math
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from typing import Any, NamedTuple

import torch
from torch import Tensor
from typing_extensions import Self

from tonari.oracle.errors import OracleError
from tonari.oracle.record import Event, Message, Operator
from tonari.oracle.trace import Imagined, alone
from tonari.trainer.config.config import Config
from tonari.trainer.errors import ConfigError
from tonari.trainer.mesh.mesh import make_mesh
from tonari.trainer.mesh.parallelize import split_layers
from tonari.trainer.mesh.recompute import (
    Checkpointing,
    dear_products,
    module_kind,
    recompute,
    saved_bytes,
    worths,
)
from tonari.trainer.mesh.swap import swapped_blocks
from tonari.trainer.models import StagedModel
from tonari.trainer.models.fake import fake_tensors
from tonari.trainer.models.trace import leaves
from tonari.trainer.private.placements import shape_search_replaced
from tonari.trainer.run.build import RunLayout

WHOLE = RunLayout(sizes=(1, 1, 1, 1, 1), num_stages=1, microbatches=1)
"""Of a model on one process."""


class Work(NamedTuple):
    """What a pass over a part asks of a device.

    Attributes:
        flops: Of products, convolutions and attention.
        product_bytes: That these read and write.
        other_bytes: That all other operators read and write.
        operators: Their number.
    """

    flops: float = 0.0
    product_bytes: float = 0.0
    other_bytes: float = 0.0
    operators: float = 0.0


class SentMessage(NamedTuple):
    """A message of a pass, along one axis; see `tonari.oracle.record.Message` for the bytes."""

    kind: str
    num_bytes: float


class Pass(NamedTuple):
    """One way over a part: its work, and its messages along the axis that it is split over."""

    work: Work
    sent: tuple[SentMessage, ...] = ()


class Passes(NamedTuple):
    """A part's passes.

    Attributes:
        forward: Over the part.
        backward: Back over it, without what is computed again.
        again: Of the forward pass, the work that selective recomputation repeats.
    """

    forward: Pass
    backward: Pass
    again: Work


class PassesByRows(NamedTuple):
    """The same at one row and at two: what grows with the rows, and what does not."""

    one: Passes
    two: Passes


class Parameter(NamedTuple):
    """A parameter's shape, and the dimension that tp splits; None: each rank has it whole."""

    shape: tuple[int, ...]
    split: int | None


@dataclass(frozen=True, kw_only=True, eq=False)
class Part:
    """A part of the model, as it was traced.

    Attributes:
        name: Of the part, for people.
        parameters: All of them.
        whole: Its passes on one process.
        split: Its passes on one of `tp` ranks, by whether sequence_parallel is on.
        apart: Its passes on one of `cp` ranks at one row, of which only messages count; None: it
            was not traced so.
        tp: Ranks of `split`.
        cp: Ranks of `apart`.
        kept_bytes: That autograd keeps of one row and of two, by the kind of recomputation.
    """

    name: str
    parameters: tuple[Parameter, ...]
    whole: PassesByRows
    split: dict[bool, PassesByRows]
    apart: Passes | None
    tp: int
    cp: int
    kept_bytes: dict[Checkpointing, tuple[int, int]]

    def work(self, of: Callable[[Passes], Work], rows: float, tp: int, sequential: bool) -> Work:
        """Work out what a rank computes in a pass.

        Args:
            of: Which pass.
            rows: Of a microbatch; a part of a row where cp shares the sequence.
            tp: Ranks that share the part.
            sequential: Whether sequence_parallel is on.
        """
        whole = _at_rows(of(self.whole.one), of(self.whole.two), rows)
        if tp == 1:
            return whole
        found = self.split[sequential]
        split = _at_rows(of(found.one), of(found.two), rows)
        values = []
        for alone_value, split_value in zip(whole, split, strict=True):
            shared = max(split_value * self.tp - alone_value, 0.0) / (self.tp - 1)
            values.append(shared + (alone_value - shared) / tp)
        # As many operators on any number of ranks
        return Work(values[0], values[1], values[2], split.operators)

    def stored(self, rows: int, checkpointing: Checkpointing) -> int:
        """Count the bytes that autograd keeps of so many rows, on one process."""
        one, two = self.kept_bytes[checkpointing]
        return one + (two - one) * (rows - 1)

    @cache  # noqa: B019 (parts live as long as the search)
    def num_parameters(self, tp: int, shards: int) -> int:
        """Count the parameters of the fullest of so many ranks."""
        total = 0
        for shape, split in self.parameters:
            own = [*shape]
            if split is not None:
                own[split] = math.ceil(own[split] / tp)
            if own and shards > 1:
                own[0] = math.ceil(own[0] / shards)
            total += math.prod(own)
        return total


def _at_rows(one: Work, two: Work, rows: float) -> Work:
    more = rows - 1
    return Work(
        max(one.flops + (two.flops - one.flops) * more, 0.0),
        max(one.product_bytes + (two.product_bytes - one.product_bytes) * more, 0.0),
        max(one.other_bytes + (two.other_bytes - one.other_bytes) * more, 0.0),
        max(one.operators + (two.operators - one.operators) * more, 0.0),
    )


@dataclass(frozen=True, eq=False)
class Parts:
    """A model in parts.

    Attributes:
        model: The whole of it, without data.
        stem: The input layers.
        head: The output layers.
        kinds: Of its blocks.
        kind_of_block: The number of each block's kind.
        by_worth: Numbers of the kinds, those first that are computed again first.
    """

    model: StagedModel
    stem: Part
    head: Part
    kinds: tuple[Part, ...]
    kind_of_block: tuple[int, ...]
    by_worth: tuple[int, ...]

    @cached_property
    def all(self) -> tuple[Part, ...]:
        """The stem, the head, and each kind of block."""
        return (self.stem, self.head, *self.kinds)

    def counts(self, blocks: Sequence[int], *, first: bool, last: bool) -> tuple[int, ...]:
        """Count the parts of `all` that a rank has."""
        found = [0] * len(self.kinds)
        for number in blocks:
            found[self.kind_of_block[number]] += 1
        return (int(first), int(last), *found)

    @classmethod
    def of(cls, config: Config, model: StagedModel, *, tp: int, cp: int, sequential: bool) -> Self:
        """Trace a model's parts. The process must not be part of a job.

        Args:
            config: The settings; of the mesh only the precision and loss_parallel count.
            model: Of the config, whole and without data.
            tp: The fewest ranks over which the search splits it; 1: none.
            cp: The fewest ranks over which it splits the sequence; 1: none.
            sequential: Whether the search tries sequence_parallel.

        Raises:
            ConfigError: If this process is part of a job.
            OracleError: If its parts cannot be run on tensors without data.
        """
        kinds: dict[object, int] = {}
        numbers = [
            kinds.setdefault(module_kind(block, int(number)), len(kinds))
            for number, block in model.blocks.items()
        ]
        cuts = {"input layers": (range(0), True, False), "output layers": (range(0), False, True)}
        for kind in kinds.values():
            first = numbers.index(kind)
            cuts[f"block {first}"] = (range(first, first + 1), False, False)
        found = []
        for name, (blocks, first, last) in cuts.items():
            # Blocks that are dropped need no copy of their own
            dropped = (block for number, block in model.blocks.items() if int(number) not in blocks)
            part = copy.deepcopy(model, {id(block): block for block in dropped})
            part.keep(blocks, first=first, last=last)
            found.append(_trace_part(name, part, config, tp=tp, cp=cp, sequential=sequential))
        block_worths = worths(model)
        by_worth = sorted(
            range(len(kinds)), key=lambda kind: (-block_worths[numbers.index(kind)], kind)
        )
        return cls(model, found[0], found[1], tuple(found[2:]), tuple(numbers), tuple(by_worth))

    def swapped(self, stage: Sequence[int], swaps: int) -> tuple[int, ...]:
        """Count the blocks of each kind that swap in a stage, so many of them.

        Args:
            stage: The kinds of its blocks, in their order.
            swaps: How many, at the most.
        """
        chosen = swapped_blocks(stage, swaps)
        return tuple(chosen.count(kind) for kind in range(len(self.kinds)))

    def again(
        self, stages: Sequence[tuple[int, ...]], checkpointing: str, blocks: int
    ) -> tuple[int, ...]:
        """Count the parts of `all` that a rank computes again.

        Args:
            stages: Of the rank: how many blocks of each kind each has that do not swap.
            checkpointing: How.
            blocks: Of each stage; 0: all.
        """
        found = [0] * len(self.kinds)
        if checkpointing == "none":
            return (0, 0, *found)
        for stage in stages:
            left = blocks or sum(stage)
            for kind in self.by_worth:
                count = min(stage[kind], left)
                found[kind] += count
                left -= count
        return (0, 0, *found)


def _trace_part(
    name: str, part: StagedModel, config: Config, *, tp: int, cp: int, sequential: bool
) -> Part:
    if config.mesh.dtype != "float32":
        part.to(getattr(torch, config.mesh.dtype))
    if config.mesh.dtype == "bfloat16":
        part.hidden_dtype = torch.bfloat16
    try:
        plain, keeps = _Traced(part), "blocks" if name.startswith("block") else ""
        split = {
            on: _Traced(part, tp=tp, sequential=on, loss_parallel=config.mesh.loss_parallel)
            for on in ((False, True) if sequential else (False,))
            if tp > 1
        }
        apart = _Traced(part, cp=cp).rows.one if cp > 1 else None
        kept = {
            "none": _kept(part), "selective": plain.selective if keeps else _kept(part),
            "full": _kept(part, recomputes=True),
        }  # fmt: skip
    except ConfigError:
        raise
    except Exception as error:
        raise OracleError(
            f"the {name} of {config.model.kind} cannot be run alone on tensors without data, by "
            f"which the search prices them: {type(error).__name__}: {error}; time the settings in "
            "question one by one, with `tonari probe` and `tonari plan`"
        ) from error
    shapes = split[False].shapes if split else plain.shapes
    return Part(
        name=name,
        parameters=tuple(map(_parameter, plain.shapes, shapes)),
        whole=plain.rows,
        split={on: traced.rows for on, traced in split.items()},
        apart=apart,
        tp=tp,
        cp=cp,
        kept_bytes=kept,  # type: ignore[arg-type]
    )


def _parameter(whole: tuple[int, ...], own: tuple[int, ...]) -> Parameter:
    differ = [axis for axis, (a, b) in enumerate(zip(whole, own, strict=True)) if a != b]
    return Parameter(whole, differ[0] if differ else None)


class _Traced:
    """Passes over a part as one rank makes them; what it records is in `rows` and `shapes`.

    Along cp only messages count, which grow with the rows: one row stands for two as well.
    """

    def __init__(
        self, part: StagedModel, *, tp: int = 1, cp: int = 1, sequential: bool = False,
        loss_parallel: bool = False,
    ) -> None:  # fmt: skip
        own = copy.deepcopy(part)
        with alone(0, tp * cp):
            mesh = make_mesh((1, 1, 1, cp, tp), device_type="cpu")
            if cp > 1:
                own.use_context_parallel(mesh["cp"])
            if tp > 1:
                own.num_hidden_parts = tp if sequential else 1
                with warnings.catch_warnings():
                    # The plan is that of the whole model
                    warnings.filterwarnings("ignore", "Parallelize plan key")
                    split_layers(
                        own, mesh, sequence_parallel=sequential, loss_parallel=loss_parallel
                    )
            self.shapes = [_local(parameter) for parameter in own.parameters()]
            self._kept: list[int] = []
            with fake_tensors():
                own.to_empty(device="cpu")
                one = self._run(own, 1)
                if cp > 1:
                    self.rows = PassesByRows(one, one)
                    return
                # The first time, gradients are not added to those of another microbatch
                one = self._run(own, 1)
                self.rows = PassesByRows(one, self._run(own, 2))

    @property
    def selective(self) -> tuple[int, int]:
        """Bytes that selective recomputation keeps of one row and of two."""
        return self._kept[0], self._kept[-1]

    def _run(self, part: StagedModel, rows: int) -> Passes:
        recorder = _Unplaced()
        values = _inputs(part, rows)
        with recorder:
            recorder.mark()
            made = [leaf for leaf in leaves(part(*values)) if leaf.requires_grad]
            forward = recorder.events
            recorder.mark()
            if made:
                torch.autograd.backward(made, [torch.empty_like(leaf) for leaf in made])
            backward = recorder.events
        dear = {str(operator) for operator in dear_products()}
        results = [e for e in forward if isinstance(e, Operator) and e.name in dear]
        given = sum(value.nbytes for value in values if value.is_floating_point())
        self._kept.append(given + sum(map(_first_bytes, results)))
        repeated = [e for e in forward if isinstance(e, Operator) and e.name not in dear]
        return Passes(_pass(forward), _pass(backward), _work(repeated))


class _Unplaced(Imagined):  # type: ignore[no-untyped-call]
    """A recorder that leaves out what torch runs to find how to place what is split."""

    def __init__(self) -> None:
        super().__init__()
        self._places = False

    def patches(self) -> list[Any]:
        """Make what sees torch run an operator on no ranks' tensors, for their shapes."""

        def watched(plain: Callable[..., Any]) -> Callable[..., Any]:
            def find_shapes(propagator: object, schema: object) -> Any:
                self._places = True
                try:
                    return plain(propagator, schema)
                finally:
                    self._places = False

            return find_shapes

        return [*super().patches(), shape_search_replaced(watched)]

    def compute(self, func: Any, args: tuple[Any, ...], named: dict[str, Any]) -> Any:
        """Carry out an operator, and record it if it is one of the part's."""
        if self._places:
            return self.call(func, args, named)
        return super().compute(func, args, named)

    def _count(self, made: list[Tensor]) -> None:
        """Leave memory out, which nobody asks for here."""


def _local(parameter: Tensor) -> tuple[int, ...]:
    to_local = getattr(parameter, "to_local", None)
    return tuple((parameter if to_local is None else to_local()).shape)


def _inputs(part: StagedModel, rows: int) -> list[Tensor]:
    return [
        torch.empty(shape.shape, dtype=shape.dtype, requires_grad=shape.requires_grad)
        for shape in leaves(part.input_shape(rows))
    ]


def _first_bytes(operator: Operator) -> int:
    dtype: torch.dtype = getattr(torch, operator.dtype)
    return math.prod(operator.outputs[0]) * dtype.itemsize


def _kept(part: StagedModel, *, recomputes: bool = False) -> tuple[int, int]:
    own = copy.deepcopy(part)
    with fake_tensors():
        own.to_empty(device="cpu")
        if recomputes:
            for block in own.blocks.values():
                recompute(block, selective=False)
        return saved_bytes(own, _inputs(own, 1)), saved_bytes(own, _inputs(own, 2))


def _pass(events: Sequence[Event]) -> Pass:
    sent = [SentMessage(e.kind, float(e.num_bytes)) for e in events if isinstance(e, Message)]
    return Pass(_work([e for e in events if isinstance(e, Operator)]), tuple(sent))


def _work(operators: Sequence[Operator]) -> Work:
    products = [each for each in operators if each.flops]
    others = [each for each in operators if not each.flops and each.moved_bytes]
    return Work(
        flops=sum(each.flops for each in products),
        product_bytes=sum(each.moved_bytes for each in products),
        other_bytes=sum(each.moved_bytes for each in others),
        operators=len(products) + len(others),
    )
