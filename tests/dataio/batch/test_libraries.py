"""Torchvision and kornia give the same batches on threads, in processes, after a restart."""

import importlib.util
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image as Pillow

from dataio import Workers
from dataio.world import single_world
from tests import torchvision_v2
from tests.dataio.loaders import IMAGES, ImageSource, make

# What runs in a process stands at module level, where it is found again.


@cache
def augment() -> Any:
    torchvision_v2.import_or_skip()
    from torchvision.transforms import v2

    return v2.Compose([v2.RandomResizedCrop(4), v2.RandomHorizontalFlip(), v2.ColorJitter(0.5)])


def on_pillow(sample, rng):
    image = Pillow.fromarray(np.ascontiguousarray(sample["image"].transpose(1, 2, 0)))
    return {"image": augment()(image), "label": sample["label"]}


def on_tensor(sample, rng):
    return sample | {"image": augment()(torch.from_numpy(sample["image"].copy()))}


def on_typed_tensor(sample, rng):
    change = augment()
    from torchvision import tv_tensors

    return sample | {"image": change(tv_tensors.Image(sample["image"].copy()))}


def batches(root, *, state=None, skip=0, **options):
    """The images of two epochs, and the state after some of the batches."""
    seen = []
    with make(single_world(), root, source=ImageSource(60), fields=IMAGES, **options) as loader:
        if state is not None:
            loader.load_state_dict(state)
        for _ in loader.epochs(2):
            for batch in loader:
                seen.append(batch["image"])
                if len(seen) == skip:
                    return seen, loader.state_dict()
    return seen, None


@pytest.mark.thorough
@pytest.mark.parametrize("transform", [on_pillow, on_tensor, on_typed_tensor])
def test_torchvision_gives_the_same_batches_everywhere(tmp_path, transform):
    torchvision_v2.import_or_skip()
    wanted, _ = batches(tmp_path, transform=transform, workers=Workers(threads=0))
    assert wanted[0].shape == (5, 3, 4, 4)
    assert wanted[0].dtype == torch.uint8
    assert len({image.numpy().tobytes() for batch in wanted for image in batch}) > 100
    for workers in (Workers(threads=2), Workers(processes=2)):
        begun, state = batches(tmp_path, transform=transform, workers=workers, skip=3)
        rest, _ = batches(tmp_path, transform=transform, workers=workers, state=state)
        assert all(map(torch.equal, begun + rest, wanted)), workers
        assert len(begun + rest) == len(wanted)


def test_torchvisions_mixup_gives_the_same_batches_everywhere(tmp_path):
    torchvision_v2.import_or_skip()
    from torchvision.transforms import v2

    mix = v2.RandomChoice([v2.MixUp(num_classes=4), v2.CutMix(num_classes=4)])

    def mixed(batch, rng):
        image, label = mix(batch["image"].float() / 255, batch["label"])
        return batch | {"image": image, "label": label}

    wanted, _ = batches(tmp_path, batch_transform=mixed, workers=Workers(threads=0))
    begun, state = batches(tmp_path, batch_transform=mixed, skip=3)
    rest, _ = batches(tmp_path, batch_transform=mixed, state=state, workers=Workers(threads=2))
    assert all(map(torch.equal, begun + rest, wanted))


def test_kornia_gives_the_same_batches_everywhere(tmp_path):
    if importlib.util.find_spec("kornia") is None:
        pytest.skip("needs kornia: pip install tonari[transforms]")
    import kornia.augmentation as kornia

    jitter = kornia.ColorJitter(0.5, 0.5, 0.5, 0.1, p=1.0)

    def jittered(batch, rng):
        return batch | {"image": jitter(batch["image"].float() / 255)}

    wanted, _ = batches(tmp_path, batch_transform=jittered, workers=Workers(threads=0))
    begun, state = batches(tmp_path, batch_transform=jittered, skip=3)
    rest, _ = batches(tmp_path, batch_transform=jittered, state=state, workers=Workers(threads=2))
    assert all(map(torch.equal, begun + rest, wanted))
