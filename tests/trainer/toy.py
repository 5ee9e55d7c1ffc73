"""A model of float64 linear blocks on sequences of numbers, cut into stages and spread by hand."""

import copy
import warnings
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)

from tonari.trainer.mesh.parallelize import left_whole
from tonari.trainer.mesh.place import Place

NUM_BLOCKS, LENGTH, WIDTH, NUM_CLASSES = 4, 4, 4, 4


class Block(nn.Module):
    """An inner layer twice as wide."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, values: Tensor) -> Tensor:
        """Add to the values what the layers make of them."""
        change: Tensor = self.down(torch.tanh(self.up(values)))
        return values + change


class Toy(nn.Module):
    """float64[batch, length, width] to logits of each place."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleDict({str(number): Block() for number in range(NUM_BLOCKS)})
        self.head: nn.Module | None = nn.Linear(WIDTH, NUM_CLASSES)
        self.length = LENGTH

    def forward(self, values: Tensor) -> Tensor:
        """Pass the layers that are here."""
        for block in self.blocks.values():
            values = block(values)
        return values if self.head is None else self.head(values)

    def keep(self, blocks: range, *, last: bool) -> None:
        """Drop all but some blocks."""
        self.blocks = nn.ModuleDict({str(number): self.blocks[str(number)] for number in blocks})
        if not last:
            self.head = None

    def input_shape(self, batch_size: int) -> Tensor:
        """Describe what comes in."""
        shape = (batch_size, self.length, WIDTH)
        return torch.empty(shape, dtype=torch.float64, device="meta", requires_grad=True)

    def output_shape(self, batch_size: int) -> Tensor:
        """Describe what goes out: as many classes as the width."""
        return self.input_shape(batch_size)


class Places:
    """Labels of each place of a sequence, over cp ranks; counts how often it was asked."""

    def __init__(self, mesh: DeviceMesh | None = None) -> None:
        self.cp = None if mesh is None else mesh["cp"]
        self.parts = 1 if self.cp is None else self.cp.size()
        self.calls = 0

    def _part(self, values: Tensor) -> Tensor:
        number = 0 if self.cp is None else self.cp.get_local_rank()
        return values.chunk(self.parts, dim=1)[number].contiguous()

    def input(self, batch: dict[str, Tensor]) -> Tensor:
        """Take this rank's part of the numbers."""
        return self._part(batch["x"])

    def target(self, batch: dict[str, Tensor]) -> Tensor:
        """Take this rank's part of the labels."""
        return self._part(batch["label"])

    def losses(self, logits: Tensor, target: Tensor) -> Tensor:
        """Compute this rank's part of the mean loss of a row."""
        self.calls += 1
        by_place = F.cross_entropy(logits.flatten(0, 1), target.flatten(), reduction="none")
        return by_place.view(target.shape).sum(dim=1) / LENGTH

    def outcome(self, logits: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
        """Say whether half of the places are right, and how sure they are. Collective over cp."""
        right = (logits.argmax(dim=2) == target).double().sum(dim=1) / LENGTH
        sure = logits.softmax(dim=2).amax(dim=2).sum(dim=1) / LENGTH
        if self.cp is not None:
            for values in (right, sure):
                dist.all_reduce(values, group=self.cp.get_group())
        return right >= 0.5, sure.float()


def make_toy() -> Toy:
    """Make the same weights everywhere."""
    with torch.random.fork_rng():
        torch.manual_seed(5)
        return Toy().double()


def make_batch(number: int, rows: slice) -> dict[str, Tensor]:
    """Make some rows of a global batch; every fifth is padding, of weight 0."""
    rng = torch.Generator().manual_seed(number)
    size = 16
    weight = torch.rand(size, generator=rng) + 0.5
    weight[number % 5 :: 5] = 0
    whole = {
        "x": torch.randn(size, LENGTH, WIDTH, generator=rng, dtype=torch.float64),
        "label": torch.randint(NUM_CLASSES, (size, LENGTH), generator=rng),
        "weight": weight,
        "valid": weight > 0,
    }
    return {name: column[rows] for name, column in whole.items()}


def spread(model: Toy, mesh: DeviceMesh, place: Place) -> list[Toy]:
    """Make this rank's parts."""
    num_stages = len(place.stages) * mesh["pp"].size()
    parts = [copy.deepcopy(model) for _ in place.stages]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        mesh["dp_shard", "cp"]._flatten("dp_shard_cp")
        data_parallel = mesh["dp_replicate", "dp_shard_cp"]
    for stage, part in zip(place.stages, parts, strict=True):
        cut = [number * NUM_BLOCKS // num_stages for number in (stage, stage + 1)]
        part.keep(range(*cut), last=stage == num_stages - 1)
        part.length = LENGTH // mesh["cp"].size()
        plan: dict[str, Any] = {
            "blocks.*.up": ColwiseParallel(),
            "blocks.*.down": RowwiseParallel(),
        }
        if mesh["tp"].size() > 1:
            parallelize_module(part, mesh["tp"], plan)
        if data_parallel.size() == 1 or left_whole(part, mesh):
            continue
        for block in part.blocks.values():
            fully_shard(block, mesh=data_parallel)
        fully_shard(part, mesh=data_parallel)
    return parts


def gradients(parts: list[Toy]) -> dict[str, list[float]]:
    """Take the whole gradients of a rank's parts, by parameter. Collective."""
    found = {}
    for part in parts:
        for name, parameter in part.named_parameters():
            grad = parameter.grad
            assert grad is not None, (
                name,
                [n for n, p in part.named_parameters() if p.grad is None],
            )
            whole = grad.full_tensor() if isinstance(grad, DTensor) else grad
            found[name] = whole.flatten().tolist()
    return found
