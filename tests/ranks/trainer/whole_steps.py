"""Steps of optimizers with weights that FSDP and tp have split. Arguments: report directory."""

import sys
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.optim import Optimizer

from dataio.job.launch import join
from tonari.trainer.run.whole_steps import step_on_whole_weights


class Lamb(Optimizer):
    """Steps as long as a part of the weight's norm."""

    of_parts = False

    def __init__(self, params: Any, lr: float = 0.01) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Take a step."""
        for group in self.param_groups:
            for weight in group["params"]:
                if weight.grad is None:
                    continue
                grad = weight.grad
                if self.of_parts and isinstance(weight, DTensor):
                    weight, grad = weight.to_local(), grad.to_local()
                weight.add_(grad * (weight.norm() / (grad.norm() + 1e-6)), alpha=-group["lr"])


class OfParts(Lamb):
    """The same, but takes what a rank has for the whole."""

    of_parts = True


class Momentum(Optimizer):
    """Treats each element by itself, in the memory of a rank."""

    def __init__(self, params: Any, lr: float = 0.01) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Take a step."""
        for group in self.param_groups:
            for weight in group["params"]:
                if weight.grad is not None:
                    held = self.state[weight].setdefault("held", torch.zeros_like(weight))
                    held.mul_(0.9).add_(weight.grad)
                    weight.sub_(held, alpha=group["lr"])


KINDS = {
    "adafactor": torch.optim.Adafactor,
    "muon": torch.optim.Muon,
    "lamb": Lamb,
    "of parts": OfParts,
    "momentum": Momentum,
    "adamw": torch.optim.AdamW,
}


def weights(kind: str) -> list[tuple[Tensor, list[Tensor]]]:
    """Make weights with the gradients of three steps; of the last one, no step uses."""
    generator = torch.Generator().manual_seed(0)
    shapes: list[tuple[int, ...]] = [(5, 6), (4, 8), (6, 6)]
    if kind != "muon":
        shapes.insert(1, (7,))

    def draw(shape: tuple[int, ...]) -> Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64)

    return [(draw(shape), [draw(shape) for _ in range(3)]) for shape in shapes]


def run(kind: str, *, splits: bool, dim: int = 0) -> dict[str, Any]:
    """Take three steps; returns the weights, whole, and whether steps were on whole weights."""
    mesh = init_device_mesh("cpu", (2,)) if splits else None

    def spread(value: Tensor) -> Tensor:
        if mesh is None:
            return value.clone()
        return distribute_tensor(value, mesh, [Shard(dim if value.ndim > 1 else 0)])

    given = weights(kind)
    parameters = [nn.Parameter(spread(weight)) for weight, _ in given]
    optimizer = KINDS[kind](parameters, lr=0.02)
    on_whole = step_on_whole_weights(optimizer)
    for step in range(3):
        for parameter, (_, grads) in list(zip(parameters, given, strict=True))[:-1]:
            parameter.grad = spread(grads[step])
        optimizer.step()
    assert set(optimizer.state) <= set(parameters[:-1])
    found = [each.detach() for each in parameters]
    return {
        "on_whole": on_whole,
        "weights": [each.full_tensor() if isinstance(each, DTensor) else each for each in found],
    }


def main() -> None:
    """Run all kinds and write what this rank has."""
    directory = Path(sys.argv[1])
    with join(device="cpu") as job:
        reports = {
            f"{kind} {dim}": run(kind, splits=True, dim=dim) for kind in KINDS for dim in range(2)
        }
    torch.save(reports, directory / f"{job.world.rank}.pt")
    (directory / f"{job.world.rank}.json").write_text("{}")


if __name__ == "__main__":
    main()
