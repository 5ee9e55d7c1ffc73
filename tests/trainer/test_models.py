import pytest
import torch
from torch import nn

from trainer.models import ResNet, SmallCNN, seeded

IMAGES = torch.arange(2 * 3 * 32 * 32).reshape(2, 3, 32, 32).to(torch.uint8)


@pytest.mark.parametrize(
    "model",
    [SmallCNN(7), ResNet(7), ResNet(7, depth=8, norm="batch")],
    ids=["cnn", "resnet", "batch norm"],
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


def test_a_row_s_logits_do_not_depend_on_the_rest_of_the_batch() -> None:
    for model in (SmallCNN(5), ResNet(5, depth=8, norm="group")):
        torch.testing.assert_close(model.double()(IMAGES)[:1], model(IMAGES[:1]))


def test_the_resnet_has_the_paper_s_size() -> None:
    layers = [m for m in ResNet(10, depth=20).modules() if isinstance(m, nn.Conv2d | nn.Linear)]
    assert sum(1 for layer in layers if layer.weight.shape[2:] != (1, 1)) == 20


def test_weights_depend_on_the_seed_alone() -> None:
    before = torch.get_rng_state()
    one, same, other = (seeded(lambda: SmallCNN(3), seed=seed) for seed in (1, 1, 2))
    assert torch.equal(before, torch.get_rng_state())
    assert torch.equal(one.head.weight, same.head.weight)
    assert not torch.equal(one.head.weight, other.head.weight)
