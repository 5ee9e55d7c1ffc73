"""Averaging gradients is priced by what the ways that ship send."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from tonari.oracle.cluster.cluster import Cluster, Level
from tonari.oracle.cluster.machine import Nodes
from tonari.oracle.gradients import GradientPlan, plan_gradients
from tonari.plan.command import _gradient_words
from tonari.trainer.config.optimizer import OptimizerConfig


def test_bytes_between_nodes_are_those_that_the_ways_send() -> None:
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(512, 256), nn.Linear(256, 512))
    levels = (Level(name="node", units=2), Level(name="switch", units=2, gbyte_s=0.0125))
    machine = Nodes(Cluster(name="slow", level=levels), None)
    # Two nodes of two ranks, which share a replica.
    ways = {
        way.kind: way
        for way in plan_gradients(model, OptimizerConfig(compress_rank=2), machine, (1, 2, 2, 1, 1))
    }
    numbers = (2 * 512 * 256 + 512 + 256) // 2
    # In a ring of two, each rank sends all once; a flag for each parameter goes along.
    assert ways["none"].sent_bytes == 4 * (numbers + 4)
    assert ways["bfloat16"].sent_bytes == pytest.approx(2 * (numbers + 4), abs=4)
    rows = (128, 256, 256, 512)
    assert ways["powersgd"].sent_bytes == 4 * ((512 + 256) // 2 + 4 + 2 * sum(rows))
    none, half, powersgd = (ways[kind].sending_s for kind in ("none", "bfloat16", "powersgd"))
    assert none == pytest.approx(4 * (numbers + 4) / 0.0125e9, rel=0.01)
    # A message of each kind takes as long, by links, as its bytes: but for roundings the half.
    assert half == pytest.approx(none / 2, rel=0.01)
    assert powersgd < half / 4


def test_a_plan_says_what_each_way_saves_or_costs() -> None:
    ways = (
        GradientPlan(kind="none", sent_bytes=4 << 20, sending_s=0.4, computing_s=0.01),
        GradientPlan(kind="bfloat16", sent_bytes=2 << 20, sending_s=0.2, computing_s=0.02),
        GradientPlan(kind="powersgd", sent_bytes=1000, sending_s=0.001, computing_s=0.5),
    )
    choice: Any = SimpleNamespace(plan=SimpleNamespace(gradients=ways))
    *_, none, half, powersgd = _gradient_words(choice)
    assert "saves" not in none
    assert half.endswith("0.200 s on the links, 0.020 s of a core: saves 0.190 s")
    assert powersgd.endswith("costs 0.091 s more")
