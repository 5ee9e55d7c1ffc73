"""What it takes to average gradients over replicas, as they are and compressed."""

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import get_args

import torch
from torch import nn

from tonari.oracle.costs import Machine
from tonari.oracle.record import Message, Watcher
from tonari.oracle.trace import alone
from tonari.trainer.config.optimizer import Compressed, OptimizerConfig
from tonari.trainer.mesh.average import average_gradients
from tonari.trainer.mesh.compress import Compression
from tonari.trainer.mesh.mesh import AXES, make_mesh

MOST_NUMBERS = 1 << 24
"""Of the gradients that are compressed here; more are taken to cost in proportion."""


@dataclass(frozen=True, kw_only=True)
class GradientPlan:
    """A way to average gradients over ``dp_replicate`` once, beside nothing else.

    Attributes:
        kind: Of ``optimizer.compress_gradients``.
        sent_bytes: By a rank: its part in rings.
        sending_s: Of the messages of all replicas.
        computing_s: Of packing and compressing, timed on a core of this machine.
    """

    kind: str
    sent_bytes: int
    sending_s: float
    computing_s: float

    @property
    def seconds(self) -> float:
        """Of both, one after the other."""
        return self.sending_s + self.computing_s


def plan_gradients(
    model: nn.Module, optimizer: OptimizerConfig, machine: Machine, sizes: Sequence[int]
) -> tuple[GradientPlan, ...]:
    """Price each way, by what it sends, which the way itself is run for, on one core here.

    Args:
        model: The whole one, without data.
        optimizer: Its rank of PowerSGD.
        machine: Prices messages.
        sizes: Ranks along each of ``tonari.trainer.mesh.mesh.AXES``: of dp_replicate and dp_shard.
    """
    shapes = [
        (-(-its.shape[0] // sizes[AXES.index("dp_shard")]), *its.shape[1:])
        for its in model.parameters() if its.requires_grad and its.dim()
    ]  # fmt: skip
    part = nn.ParameterList(nn.Parameter(torch.zeros(shape)) for shape in _some(shapes))
    whole, some = (sum(torch.Size(each).numel() for each in of) for of in (shapes, _some(shapes)))
    world_size = torch.Size(sizes).numel()
    plans = []
    with alone(0, world_size):
        mesh = make_mesh(tuple(sizes), device_type="cpu")
        group = mesh.get_group("dp_replicate")
        ranks = tuple(mesh["dp_replicate"].mesh.tolist())
        for kind in get_args(Compressed):
            compression = None
            if kind != "none":
                compression = Compression(
                    [part], mesh, kind=kind, rank=optimizer.compress_rank, warmup_steps=0, seed=0
                )
            taken = []
            for _ in range(3):
                for parameter in part:
                    parameter.grad = torch.full_like(parameter, 1e-3)
                began = time.perf_counter()
                with Watcher() as watcher:
                    if compression is None:
                        average_gradients(part, group)
                    else:
                        compression.average(0)
                taken.append(time.perf_counter() - began)
                messages = [each for each in watcher.events if isinstance(each, Message)]
            # Those of one message are as many, of however many numbers.
            scaled = [(each.kind, round(each.num_bytes * whole / some)) for each in messages]
            ways = sum(num_bytes * (1 + (of == "all_reduce")) for of, num_bytes in scaled)
            plans.append(GradientPlan(
                kind=kind, sent_bytes=ways * (len(ranks) - 1) // len(ranks),
                sending_s=sum(machine.message(of, ranks, size).seconds for of, size in scaled),
                computing_s=min(taken) * whole / some,
            ))  # fmt: skip
    return tuple(plans)


def _some(shapes: Sequence[tuple[int, ...]]) -> Iterator[tuple[int, ...]]:
    """Take shapes of as many numbers as are compressed here; the first in any case."""
    total = 0
    for shape in shapes:
        if total <= MOST_NUMBERS:
            yield shape
        total += torch.Size(shape).numel()
