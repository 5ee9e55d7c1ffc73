"""A run that goes on from its checkpoint is the run that was never stopped."""

from pathlib import Path

import pytest
import torch
from torch import nn

from tests.cases import diagonal
from tests.trainer.checkpoint.start import Start
from tests.trainer.deliver.fake_loader import FakeLoader, whole_weights
from tonari.trainer.checkpoint.checkpoint import Checkpoints
from tonari.trainer.checkpoint.directory import Progress, latest
from tonari.trainer.checkpoint.restore import find, restore
from tonari.trainer.errors import CheckpointError

pytestmark = pytest.mark.usefixtures("one_rank")


@diagonal(adam=[False, True], background=[False, True], steps=[1, 2, 5])
def test_prefix_and_resume_equal_the_uninterrupted_run(
    tmp_path: Path, steps: int, background: bool, adam: bool
) -> None:
    whole = Start(adam=adam)
    expected = whole.train(6)
    prefix, rest = Start(adam=adam), Start(adam=adam)
    losses = prefix.train(steps)
    with Checkpoints(tmp_path, keep=2, background=background) as checkpoints:
        path = prefix.save_by(checkpoints)
        # What comes after the call must not be in the checkpoint.
        prefix.train(6 - steps)
    assert find(tmp_path, "auto") == path
    rest.restore(path)
    assert rest.progress.steps == steps
    losses += rest.train(6 - steps)
    assert losses == expected
    assert all(map(torch.equal, whole_weights(rest.model), whole_weights(whole.model)))


def test_saving_changes_nothing(tmp_path: Path) -> None:
    plain, saving = Start(), Start()
    expected = plain.train(6)
    losses = []
    for _ in range(6):
        losses += saving.train(1)
        saving.save(tmp_path)
    assert losses == expected


def test_the_newest_checkpoints_are_kept(tmp_path: Path) -> None:
    start = Start()
    for _ in range(4):
        start.train(1)
        start.save(tmp_path, keep=2)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["step-00000003", "step-00000004"]
    assert latest(tmp_path) == tmp_path / "step-00000004"


class Blocks(nn.Module):
    """Some blocks of a model, under the names they have in the whole of it."""

    def __init__(self, *numbers: int) -> None:
        super().__init__()
        made = {str(number): nn.Linear(3, 3) for number in numbers}
        self.blocks = nn.ModuleDict(made)
        self.register_buffer("scale", torch.ones(2))


def stepped(*parts: Blocks) -> torch.optim.Optimizer:
    """Make an Adam of all parts, with a state."""
    optimizer = torch.optim.AdamW([w for part in parts for w in part.parameters()], lr=0.1)
    for part in parts:
        for weight in part.parameters():
            weight.grad = torch.rand_like(weight)
    optimizer.step()
    return optimizer


@pytest.mark.parametrize("saved", [((0, 3), (1, 2)), ((0, 1, 2, 3),)])
@pytest.mark.parametrize("restored", [((0, 1, 2, 3),), ((2,), (0, 1), (3,)), ((1, 2),)])
def test_a_rank_s_stages_are_saved_and_restored_by_the_names_of_the_whole_model(
    tmp_path: Path, saved: tuple[tuple[int, ...], ...], restored: tuple[tuple[int, ...], ...]
) -> None:
    loader = FakeLoader(replica=0, num_replicas=1, global_batch_size=8, steps=6)
    parts = [Blocks(*numbers) for numbers in saved]
    optimizer = stepped(*parts)
    with Checkpoints(tmp_path, keep=1) as checkpoints:
        path = checkpoints.save(parts, optimizer, loader, Progress(0, 1))
    others = [Blocks(*numbers) for numbers in restored]
    other = stepped(*others)
    restore(path, others, other, loader)
    weights = {name: w for part in parts for name, w in part.named_parameters()}
    for part in others:
        for name, found in part.named_parameters():
            assert torch.equal(found, weights[name])
            for kind, value in optimizer.state[weights[name]].items():
                assert torch.equal(other.state[found][kind], value)


def test_the_optimizer_s_settings_are_those_of_this_start(tmp_path: Path) -> None:
    start = Start(adam=True)
    start.train(1)
    path = start.save(tmp_path)
    again = Start(adam=True)
    again.optimizer.param_groups[0] |= {"weight_decay": 0.5, "betas": (0.5, 0.6), "lr": 0.25}
    again.restore(path)
    (group,) = again.optimizer.param_groups
    assert (group["weight_decay"], group["betas"], group["lr"]) == (0.5, (0.5, 0.6), 0.25)
    assert all(state["step"] == 1 for state in again.optimizer.state.values())


def test_weights_that_are_not_finite_push_out_no_checkpoint(tmp_path: Path) -> None:
    start = Start()
    start.train(1)
    sound = start.save(tmp_path, keep=1)
    start.train(1)
    with torch.no_grad():
        next(start.model.blocks.parameters()).view(-1)[3] = float("nan")
    with pytest.raises(
        CheckpointError, match=r"step 2: blocks\.0\.\S+ is not finite, .* smaller optimizer.lr"
    ):
        start.save(tmp_path, keep=1)
    assert [path for path in tmp_path.iterdir()] == [sound]
