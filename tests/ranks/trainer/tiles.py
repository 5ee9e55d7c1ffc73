"""Models and functions on tiles: reports how far each is from one process.

Arguments: report directory, parts as JSON: a list of lists.
"""

import copy
import json
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from dataio.job.launch import join
from tests.trainer.tiles.cases import CALLS, LAYERS, MODELS, SHAPE, Function
from tonari.trainer.mesh.average import average_gradients
from tonari.trainer.tiles import Grid, TiledTensor, tile_model, tiled, whole


def main() -> None:
    torch.set_default_dtype(torch.float64)
    directory, all_parts = Path(sys.argv[1]), json.loads(sys.argv[2])
    found: dict[str, dict[str, Any]] = {}
    with join(device="cpu") as job:
        for parts in all_parts:
            grid = Grid(parts, dist.group.WORLD)
            for name, (make, shape) in MODELS.items():
                if len(parts) < len(shape):
                    found[f"{name} {parts}"] = of_model(make, shape, grid)
            for name, make in LAYERS.items():
                found[f"{name} {parts}"] = of_function(make(), make(), grid)
            for name, call in CALLS.items():
                found[f"{name} {parts}"] = of_function(call, call, grid)
    (directory / f"{job.world.rank}.json").write_text(json.dumps(found))


def of_model(make: Function, shape: tuple[int, ...], grid: Grid) -> dict[str, Any]:
    torch.manual_seed(0)
    one = make()
    model = tile_model(copy.deepcopy(one), grid, shape)
    samples, before = torch.rand(2, *shape), grid.sent_bytes
    # Weighed, so that no position counts as another.
    weights = torch.rand(one.eval()(samples).shape)
    outputs, losses = [], []
    for each, given in ((model, grid.part_of(samples, len(shape) - 1)), (one, samples)):
        torch.manual_seed(1)
        output = each.train()(given)
        # Another step, on running statistics that are no longer the first.
        output = output + each(given)
        loss = (output * weights).mean()
        loss.backward()
        outputs.append(whole(output).detach())
        losses.append(loss.detach())
    assert grid.group is not None
    average_gradients(model.parameters(), grid.group)
    evaluated = whole(model.eval()(grid.part_of(samples, len(shape) - 1))) - one.eval()(samples)
    return {
        "output": largest([outputs[0] - outputs[1], evaluated.detach()]),
        "loss": largest([losses[0] - losses[1]]),
        "gradient": apart(model, one),
        "buffers": largest(
            [a.double() - b for a, b in zip(model.buffers(), one.buffers(), strict=True)]
        ),
        "names": list(model.state_dict()) == list(one.state_dict()),
        "sent": grid.sent_bytes > before,
    }


def of_function(tiles: Function, one: Function, grid: Grid) -> dict[str, Any]:
    torch.manual_seed(2)
    sample = torch.randn(SHAPE, requires_grad=True)
    local = grid.part_of(sample.detach(), 2).clone().requires_grad_()
    given = []
    for function, values in ((tiles, tiled(local, grid, SHAPE[2:])), (one, sample)):
        torch.manual_seed(3)
        # No leaf, which may not be changed in place.
        result = function(values * 1)
        weights = torch.rand(result.shape, generator=torch.Generator().manual_seed(4))
        (result * weights).sum().backward()
        given.append(whole(result).detach())
    assert local.grad is not None
    assert sample.grad is not None
    found = {
        "output": largest([given[0] - given[1]]),
        # Of as many losses as there are ranks.
        "gradient": largest([local.grad / dist.get_world_size() - grid.part_of(sample.grad, 2)]),
        "tiled": isinstance(result, TiledTensor),
    }
    if isinstance(tiles, nn.Module):
        assert isinstance(one, nn.Module)
        assert grid.group is not None
        average_gradients(tiles.parameters(), grid.group)
        found["gradient"] = max(found["gradient"], apart(tiles, one))
        found["buffers"] = largest(
            [a.double() - b for a, b in zip(tiles.buffers(), one.buffers(), strict=True)]
        )
    return found


def apart(model: nn.Module, one: nn.Module) -> float:
    """Say how far gradients are apart, of the largest."""
    found = [each.grad for each in model.parameters() if each.grad is not None]
    expected = [each.grad for each in one.parameters() if each.grad is not None]
    scale = max(largest(expected), 1e-12)
    return largest([(a - b) / scale for a, b in zip(found, expected, strict=True)])


def largest(values: list[Tensor]) -> float:
    return max([0.0, *(float(each.abs().max()) for each in values)])


if __name__ == "__main__":
    main()
