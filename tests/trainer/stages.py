"""The stages of a pipeline one after the other in one process, beside the whole model."""

import copy
import itertools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from tonari.trainer.models import Adapted, seeded
from tonari.trainer.models.trace import leaves

Grads = dict[str, Tensor]


def run_whole(make: Callable[[], Adapted], inputs: Any) -> tuple[Tensor, Grads]:
    """Give the logits of a model, and the gradients of the sum of their squares."""
    model = seeded(make, seed=3)
    logits = model(inputs)
    logits.square().sum().backward()
    return logits.detach(), _grads([model])


def run_stages(
    make: Callable[[], Adapted],
    example: Callable[[int], Any],
    inputs: Any,
    cuts: list[int],
    *,
    training: bool = True,
    dtype: torch.dtype | None = None,
) -> tuple[Tensor, Grads]:
    """Cut a model before some blocks, and pass values on, and gradients back, as a pipeline does.

    What passes has to be as the stages describe it. Copies of one weight have their gradients
    added up.
    """
    parts = cut_up(make, example, cuts, dtype=dtype)
    given: tuple[Tensor, ...] = leaves(inputs)
    passes: list[tuple[tuple[Tensor, ...], tuple[Tensor, ...]]] = []
    for number, part in enumerate(parts):
        part.train(training)
        described = leaves(part.input_shape(len(given[0])))
        assert [each.shape for each in given] == [each.shape for each in described]
        if number:
            assert [each.dtype for each in given] == [each.dtype for each in described]
            given = tuple(
                value.detach().requires_grad_(shape.requires_grad)
                for value, shape in zip(given, described, strict=True)
            )
        with torch.set_grad_enabled(training):
            result = part(*given)
        gives = leaves(result)
        for value, shape in zip(gives, leaves(part.output_shape(len(given[0]))), strict=True):
            assert (value.shape, value.dtype) == (shape.shape, shape.dtype)
            assert shape.requires_grad or not value.requires_grad
        passes.append((given, gives))
        given = gives
    (logits,) = passes[-1][1]
    if training:
        grads: list[Tensor | None] = [2 * logits.detach()]
        for given, gives in reversed(passes):
            pairs = [
                (value, grad)
                for value, grad in zip(gives, grads, strict=True)
                if value.requires_grad and grad is not None
            ]
            torch.autograd.backward([value for value, _ in pairs], [grad for _, grad in pairs])
            grads = [value.grad for value in given]
    return logits.detach(), _grads(parts)


def cut_up(
    make: Callable[[], Adapted],
    example: Callable[[int], Any],
    cuts: list[int],
    *,
    dtype: torch.dtype | None = None,
) -> list[Adapted]:
    """Make the stages of a model that is cut before some blocks."""
    whole = seeded(make, seed=3)
    whole.describe_inputs(example)
    whole.hidden_dtype = dtype
    whole.check_mesh(num_stages=len(cuts) + 1)
    parts = []
    edges = [0, *cuts, whole.num_blocks]
    for first, last in itertools.pairwise(edges):
        part = copy.deepcopy(whole)
        part.keep(range(first, last), first=first == 0, last=last == whole.num_blocks)
        parts.append(part)
    return parts


def _grads(parts: list[Adapted]) -> Grads:
    found: Grads = {}
    for part in parts:
        names: dict[nn.Parameter, str] = {}
        for name, parameter in part.named_parameters(remove_duplicate=False):
            names.setdefault(parameter, name)
        for parameter, name in names.items():
            if parameter.grad is not None:
                found[name] = found.get(name, 0) + parameter.grad
    return found
