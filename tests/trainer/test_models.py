import copy
from collections.abc import Callable

import pytest
import torch
from torch import nn

from tests.trainer.mesh.tiny_models import MAKERS, batch_of, make, task_of
from tonari.trainer.errors import ConfigError
from tonari.trainer.models import (
    GPT,
    Llama,
    ResNet,
    ResNet50,
    Rope,
    SmallCNN,
    StagedModel,
    ViT,
    seeded,
)
from tonari.trainer.models.llama import GroupedAttention

IMAGES = torch.arange(2 * 3 * 32 * 32).reshape(2, 3, 32, 32).to(torch.uint8)


@pytest.mark.parametrize(
    "model",
    [SmallCNN(7), ResNet(7), ResNet(7, depth=8, norm="batch"), ViT(7, width=32, depth=2, heads=2)],
    ids=["cnn", "resnet", "batch norm", "vit"],
)
def test_a_model_takes_bytes_and_gives_logits(model: nn.Module) -> None:
    logits = model(IMAGES)
    assert logits.shape == (2, 7)
    assert logits.dtype == torch.float32
    assert model.double()(IMAGES).dtype == torch.float64


@pytest.mark.parametrize("image_size", [4, 8, 28, 32])
def test_the_small_cnn_takes_its_image_size_and_no_other(image_size: int) -> None:
    model = SmallCNN(10, 1, image_size)
    assert model(torch.zeros(2, 1, image_size, image_size, dtype=torch.uint8)).shape == (2, 10)
    with pytest.raises(ValueError, match=r"images are \[3, 9, 9\], the model was made for .* set"):
        model(torch.zeros(2, 3, 9, 9, dtype=torch.uint8))


@pytest.mark.parametrize("kind", MAKERS)
def test_a_row_s_logits_do_not_depend_on_the_rest_of_the_batch(kind: str) -> None:
    model, rows = make(kind), task_of(kind).input(batch_of(kind))
    torch.testing.assert_close(model(rows)[:1], model(rows[:1]))


@pytest.mark.parametrize("kind", ["gpt", "llama", "tied llama"])
def test_a_token_s_logits_do_not_depend_on_those_after_it(kind: str) -> None:
    model, tokens = make(kind), task_of(kind).input(batch_of(kind))
    changed = tokens.clone()
    changed[:, 5:] = 0
    torch.testing.assert_close(model(tokens)[:, :5], model(changed)[:, :5])
    assert not torch.allclose(model(tokens)[:, 5:], model(changed)[:, 5:])


def test_documents_with_positions_and_a_mask_of_their_own_do_not_see_each_other() -> None:
    attention = GroupedAttention(16, 4, 2, 4, rope=Rope()).double()
    hidden = torch.randn(2, 8, 16, dtype=torch.float64, generator=torch.Generator().manual_seed(3))
    document = torch.tensor([0, 0, 0, 1, 1, 1, 1, 1])
    place = torch.arange(8)
    mask = (document[:, None] == document) & (place[:, None] >= place)
    positions = torch.tensor([0, 1, 2, 0, 1, 2, 3, 4])
    together = attention(hidden, positions=positions, mask=mask)
    apart = torch.cat([attention(hidden[:, :3]), attention(hidden[:, 3:])], dim=1)
    torch.testing.assert_close(together, apart, rtol=1e-12, atol=1e-14)
    each = attention(hidden, positions=positions.expand(2, 8), mask=mask)
    assert torch.equal(each, together)


def test_the_resnet_has_the_paper_s_size() -> None:
    layers = [m for m in ResNet(10, depth=20).modules() if isinstance(m, nn.Conv2d | nn.Linear)]
    assert sum(1 for layer in layers if layer.weight.shape[2:] != (1, 1)) == 20


def test_weights_depend_on_the_seed_alone() -> None:
    before = torch.get_rng_state()
    one, same, other = (seeded(lambda: SmallCNN(3), seed=seed).state_dict() for seed in (1, 1, 2))
    assert torch.equal(before, torch.get_rng_state())
    name = "head.linear.weight"
    assert torch.equal(one[name], same[name])
    assert not torch.equal(one[name], other[name])


@pytest.mark.parametrize("kind", MAKERS)
def test_stages_one_after_the_other_are_the_whole_model_wherever_it_is_cut(kind: str) -> None:
    whole = make(kind)
    data = task_of(kind).input(batch_of(kind))
    expected = whole(data)
    for cut in range(1, whole.num_blocks):
        values, names = data, list[str]()
        for blocks in (range(cut), range(cut, whole.num_blocks)):
            part: StagedModel = copy.deepcopy(whole)
            part.keep(blocks, first=blocks.start == 0, last=blocks.stop == whole.num_blocks)
            _check_shape(values, part.input_shape(len(values)))
            values = part(values)
            _check_shape(values, part.output_shape(len(values)))
            names += [name for name, _ in part.named_parameters()]
        assert torch.equal(values, expected)
        assert names == [name for name, _ in whole.named_parameters()]


def test_operations_are_counted_without_computing_them() -> None:
    model = GPT(11, 8, width=16, depth=1, heads=2)
    products = 2 * 8 * (12 * 16 * 16 + 16 * 11)
    attention = 2 * 2 * 8 * 8 * 16
    assert model.flops_per_row() == products + attention


@pytest.mark.parametrize(
    ("make_model", "sizes", "message"),
    [
        (
            lambda: GPT(12, 8, width=15, depth=1, heads=4),
            {},
            r"width is 15, .*heads = 4 does not divide; choose",
        ),
        (lambda: ViT(4, image_size=30), {}, r"image_size is 30, .*patch = 4; choose"),
        (lambda: MAKERS["gpt"](), {"tp": 3}, r"mesh.tp is 3, .* GPT's 4 heads; choose"),
        (lambda: GPT(13, 8, width=8, heads=4), {"tp": 2}, r"GPT's 13 classes; choose"),
        (
            lambda: Llama(heads=4, kv_heads=3, width=16),
            {},
            r"heads is 4, model.kv_heads 3, .* expected heads that are a multiple of kv_heads",
        ),
        (lambda: Llama(heads=4, width=18), {}, r"width is 18, .*heads = 4 does not divide; choose"),
        (lambda: MAKERS["llama"](), {"tp": 4}, r"mesh.tp is 4, .* Llama's 2 key and value heads;"),
        (lambda: ResNet(4), {"tp": 3}, r"ResNet's 8 channel groups"),
        (lambda: ResNet(4, norm="batch"), {"tp": 2}, r'expected 1 .* "batch".* give model.norm='),
        (lambda: ResNet50(4), {"tp": 2}, r"mesh.tp is 2, expected 1 for ResNet50: .*dp_shard"),
        (lambda: ResNet50(4, 1), {}, r"data.channels is 1, expected 3 for .*resnet50"),
        (lambda: MAKERS["vit"](), {"num_stages": 4}, r"ViT has 3 blocks, fewer than 4 .* choose"),
    ],
)
def test_sizes_that_do_not_divide_a_model_are_refused(
    make_model: Callable[[], StagedModel], sizes: dict[str, int], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        make_model().check_mesh(**sizes)


def _check_shape(values: torch.Tensor, described: torch.Tensor) -> None:
    assert described.device.type == "meta"
    assert (values.shape, values.dtype) == (described.shape, described.dtype)
    assert described.requires_grad == values.is_floating_point()
