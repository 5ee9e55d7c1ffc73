"""Blocks that are alike are compiled once for all of them, whole, whatever a step draws."""

from collections.abc import Iterator
from functools import partial

import pytest
import torch
from torch import Tensor

from dataio.job.launch import join
from tonari.oracle.trace import NoReports, make_batch
from tonari.trainer.config.config import build_config
from tonari.trainer.run.build import build_parallel
from tonari.trainer.run.own import Own
from tonari.trainer.run.step import train_step

pytestmark = pytest.mark.filterwarnings("ignore")  # torch's own, as it looks at tensors


@pytest.fixture(autouse=True)
def _without_a_compiler(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Trace as a compiler does, and leave out the machine's code."""
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="eager"))
    monkeypatch.setattr("tonari.trainer.mesh.parallelize._find_compiler", lambda: None)
    torch.compiler.reset()
    yield
    torch.compiler.reset()


def train_steps(*, compiled: bool, checkpointing: str) -> list[Tensor]:
    """Train three steps; the weights."""
    config = build_config(
        {
            "data": {"train": "none", "kind": "text", "sequence_length": 8, "batch_size": 4},
            "model": {"kind": "gpt", "width": 16, "depth": 3, "heads": 2},
            "mesh": {"compile": compiled, "checkpointing": checkpointing},
            "run": {"device": "cpu"},
        }
    )
    with join(device="cpu") as job:
        parallel = build_parallel(config, job)
        pipeline = parallel.pipeline
        optimizer = torch.optim.SGD(pipeline.parameters(), lr=0.1)
        batch = make_batch(config, Own(), parallel.task, pipeline.place)
        with torch._dynamo.config.patch(error_on_recompile=True):
            for number in range(3):
                train_step(pipeline, optimizer, NoReports(), [batch], step=number)
        return [each.detach().clone() for each in pipeline.parameters()]


@pytest.mark.parametrize("checkpointing", ["none", "full"])
def test_blocks_that_are_alike_are_one_graph_and_compiled_once(checkpointing: str) -> None:
    counters = torch._dynamo.utils.counters
    counters.clear()
    compiled = train_steps(compiled=True, checkpointing=checkpointing)
    assert counters["stats"]["unique_graphs"] == 1
    assert not counters["graph_break"]
    plain = train_steps(compiled=False, checkpointing=checkpointing)
    assert all(map(torch.equal, compiled, plain))
