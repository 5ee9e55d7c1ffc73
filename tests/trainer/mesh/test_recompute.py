"""Of a stage, only so many blocks compute again, those that are worth most."""

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.utils.flop_counter import FlopCounterMode

from tests.trainer.mesh.tiny_models import batch_of, make, one_process, task_of
from tonari.trainer.errors import ConfigError
from tonari.trainer.mesh.parallelize import parallelize
from tonari.trainer.mesh.recompute import (
    Checkpointing,
    choose_blocks,
    counting_saved,
    recompute,
    saved_bytes,
    worths,
)
from tonari.trainer.models import ResNet, seeded


def step(
    kind: str, mesh: DeviceMesh, checkpointing: Checkpointing, count: int
) -> tuple[int, int, dict[str, Tensor]]:
    """Train a step: operations, bytes that autograd keeps, and gradients."""
    task, batch = task_of(kind), batch_of(kind)

    def made() -> nn.Module:
        return parallelize(
            make(kind), mesh, checkpointing=checkpointing, checkpointing_blocks=count
        )[0]

    kept = saved_bytes(made(), [task.input(batch)])
    part = made()
    with FlopCounterMode(display=False) as counter:
        losses = task.losses(part(task.input(batch)), task.target(batch))
        (losses * batch["weight"]).mean().backward()
    gradients = {name: p.grad for name, p in part.named_parameters() if p.grad is not None}
    return counter.get_total_flops(), kept, gradients


@pytest.mark.parametrize("kind", ["gpt", "resnet"])
def test_each_block_more_computes_more_and_keeps_less_for_the_same_gradients(kind, mesh):
    expected, _ = one_process(kind)
    counts = [step(kind, mesh, "none", 0)]
    counts += [step(kind, mesh, "full", count) for count in (1, 2, 3)]
    operations = [flops for flops, _, _ in counts]
    kept = [num_bytes for _, num_bytes, _ in counts]
    assert operations == sorted(set(operations))
    assert kept == sorted(set(kept), reverse=True)
    # Of three blocks, three are all, and so are more
    for count in (0, 9):
        assert step(kind, mesh, "full", count)[:2] == counts[3][:2]
    for _, _, gradients in counts:
        assert gradients.keys() == expected.keys()
        for name, gradient in gradients.items():
            torch.testing.assert_close(gradient, expected[name], rtol=1e-9, atol=0)


def test_equal_blocks_are_worth_the_same_and_the_first_are_chosen():
    equal = worths(make("gpt"))
    assert equal == (1.0, 1.0, 1.0)
    assert choose_blocks(range(3), equal, 2) == {0, 1}
    assert choose_blocks(range(1, 3), equal, 1) == {1}
    assert choose_blocks(range(3), equal, 0) == {0, 1, 2}


def test_blocks_that_keep_most_for_their_operations_are_chosen():
    # A first block without a projection keeps as much as others for fewer operations
    found = worths(seeded(lambda: ResNet(2, 1, depth=20, image_size=8), seed=0))
    assert len(set(found)) > 1
    best = max(found)
    assert all(found[number] == best for number in choose_blocks(range(len(found)), found, 1))


def test_a_block_that_cannot_be_compared_is_refused(mesh, monkeypatch):
    model = make("resnet")
    monkeypatch.setattr(model, "hidden_shape_before", lambda *_: (1,))
    with pytest.raises(ConfigError, match=r"block 0 cannot be run .*; leave mesh.checkpointing_bl"):
        worths(model)


class InPlaceBlock(nn.Module):
    """A block that changes what it is given, and gives it."""

    def __init__(self, way: str) -> None:
        super().__init__()
        self.way, self.line, self.num_passes = way, nn.Linear(4, 4), 0

    def forward(self, x: Tensor, *, by: Tensor) -> tuple[Tensor, Tensor]:
        """Give the block's own values and its input."""
        self.num_passes += 1
        if self.way == "first":
            x = torch.relu_(x)
        elif self.way == "scaled":
            x.mul_(0.5)
        elif self.way == "by itself":
            x.add_(self.line(x).detach())
        elif self.way == "a view":
            x.view(-1)[::3].add_(1)
        elif self.way == "behind":
            made = self.line(torch.tanh(x) * 1)
            x += made
            return x, x
        elif self.way == "another":
            by.add_(1)
        elif self.way == "its own product":
            return torch.sigmoid_(self.line(x)), x
        elif self.way == "later" and self.num_passes > 2:
            x.mul_(0.5)
        return self.line(torch.tanh(self.line(x)) + by), x


class InPlaceBlocks(nn.Module):
    """Two such blocks, whose inputs others use too."""

    def __init__(self, way: str, checkpointing: Checkpointing) -> None:
        super().__init__()
        self.stem = nn.Linear(4, 4)
        self.blocks = nn.ModuleList(InPlaceBlock(way) for _ in range(2))
        for block in self.blocks if checkpointing != "none" else []:
            recompute(block, selective=checkpointing == "selective")

    def forward(self, x: Tensor) -> Tensor:
        """Add up what the blocks give, and their inputs as they are behind them."""
        x, by = self.stem(x), torch.ones(4)
        for block in self.blocks:
            made, given = block(x, by=by)
            x = made + x + (given + by) / 2
        return x


def in_place(way: str, checkpointing: Checkpointing) -> list[Tensor]:
    model = seeded(lambda: InPlaceBlocks(way, checkpointing), seed=0)
    found = []
    for step in range(3):
        made = model(torch.linspace(-step - 1, 1, 8).view(2, 4))
        # Twice, as a schedule does that goes back for a stage's input first.
        made.square().sum().backward(retain_graph=checkpointing == "full")
        if checkpointing == "full":
            model.zero_grad()
            made.square().sum().backward()
        found += [made.detach(), *(p.grad for p in model.parameters() if p.grad is not None)]
        model.zero_grad()
    return found


@pytest.mark.parametrize("checkpointing", ["full", "selective"])
@pytest.mark.parametrize("way", ["first", "scaled", "by itself", "a view", "behind", "another"])
def test_a_block_that_changes_its_inputs_is_computed_again_from_what_it_was_given(
    way: str, checkpointing: Checkpointing
) -> None:
    expected = in_place(way, "none")
    for found, its in zip(in_place(way, checkpointing), expected, strict=True):
        assert torch.equal(found, its)


def test_copies_are_kept_of_inputs_that_a_block_changes_only() -> None:
    def is_kept(way: str) -> list[tuple[bool, bool]]:
        block, found = InPlaceBlock(way), []
        recompute(block, selective=False)
        for _ in range(3):
            x, by = torch.ones(2, 4), torch.ones(4)
            with counting_saved(block) as saved:
                made = block(x, by=by)
            assert sum(saved.values()) == x.nbytes + by.nbytes
            found.append(
                (x.untyped_storage()._cdata in saved, by.untyped_storage()._cdata in saved)
            )
            del made
        return found

    assert is_kept("none") == [(False, False), (True, True), (True, True)]
    assert is_kept("scaled") == [(False, False), (False, True), (False, True)]


@pytest.mark.parametrize(
    ("way", "checkpointing", "message"),
    [
        ("later", "full", r"InPlaceBlock\.forward changes its input.*leave mesh.checkpointing out"),
        (
            "its own product",
            "selective",
            r"InPlaceBlock changes in place .*mesh.checkpointing=full",
        ),
    ],
)
def test_a_block_that_cannot_be_computed_again_exactly_is_refused(
    way: str, checkpointing: Checkpointing, message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        in_place(way, checkpointing)
