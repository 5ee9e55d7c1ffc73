"""Of a stage, only so many blocks compute again, those that are worth most."""

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.utils.flop_counter import FlopCounterMode

from tests.trainer.mesh.tiny_models import batch_of, make, one_process, task_of
from trainer.errors import ConfigError
from trainer.mesh.mesh import make_mesh
from trainer.mesh.parallelize import parallelize
from trainer.mesh.recompute import Checkpointing, choose_blocks, saved_bytes, worths
from trainer.models import ResNet, seeded
from trainer.watch.launch import join


@pytest.fixture
def mesh() -> Iterator[DeviceMesh]:
    with join(device="cpu"):
        yield make_mesh((1, 1, 1, 1, 1), device_type="cpu")


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
