"""Our ResNet-50 and ViT take weights of torchvision's and timm's, and are the same functions."""

import importlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dataio.job.launch import join
from tests import torchvision_v2
from tests.trainer.digits import write_config
from tonari.trainer.checkpoint.weights import WeightFiles
from tonari.trainer.config.config import load_config
from tonari.trainer.errors import ConfigError
from tonari.trainer.mesh.mesh import make_mesh
from tonari.trainer.mesh.parallelize import parallelize
from tonari.trainer.models import ResNet50, StagedModel, ViT
from tonari.trainer.models.resnet50 import IMAGENET_MEAN, IMAGENET_STD
from tonari.trainer.run.build import make_model

save_file = pytest.importorskip("safetensors.torch", reason="tonari[export]").save_file

NUM_CLASSES, SIDE = 5, 40
IMAGES = torch.randint(256, (4, 3, SIDE, SIDE), generator=torch.Generator().manual_seed(1))
TARGET = torch.tensor([0, 3, 2, 4])


def torchvision_resnet(layers: tuple[int, ...], **settings: int) -> Any:
    torchvision_v2.import_or_skip()
    resnet = importlib.import_module("torchvision.models.resnet")
    return resnet.ResNet(resnet.Bottleneck, list(layers), **settings)


def timm_vit(**settings: Any) -> Any:
    torchvision_v2.import_or_skip()
    pytest.importorskip("timm", reason="pip install timm")
    return importlib.import_module("timm.models.vision_transformer").VisionTransformer(**settings)


def resnets() -> tuple[Any, StagedModel]:
    layers = (1, 2, 1, 1)
    ours = ResNet50(NUM_CLASSES, image_size=SIDE, layers=layers)
    return torchvision_resnet(layers, num_classes=NUM_CLASSES), ours


def vits() -> tuple[Any, StagedModel]:
    theirs = timm_vit(
        img_size=SIDE, patch_size=8, embed_dim=24, depth=3, num_heads=4, num_classes=NUM_CLASSES
    )
    ours = ViT(
        NUM_CLASSES, image_size=SIDE, patch=8, width=24, depth=3, heads=4, pooling="token",
        norm_eps=1e-6,
    )  # fmt: skip
    return theirs, ours


def normalized(model: StagedModel) -> Tensor:
    """Prepare the images as the published recipe does."""
    if isinstance(model, ViT):
        return IMAGES.double() / 255 * 2 - 1
    mean, std = (torch.tensor(v, dtype=torch.float64) for v in (IMAGENET_MEAN, IMAGENET_STD))
    return (IMAGES.double() / 255 - mean[:, None, None]) / std[:, None, None]


class TwoStages:
    """The place of a rank that owns both stages of a model."""

    stages = (0, 1)


@pytest.mark.parametrize("make", [resnets, vits], ids=["resnet50", "vit"])
def test_logits_gradients_and_statistics_are_those_of_the_published_model(
    tmp_path: Path, make: Callable[[], tuple[Any, StagedModel]]
) -> None:
    theirs, ours = make()
    theirs.double()
    ours.double()
    with torch.no_grad():
        for value in [*theirs.parameters(), *theirs.buffers()]:
            if value.is_floating_point():
                # Positive: some are variances.
                value += 0.1 * torch.rand(value.shape, dtype=torch.float64)
    save_file(theirs.state_dict(), tmp_path / "model.safetensors")
    files = WeightFiles(tmp_path)
    files.check(ours)
    with join(device="cpu"):
        parts = parallelize(ours, make_mesh((1, 1, 1, 1, 1), device_type="cpu"), TwoStages())
        files.read_into(parts)

    def ours_of(images: Tensor) -> Tensor:
        for part in parts:
            images = part(images)
        return images

    expected = normalized(ours)
    for mode in (False, True):
        theirs.train(mode)
        for part in parts:
            part.train(mode)
        torch.testing.assert_close(
            ours_of(IMAGES.to(torch.uint8)), theirs(expected), rtol=1e-9, atol=1e-10
        )
    F.cross_entropy(ours_of(IMAGES.to(torch.uint8)), TARGET).backward()
    F.cross_entropy(theirs(expected), TARGET).backward()
    form, gradients = ours.hub_format(), dict(theirs.named_parameters())
    found = {name: p for part in parts for name, p in part.named_parameters()}
    assert len(found) == len(gradients)
    for name, parameter in found.items():
        stored = form.stored(name)
        assert parameter.grad is not None
        torch.testing.assert_close(
            stored.there(parameter.grad), gradients[stored.name].grad, rtol=1e-8, atol=1e-10
        )
    buffers = dict(theirs.named_buffers())
    for part in parts:
        for name, buffer in part.named_buffers():
            torch.testing.assert_close(buffer, buffers[form.stored(name).name])


def full_vit() -> Any:
    return timm_vit(patch_size=16, embed_dim=768, depth=12, num_heads=12)


SIZES = ("model.patch=16", "model.width=768", "model.depth=12", "model.heads=12")


@pytest.mark.parametrize(
    ("make_theirs", "overrides"),
    [
        (lambda: torchvision_resnet((3, 4, 6, 3)), ("model.kind=resnet50",)),
        (full_vit, ("model.kind=vit", "model.pooling=token", "model.norm_eps=1e-6", *SIZES)),
    ],
    ids=["resnet50", "ViT-B/16"],
)
def test_every_tensor_of_the_full_model_has_its_place(
    tmp_path: Path, make_theirs: Callable[[], nn.Module], overrides: tuple[str, ...]
) -> None:
    sizes = ("model.num_classes=1000", "model.image_size=224", "data.channels=3")
    config = load_config(write_config(tmp_path), (*sizes, *overrides))
    with torch.device("meta"):
        theirs, ours = make_theirs(), make_model(config)
    form = ours.hub_format()
    placed = {
        form.stored(name).name: form.stored(name).shape_there(tuple(value.shape))
        for name, value in ours.state_dict().items()
    }
    assert placed == {name: tuple(value.shape) for name, value in theirs.state_dict().items()}


def test_hidden_shapes_are_as_a_pipeline_needs_them() -> None:
    _, model = resnets()
    values = IMAGES.to(torch.uint8)
    assert model.stem is not None
    values = model.stem(values)
    for number, block in enumerate(model.blocks.values()):
        assert values.shape == model.hidden_shape_before(number, 4)
        values = block(values)
    assert values.shape == model.hidden_shape_before(model.num_blocks, 4)
    assert model(IMAGES.to(torch.uint8)).shape == model.logits_shape(4)


def test_an_odd_number_of_places_is_refused_for_sequence_parallel_alone() -> None:
    model = ViT(4, image_size=16, width=16, depth=1, heads=4, pooling="token")
    model.check_mesh(tp=2)
    model.num_hidden_parts = 2
    with pytest.raises(ConfigError, match=r"tp = 2 does not divide ViT's 17 places .*pooling="):
        model.tp_plan(sequence_parallel=True, loss_parallel=False)
