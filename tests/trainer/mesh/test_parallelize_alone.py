"""What one process can show of parallelize."""

import pytest
import torch
from torch import Tensor, nn
from torch._inductor.exc import InvalidCxxCompiler
from torch.distributed.device_mesh import DeviceMesh
from torch.utils.flop_counter import FlopCounterMode

from tests.trainer.mesh.tiny_models import MAKERS, batch_of, make, one_process, task_of
from tonari.trainer.errors import ConfigError
from tonari.trainer.mesh.clip import clip_gradients
from tonari.trainer.mesh.parallelize import parallelize
from tonari.trainer.mesh.recompute import Checkpointing
from tonari.trainer.mesh.writable import pass_no_views
from tonari.trainer.models import ResNet, seeded


class TwoStages:
    """The place of a rank that owns both stages of a model."""

    stages = (0, 1)


@pytest.mark.parametrize("kind", MAKERS)
def test_a_rank_s_stages_one_after_the_other_train_the_whole_model(
    kind: str, mesh: DeviceMesh
) -> None:
    task, batch = task_of(kind), batch_of(kind)
    parts = parallelize(make(kind), mesh, TwoStages())
    values = task.input(batch)
    for part in parts:
        values = part(values)
    (task.losses(values, task.target(batch)) * batch["weight"]).mean().backward()
    expected, _ = one_process(kind)
    found = {name: p.grad for part in parts for name, p in part.named_parameters()}
    assert list(found) == list(expected)
    for name, gradient in expected.items():
        torch.testing.assert_close(found[name], gradient, rtol=1e-9, atol=0)


def test_selective_checkpointing_computes_no_product_twice(mesh: DeviceMesh) -> None:
    def operations(checkpointing: Checkpointing) -> int:
        (part,) = parallelize(make("gpt"), mesh, checkpointing=checkpointing)
        with FlopCounterMode(display=False) as counter:
            part(task_of("gpt").input(batch_of("gpt"))).sum().backward()
        return int(counter.get_total_flops())

    assert operations("selective") == operations("none") < operations("full")


@pytest.mark.parametrize("checkpointing", ["full", "selective"])
def test_what_is_computed_again_counts_in_batch_statistics_once(
    checkpointing: Checkpointing, mesh: DeviceMesh
) -> None:
    def statistics(checkpointing: Checkpointing) -> dict[str, Tensor]:
        model = seeded(lambda: ResNet(2, 1, depth=8, norm="batch", image_size=8), seed=0)
        (part,) = parallelize(model, mesh, checkpointing=checkpointing)
        pixels = torch.arange(4 * 64, dtype=torch.uint8).view(4, 1, 8, 8)
        loss = part(pixels).sum()
        # Twice, as a schedule does that goes back for a stage's input first.
        loss.backward(retain_graph=checkpointing == "full")
        if checkpointing == "full":
            loss.backward()
        return dict(part.named_buffers())

    for name, value in statistics("none").items():
        assert torch.equal(statistics(checkpointing)[name], value), name


def test_compiling_without_a_compiler_is_refused_before_the_first_step(
    mesh: DeviceMesh, monkeypatch: pytest.MonkeyPatch
) -> None:
    def absent() -> str:
        raise InvalidCxxCompiler

    monkeypatch.setattr("torch._inductor.cpp_builder.get_cpp_compiler", absent)
    with pytest.raises(
        ConfigError, match=r"no C\+\+ compiler was found, .* set mesh\.compile=false"
    ):
        parallelize(make("gpt"), mesh, compile=True)


@pytest.mark.parametrize("kind", ["cnn", "resnet", "vit"])
def test_context_parallel_is_refused_without_a_sequence(kind: str, mesh: DeviceMesh) -> None:
    with pytest.raises(ConfigError, match=r"mesh\.cp is 1, expected 1: .* leave mesh\.cp out"):
        make(kind).use_context_parallel(mesh["cp"])


def test_batch_statistics_in_bfloat16_are_refused_on_a_cpu(mesh: DeviceMesh) -> None:
    model = ResNet(4, depth=8, norm="batch")
    with pytest.raises(ConfigError, match=r"bfloat16, expected float32 for .* of ResNet: on a CPU"):
        parallelize(model, mesh, dtype="bfloat16")


def test_a_parameter_without_dimensions_is_refused_where_it_would_be_sharded(
    mesh: DeviceMesh,
) -> None:
    model = make("cnn")
    model.register_parameter("temperature", nn.Parameter(torch.tensor(1.0)))
    with pytest.raises(ConfigError, match=r"temperature of \w+ is .* the shape \[\], .* \(1,\)"):
        parallelize(model, mesh, offload=True)


def test_a_parameter_that_lies_otherwise_in_memory_is_sharded(mesh: DeviceMesh) -> None:
    model = make("cnn")
    turned = torch.randn(2, 3, dtype=next(model.parameters()).dtype).t()
    model.register_parameter("turned", nn.Parameter(turned))
    parallelize(model, mesh, offload=True)
    assert torch.equal(model.state_dict()["turned"].full_tensor(), turned)


def test_a_part_that_trains_nothing_counts_in_the_norm_of_the_others(mesh: DeviceMesh) -> None:
    # In double precision: the others' may be, and the sum over a pipeline is one message.
    norm = clip_gradients([], mesh, max_norm=1.0)
    assert (float(norm), norm.dtype) == (0.0, torch.float64)


def test_a_sharded_block_takes_and_gives_what_may_be_changed_in_place() -> None:
    line, taken = nn.Linear(4, 4), list[bool]()
    block = nn.Sequential(nn.ReLU(inplace=True), line, nn.Flatten())
    block.register_forward_pre_hook(lambda block, rows: (rows[0].view(2, 4),))
    pass_no_views(block)
    block.register_forward_pre_hook(lambda block, rows: taken.append(rows[0]._is_view()))
    weight = torch.ones(2, 4, requires_grad=True)
    given = block(weight * 2)
    assert taken == [False]
    view = given.view(8)
    given += 1
    assert not given._is_view()
    (view.sum() + given.sum()).backward()
    expected = 2 * 2 * line.weight.sum(0).expand(2, 4)
    torch.testing.assert_close(weight.grad, expected)
