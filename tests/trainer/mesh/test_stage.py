"""A stage's backward pass in two parts gives each weight the gradient of one pass."""

from collections.abc import Callable, Iterator
from typing import Any, cast

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.functional import linear

from dataio.job.launch import join
from tonari.trainer.mesh.mesh import make_mesh
from tonari.trainer.mesh.randomness import Randomness
from tonari.trainer.mesh.stage import Stage

WIDTH = 8

Forward = Callable[[Any, Tensor], Any]
"""From weights and values to what a stage gives."""

STAGES: dict[str, Forward] = {
    "each weight once": lambda its, x: linear(torch.tanh(linear(x, its.w, its.p)), its.v, its.q),
    "one layer twice": lambda its, x: linear(torch.tanh(linear(x, its.w, its.p)), its.w, its.p),
    "a layer between": lambda its, x: torch.tanh(torch.tanh(x @ its.w) @ its.v) @ its.w,
    "tied, biases of their own": lambda its, x: linear(
        torch.tanh(linear(x, its.w, its.p)), its.w, its.q
    ),
    "one bias twice": lambda its, x: linear(torch.tanh(linear(x, its.w, its.p)), its.v, its.p),
    "sums of weights": lambda its, x: (x + (its.p + its.q)) + (its.q + its.r),
    "products of weights": lambda its, x: (x + its.p * its.q) + its.q * its.r,
    "a weight's norm": lambda its, x: torch.tanh(x @ its.w) @ its.v + its.w.square().sum(),
    "a norm beside": lambda its, x: (torch.tanh(x @ its.w) @ its.v, its.w.square().sum(0)),
    "a table beside": lambda its, x: (x @ its.w, torch.tanh(its.p) * 2),
    "a weight beside": lambda its, x: (x @ its.w, its.p * 1),
    "gates": lambda its, x: ((x * its.p) @ its.w) * its.p,
    "made once for two": lambda its, x: _normalised_twice(its.w, its.v, x),
    "a weight itself beside": lambda its, x: (x @ its.w, its.p),
    "some unused": lambda its, x: x @ its.w,
    "output that was handed on": lambda its, x: (x * 1, x @ its.w),
    "several values of one operation": lambda its, x: cast(Any, _ProductAndSum).apply(x, its.p),
}


class _ProductAndSum(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
        ctx.save_for_backward(x, weight)
        return x * weight, x + weight

    @staticmethod
    def backward(ctx: Any, product: Tensor, total: Tensor) -> tuple[Tensor, Tensor]:
        x, weight = ctx.saved_tensors
        return product * weight + total, (product * x + total).sum(0)


def _normalised_twice(weight: Tensor, between: Tensor, x: Tensor) -> Tensor:
    made = weight / weight.norm()
    given: Tensor = torch.tanh(torch.tanh(x @ made) @ between) @ made
    return given


class Part(nn.Module):
    """A later stage."""

    def __init__(self, forward: Forward) -> None:
        super().__init__()
        rng = torch.Generator().manual_seed(0)
        made = dict.fromkeys("pqr", (WIDTH,)) | dict.fromkeys("vw", (WIDTH, WIDTH))
        self.its = nn.ParameterDict(
            {name: torch.randn(shape, generator=rng).double() for name, shape in made.items()}
        )
        self._forward = forward

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        """Give one tensor or two."""
        given = self._forward(self.its, x)
        return given if isinstance(given, tuple) else (given,)


@pytest.fixture(scope="module")
def mesh() -> Iterator[DeviceMesh]:
    with join(device="cpu"):
        yield make_mesh((1, 1, 1, 1, 1), device_type="cpu")


@pytest.mark.parametrize("number", [1, 2], ids=["in between", "last"])
@pytest.mark.parametrize("kind", STAGES)
def test_a_backward_pass_in_two_parts_equals_one(kind: str, number: int, mesh: DeviceMesh) -> None:
    part, x = Part(STAGES[kind]), torch.linspace(-1, 1, 2 * WIDTH).view(2, WIDTH).double()
    # One pass.
    inputs = x.clone().requires_grad_()
    given = part(inputs)
    gradients = [torch.linspace(1, 2, each.numel()).view_as(each).double() for each in given]
    torch.autograd.backward(given, gradients)
    expected = [None if each.grad is None else each.grad.clone() for each in part.parameters()]
    part.zero_grad()

    stage = Stage(
        part, number, 3, torch.device("cpu"), input_args=x, output_args=given,
        group=mesh["pp"].get_group(), randomness=Randomness(
            seed=0, replica=0, microbatches=1, apart=0, device=torch.device("cpu")
        ),
    )  # fmt: skip
    again = x.clone().requires_grad_()
    outputs: tuple[Tensor, ...] = part(again)
    how: dict[str, Any] = {
        "stage_output": outputs,
        "output_grads": gradients,
        "input_values": [again],
    }
    if number == 2:
        loss = sum((each * its).sum() for each, its in zip(outputs, gradients, strict=True))
        assert isinstance(loss, Tensor)
        how |= {"stage_output": (loss,), "output_grads": None}
    (found,), groups = stage.backward_maybe_with_nosync("input", how)
    torch.testing.assert_close(found, inputs.grad, rtol=1e-12, atol=0)
    stage.backward_maybe_with_nosync(
        "weight", {"stage_output": how["stage_output"], "param_groups": groups}
    )
    for (name, weight), grad in zip(part.named_parameters(), expected, strict=True):
        assert (weight.grad is None) == (grad is None), name
        if grad is not None:
            torch.testing.assert_close(weight.grad, grad, rtol=1e-12, atol=0, msg=name)
