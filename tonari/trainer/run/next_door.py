"""A copy of each rank's piece of the weights, on a rank of another node, that is never behind.

FSDP alone keeps each piece of the weights on one rank. Here its owner sends the gradient of the
piece to another rank, which takes the same step with a copy: so one piece a step is sent, not the
three of weights and moments. All ranks have received before the norm of the gradients is measured.
So who has the norm knows that each copy can take the step, and no step that counts is ever undone.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from tonari.trainer.run.ema import WeightAverage

if TYPE_CHECKING:
    from dataio.job.live import LiveJob


def find_holders(node_of_rank: Sequence[int]) -> list[int]:
    """Choose for each rank which one holds the copy of its piece: each holds one.

    It is on another node, unless more than half of the ranks are on one.

    Args:
        node_of_rank: The node of each rank.
    """
    num_ranks, most = len(node_of_rank), max(Counter(node_of_rank).values())
    by_node = sorted(range(num_ranks), key=node_of_rank.__getitem__)
    far = max(min(most, num_ranks - most), 1)
    held_by = {rank: by_node[(k + far) % num_ranks] for k, rank in enumerate(by_node)}
    return [held_by[rank] for rank in range(num_ranks)]


class CutWeights:
    """Weights of one rank, cut along their first dimension, and what steps change with them.

    Args:
        weights: The model's, in order.
        optimizer: Of those that are trained.
        average: Of all of them, if there is one.
        num_rows: Of each weight, when it is whole.
    """

    def __init__(
        self, weights: Sequence[nn.Parameter], optimizer: Optimizer, average: WeightAverage | None,
        num_rows: Sequence[int],
    ) -> None:  # fmt: skip
        self.weights, self.optimizer, self.average = weights, optimizer, average
        self.num_rows = num_rows

    def tensors(self) -> list[tuple[int, Tensor]]:
        """List what is here of each tensor, in place, beside its rows when it is whole."""
        pairs = [*zip(self.num_rows, self.weights, strict=True)]
        held = [] if self.average is None else self.average.held.parameters()
        averages = zip(self.num_rows, held, strict=self.average is not None)
        remembered = (
            (rows, value)
            for rows, weight in pairs
            for _, value in sorted(self.optimizer.state.get(weight, {}).items())
            if _is_cut(value)
        )
        return [(rows, local(its)) for rows, its in (*pairs, *averages, *remembered)]

    def describe(self) -> list[dict[str, Any]]:
        """Describe in plain values what the optimizer remembers of each weight."""
        states = (self.optimizer.state.get(weight, {}) for weight in self.weights)
        return [{name: _describe(value) for name, value in its.items()} for its in states]

    def fit(self, described: Sequence[Mapping[str, Any]]) -> None:
        """Have the optimizer remember as much as is described, and zeros of what is cut."""
        for weight, its in zip(self.weights, described, strict=True):
            if its:
                state = {name: _restore(value, weight) for name, value in its.items()}
                self.optimizer.state[weight] = state


class PieceCopies:
    """This rank's piece, and its copy of another one's.

    Args:
        job: The ranks.
        parts: The model, of which this rank has a piece.
        optimizer: Of that piece.
        average: Of that piece, if there is one.

    Attributes:
        numbers: Of the ranks, in the order of the pieces.
        index: Of the own piece.
        copied: Of the piece that is copied here; the own one if this rank is alone.
        are_apart: Whether each piece and its copy are on two nodes; also of one rank alone.
    """

    def __init__(
        self, job: LiveJob, parts: Sequence[nn.Module], optimizer: Optimizer,
        average: WeightAverage | None,
    ) -> None:  # fmt: skip
        weights = [*nn.ModuleList(parts).parameters()]
        self._own = CutWeights(weights, optimizer, average, [len(each) for each in weights])
        self._world, self.numbers = job.world, job.ranks
        nodes = job.world.topology.node_of_rank
        self._holders = find_holders(nodes)
        self.are_apart = len(nodes) == 1 or all(
            nodes[rank] != nodes[holder] for rank, holder in enumerate(self._holders)
        )
        self.index = job.world.rank
        self.copied = self._holders.index(self.index)
        self._twin: CutWeights | None = None
        self._flat: list[Tensor] = []

    def can_spare(self, left: Collection[int]) -> bool:
        """Whether ranks that are left, by their numbers, have all pieces."""
        pairs = zip(self.numbers, self._holders, strict=True)
        return all(own in left or self.numbers[holder] in left for own, holder in pairs)

    def begin(self, before: PieceCopies | None, providers: Sequence[int]) -> None:
        """Take the own piece from ranks that have it, and have another rank copy it. Collective.

        Args:
            before: Pieces that this rank has of the last step that counts, if it has any.
            providers: For each of such pieces a rank that gives it; empty: the own one is right.
        """
        everyone, own = range(self._world.world_size), self._own
        if providers:
            here = {} if before is None else {before.index: before._own}
            if before is not None and before._twin is not None:
                here[before.copied] = before._twin
            first = here.get(0) if providers[0] == self.index else None
            text = b"" if first is None else json.dumps(first.describe()).encode()
            texts = self._world.allgather(text, doing="cutting weights anew")
            own.fit(json.loads(texts[providers[0]]))
            self._deal(here, providers, everyone, own)
        if len(everyone) > 1:
            self._twin = twin = self._make_twin()
            twin.fit(own.describe())
            copied = [self._holders.index(rank) for rank in everyone]
            self._deal({self.index: own}, everyone, copied, twin)

    def share_gradients(self) -> None:
        """Send the gradients of the own piece, and receive those of the copied one. Collective."""
        if self._twin is None:
            return
        pairs = zip(self._own.weights, self._twin.weights, strict=True)
        trained = [(mine.grad, its) for mine, its in pairs if mine.grad is not None]
        if not trained:  # on any rank: a draw may leave out all weights
            return
        grads = [local(grad).flatten() for grad, _ in trained]
        sizes = [its.numel() for _, its in trained]
        lengths = [sum(map(len, grads)), sum(sizes)]
        if [*map(len, self._flat)] != lengths:
            self._flat = [grads[0].new_empty(length) for length in lengths]
        out, into = self._flat
        torch.cat(grads, out=out)
        works = [
            call(_bytes(flat), rank)
            for call, flat, rank in (
                (dist.isend, out, self._holders[self.index]), (dist.irecv, into, self.copied),
            )
            if len(flat)
        ]  # fmt: skip
        _wait(works)
        for (_, its), grad in zip(trained, torch.split(into, sizes), strict=True):
            its.grad = grad.view_as(its)

    def step(self, norm: Tensor, *, clip: float, steps: int) -> None:
        """Take with the copy the step that its owner takes. Sends nothing.

        Args:
            norm: Of all gradients.
            clip: Its largest.
            steps: Of the run that are done, this one included.
        """
        twin = self._twin
        if twin is None:
            return
        nn.utils.clip_grads_with_norm_(twin.weights, clip, norm)
        groups = zip(self._own.optimizer.param_groups, twin.optimizer.param_groups, strict=True)
        for mine, its in groups:
            its.update({name: value for name, value in mine.items() if name != "params"})
        twin.optimizer.step()
        twin.optimizer.zero_grad()
        if twin.average is not None:
            twin.average.update(steps)

    def _make_twin(self) -> CutWeights:
        """Make an empty piece of the shape of the one that is copied."""
        own, num_pieces = self._own, self._world.world_size
        weights = [
            nn.Parameter(
                local(mine).new_empty(len(_rows(rows, self.copied, num_pieces)), *mine.shape[1:]),
                requires_grad=mine.requires_grad,
            )
            for rows, mine in zip(own.num_rows, own.weights, strict=True)
        ]
        of_own = dict(zip(map(id, own.weights), weights, strict=True))
        kind: Any = type(own.optimizer)
        optimizer = kind([
            {**group, "params": [of_own[id(each)] for each in group["params"]]}
            for group in own.optimizer.param_groups
        ])  # fmt: skip
        average = None
        if own.average is not None:
            average = WeightAverage([nn.ParameterList(weights)], decay=own.average.decay)
        return CutWeights(weights, optimizer, average, own.num_rows)

    @torch.no_grad()
    def _deal(
        self, here: Mapping[int, CutWeights], providers: Sequence[int], wanted: Sequence[int],
        into: CutWeights,
    ) -> None:  # fmt: skip
        """Send pieces, cut anew. Collective.

        Args:
            here: Those that this rank has, by their numbers.
            providers: Which rank gives each of them.
            wanted: Number of the piece that each rank gets, of as many as there are ranks.
            into: Gets it.
        """

        def common(piece: CutWeights, own: tuple[int, int], other: tuple[int, int]) -> list[Tensor]:
            """List of each tensor of a piece the rows that are of another one, too."""
            cuts = ((each, _rows(n, *own), _rows(n, *other)) for n, each in piece.tensors())
            return [
                each[max(its.start - mine.start, 0) : max(its.stop - mine.start, 0)]
                for each, mine, its in cuts
            ]

        olds = [(old, len(providers)) for old in range(len(providers))]
        news = [(new, len(wanted)) for new in wanted]
        works = [
            dist.isend(_bytes(part), rank)
            for old, piece in sorted(here.items())
            for rank, new in enumerate(news) if self.index == providers[old] != rank
            for part in common(piece, olds[old], new) if part.numel()
        ]  # fmt: skip
        mine = news[self.index]
        for old, provider in enumerate(providers):
            parts = common(into, mine, olds[old])
            if provider == self.index:
                for part, its in zip(parts, common(here[old], olds[old], mine), strict=True):
                    part.copy_(its)
            else:
                for part in parts:
                    if part.numel():
                        dist.recv(_bytes(part), provider)
        _wait(works)


def _wait(works: Sequence[dist.Work | None]) -> None:
    for work in works:
        assert work is not None, "of a member of the group"
        work.wait()


def local(value: Tensor) -> Tensor:
    """Take what this rank has of a tensor, in place."""
    value = value.detach()
    return value.to_local() if isinstance(value, DTensor) else value


def _bytes(value: Tensor) -> Tensor:
    return value.view(-1).view(torch.uint8)


def _rows(num_rows: int, index: int, num_pieces: int) -> range:
    """Say which rows of a tensor are of a piece, as torch cuts it."""
    each = -(-num_rows // num_pieces)
    return range(min(index * each, num_rows), min((index + 1) * each, num_rows))


def _is_cut(value: object) -> bool:
    return isinstance(value, Tensor) and value.dim() > 0


def _describe(value: Any) -> Any:
    if not isinstance(value, Tensor):
        return value
    return [str(value.dtype).removeprefix("torch."), None if value.dim() else value.item()]


def _restore(described: Any, like: Tensor) -> Any:
    if not isinstance(described, list):
        return described
    dtype, number = getattr(torch, described[0]), described[1]
    if number is None:
        return torch.zeros_like(like, dtype=dtype, requires_grad=False)
    return torch.tensor(number, dtype=dtype)
