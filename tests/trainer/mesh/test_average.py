"""Gradients are averaged by one message a dtype, and no step waits for its device."""

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from tonari.trainer.mesh import average


@pytest.fixture
def group(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setattr(dist, "all_reduce", lambda *_, **__: None)
    monkeypatch.setattr(dist, "get_world_size", lambda _: 2)
    return None


def test_no_value_is_read_where_all_parameters_were_used(group: Any):
    # A tensor without data refuses to be read, as one whose device is to be waited for.
    parameters = [nn.Parameter(torch.empty(n, device="meta")) for n in (3, 5)]
    for each in parameters:
        each.grad = torch.empty_like(each)
    average.average_gradients(parameters, group)
    assert all(each.grad is not None for each in parameters)
    parameters[0].grad = None
    with pytest.raises((NotImplementedError, RuntimeError), match="meta"):
        average.average_gradients(parameters, group)


def test_a_parameter_that_nobody_used_keeps_no_gradient(group: Any):
    used, unused = nn.Parameter(torch.ones(3)), nn.Parameter(torch.ones(2))
    used.grad = torch.full((3,), 4.0)
    average.average_gradients([used, unused], group)
    assert used.grad.tolist() == [2.0, 2.0, 2.0]
    assert unused.grad is None
