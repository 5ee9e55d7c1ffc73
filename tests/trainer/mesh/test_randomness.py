"""What a model and its task draw: anew for each use and step, the same after a resume."""

import random  # noqa: TID251

import numpy as np
import torch
from torch import Tensor, nn

from dataio.batch.global_generators import global_states
from dataio.job.launch import join
from tests.trainer.run.alone import one_stage
from tonari.trainer.mesh.pipeline import Pipeline
from tonari.trainer.mesh.randomness import Randomness
from tonari.trainer.run.step import evaluating
from tonari.trainer.run.tasks import Columns


class DropBlock(nn.Module):
    """Notes the mask that it draws."""

    def __init__(self) -> None:
        super().__init__()
        self.masks: list[Tensor] = []

    def forward(self, values: Tensor) -> Tensor:
        """Draw one."""
        self.masks.append(torch.rand(8))
        return values


class Shares(nn.Module):
    """Uses one block three times, by one name or by three."""

    def __init__(self, *, names: int) -> None:
        super().__init__()
        self.block = DropBlock()
        self.blocks = nn.ModuleDict({str(number): self.block for number in range(names)})

    def forward(self, values: Tensor) -> Tensor:
        """Pass through it."""
        for _ in range(3):
            values = self.block(values)
        return values


def masks(*, names: int, step: int) -> list[Tensor]:
    """Draw in a forward pass of a step."""
    model = Shares(names=names)
    draws = Randomness(seed=1, replica=0, microbatches=2, apart=0, device=torch.device("cpu"))
    draws.attach(model)
    with draws.drawing(step):
        for microbatch in range(2):
            draws.begin(microbatch)
            model(torch.zeros(1))
    return model.block.masks


def test_a_block_that_is_used_three_times_draws_three_masks_in_each_microbatch_and_step() -> None:
    for names in (1, 3):
        drawn = [*masks(names=names, step=0), *masks(names=names, step=1)]
        assert len({tuple(mask.tolist()) for mask in drawn}) == 2 * 2 * 3
        again = masks(names=names, step=1)
        assert all(map(torch.equal, again, drawn[6:]))


class Mixes:
    """A task that draws from torch, NumPy and Python, for its input and its target."""

    def __init__(self) -> None:
        self.columns = Columns(("x",), ("y",))
        self.drawn: list[tuple[float, ...]] = []

    def _draw(self) -> None:
        numbers = float(torch.rand(())), float(np.random.rand()), random.random()  # noqa: NPY002
        self.drawn.append(numbers)

    def input(self, batch: dict[str, Tensor]) -> Tensor:
        """Draw."""
        self._draw()
        return batch["x"]

    def target(self, batch: dict[str, Tensor]) -> Tensor:
        """Draw again."""
        self._draw()
        return batch["y"]

    def losses(self, logits: Tensor, target: Tensor) -> Tensor:
        """Compare."""
        return (logits[:, 0] - target) ** 2

    def outcome(self, logits: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
        """Judge nothing."""
        return torch.zeros(len(target)), torch.zeros(len(target))


def test_what_a_task_draws_moves_on_and_is_the_same_after_a_resume() -> None:
    batch = {"x": torch.ones(2, 3), "y": torch.ones(2), "weight": torch.ones(2)}

    def drawn(*steps: int) -> list[tuple[float, ...]]:
        task = Mixes()
        pipeline = one_stage(nn.Linear(3, 1), batch_size=2, task=task)
        for step in steps:
            torch.rand(step + 1)
            pipeline.train(batch, number=step)
            evaluated(pipeline)
            if step % 2:
                random.seed(step)
        return task.drawn

    def evaluated(pipeline: Pipeline) -> None:
        before = global_states()
        with evaluating(pipeline):
            pipeline.forward(batch)
        assert global_states() == before

    with join(device="cpu"):
        every, resumed = drawn(0, 1, 2), drawn(2)
    trained = [numbers for start in (0, 4, 8) for numbers in every[start : start + 2]]
    assert len({number for numbers in trained for number in numbers}) == 3 * 6
    assert resumed == every[8:]
    # An evaluation draws the same each time.
    assert every[2:4] == every[6:8] == every[10:12]
