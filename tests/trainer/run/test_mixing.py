"""Images that are mixed, labels that are smoothed, and what the settings make of them."""

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import dataio
from tests.trainer.run.runs import lines, run, stop_after
from tonari.trainer.config.augment import AugmentConfig
from tonari.trainer.config.config import DataConfig, load_config
from tonari.trainer.errors import ConfigError
from tonari.trainer.models import ResNet, seeded
from tonari.trainer.run.erasing import RandomErasing
from tonari.trainer.run.images import evaluation_fields, image_fields, normalise
from tonari.trainer.run.mixing import MixedClassify, mark_draws
from tonari.trainer.run.tasks import Classify

SIZE, CLASSES = 16, 5


def make_batch(step: int | None = 0, number: int = 0) -> dict[str, Tensor]:
    """Make a batch; with a step, one that is trained."""
    rng = torch.Generator().manual_seed(3)
    batch = {
        "image": torch.randint(256, (6, 3, SIZE, SIZE), generator=rng, dtype=torch.uint8),
        "label": torch.arange(6) % CLASSES,
    }
    if step is not None:
        mark_draws([dict(batch) for _ in range(number)] + [batch], step=step)
    return batch


def task(**given: Any) -> MixedClassify:
    return MixedClassify(**({"seed": 1, "replica": 0, "size": SIZE} | given))


def one_hot_mixture(batch: dict[str, Tensor], share: float) -> Tensor:
    """Mix labels as torchvision's transforms do: float64[batch, classes]."""
    own = F.one_hot(batch["label"], CLASSES).double()
    return own.roll(1, 0) * (1 - share) + own * share


def test_mixup_is_that_of_torchvision_to_half_a_byte() -> None:
    for step in range(5):
        batch, mixes = make_batch(step), task(mixup=0.8)
        target = mixes.target(batch)
        share = float(target[0, 2])
        assert 0 < share < 1
        image = batch["image"].double()
        expected = image.roll(1, 0) * (1 - share) + image * share
        assert (mixes.input(batch).double() - expected).abs().max() <= 0.5 + 1e-4
        logits = torch.randn(6, CLASSES, dtype=torch.float64)
        losses = F.cross_entropy(logits, one_hot_mixture(batch, share), reduction="none")
        torch.testing.assert_close(mixes.losses(logits, target), losses, rtol=1e-12, atol=0)


def test_cutmix_puts_one_box_of_the_row_before_into_each_image_and_weighs_by_its_area() -> None:
    areas = set()
    for step in range(20):
        batch, mixes = make_batch(step), task(cutmix=1.0)
        mixed, share = mixes.input(batch), float(mixes.target(batch)[0, 2])
        image = batch["image"]
        changed = (mixed != image).any(dim=1).any(dim=0)
        rows, columns = (changed.any(dim=d).nonzero().flatten() for d in (1, 0))
        if len(rows):
            box = (slice(None), slice(None), slice(rows[0], rows[-1] + 1),
                   slice(columns[0], columns[-1] + 1))  # fmt: skip
            assert torch.equal(mixed[box], image.roll(1, 0)[box])
        area = len(rows) * len(columns)
        assert share == pytest.approx(1 - area / SIZE**2)
        areas.add(area)
    assert len(areas) > 5


def test_a_box_has_the_area_that_was_drawn_where_no_edge_cuts_it() -> None:
    mixes = task(cutmix=1.0)
    shares = [float(mixes.target(make_batch(step))[0, 2]) for step in range(200)]
    # A share that is uniform leaves all of some images, and next to nothing of others.
    assert min(shares) < 0.3
    assert max(shares) > 0.98


def test_what_is_drawn_follows_from_seed_step_batch_and_replica_alone() -> None:
    def share(batch: dict[str, Tensor], **given: Any) -> float:
        return float(task(mixup=1.0, **given).target(batch)[0, 2])

    once = share(make_batch(7))
    assert share(make_batch(7)) == once
    others = [
        share(make_batch(8)), share(make_batch(7, number=1)), share(make_batch(7), seed=2),
        share(make_batch(7), replica=1),
    ]  # fmt: skip
    assert len({once, *others}) == 5


def test_batches_that_are_not_trained_are_not_mixed() -> None:
    batch, mixes = make_batch(None), task(mixup=1.0, cutmix=1.0)
    assert torch.equal(mixes.input(batch), batch["image"])
    assert torch.equal(mixes.target(batch), batch["label"])


def test_erasing_paints_one_box_of_each_chosen_row_in_the_mean_colour() -> None:
    size, mean = 32, (0.2, 0.4, 0.6)
    colour = torch.tensor([51, 102, 153], dtype=torch.uint8)[:, None, None]
    image = torch.full((512, 3, size, size), 7, dtype=torch.uint8)
    batch = {"image": image, "label": torch.zeros(512, dtype=torch.int64)}
    mark_draws([batch], step=3)
    erase = RandomErasing(0.25, mean=mean, seed=1, replica=0)
    erased = task(erase=erase).input(batch)
    assert (image == 7).all(), "the batch itself stays as it is"
    is_changed = (erased != image).all(dim=1)
    areas, ratios = [], []
    for row in is_changed.any(dim=(1, 2)).nonzero().flatten().tolist():
        tall, wide = (is_changed[row].any(dim=d).nonzero().flatten() for d in (1, 0))
        box = erased[row, :, tall[0] : tall[-1] + 1, wide[0] : wide[-1] + 1]
        assert (box == colour).all()
        areas.append(box[0].numel() / size**2)
        ratios.append(len(tall) / len(wide))
    # Of 512 rows a quarter, within five standard errors.
    assert abs(len(areas) / 512 - 0.25) < 5 * (0.25 * 0.75 / 512) ** 0.5
    # Sides are whole pixels.
    assert 0.012 < min(areas) < 0.06
    assert 0.25 < max(areas) < 0.37
    assert abs(sum(areas) / len(areas) - (0.02 + 1 / 3) / 2) < 5 * 0.09 / len(areas) ** 0.5
    assert 0.2 < min(ratios) < 0.5
    assert 2 < max(ratios) < 5


def test_what_is_erased_follows_from_seed_step_batch_and_replica_alone() -> None:
    def erased(batch: dict[str, Tensor], seed: int = 1, replica: int = 0) -> Tensor:
        return task(erase=RandomErasing(1.0, seed=seed, replica=replica)).input(batch)

    once = erased(make_batch(7))
    assert torch.equal(erased(make_batch(7)), once)
    others = [
        erased(make_batch(8)), erased(make_batch(7, number=1)), erased(make_batch(7), seed=2),
        erased(make_batch(7), replica=1),
    ]  # fmt: skip
    assert not any(torch.equal(other, once) for other in others)
    still = make_batch(None)
    assert torch.equal(erased(still), still["image"])


def test_smoothing_changes_the_gradient_as_torch_does_and_no_loss_that_is_reported() -> None:
    for mixup in (0.0, 0.8):
        batch, smooth = make_batch(), task(mixup=mixup, smoothing=0.2)
        target = smooth.target(batch)
        logits = torch.randn(6, CLASSES, dtype=torch.float64, requires_grad=True)
        losses = smooth.losses(logits, target)
        (found,) = torch.autograd.grad(losses.sum(), logits)
        share = float(target[0, 2]) if mixup else 1.0
        soft = one_hot_mixture(batch, share)
        expected = F.cross_entropy(logits, soft, reduction="sum", label_smoothing=0.2)
        (gradient,) = torch.autograd.grad(expected, logits)
        torch.testing.assert_close(found, gradient, rtol=1e-12, atol=1e-15)
        plain = F.cross_entropy(logits, soft, reduction="none")
        torch.testing.assert_close(losses, plain, rtol=1e-12, atol=1e-15)


def test_a_mixed_row_is_right_where_the_label_of_the_larger_share_is_found() -> None:
    batch, mixes = make_batch(1), task(mixup=1.0)
    target = mixes.target(batch)
    labels = batch["label"] if target[0, 2] >= 0.5 else batch["label"].roll(1)
    logits = F.one_hot(labels, CLASSES).float()
    right, confidence = mixes.outcome(logits, target)
    assert right.all()
    assert torch.equal(confidence, Classify().outcome(logits, labels)[1])


def test_a_model_normalises_by_mean_and_deviation() -> None:
    model = seeded(lambda: ResNet(2, depth=8), seed=0).double()
    image, plain = make_batch()["image"], model(make_batch()["image"])
    before = image.clone()
    # [-1, 1] has the mean and the deviation of 0.5.
    normalise(model, AugmentConfig(mean=(0.5,) * 3, std=(0.5,) * 3))
    torch.testing.assert_close(model(image), plain, rtol=1e-9, atol=1e-12)
    assert torch.equal(image, before)
    normalise(model, AugmentConfig(mean=(0.5, 0.4, 0.3), std=(0.2, 0.3, 0.4)))
    assert not torch.allclose(model(image), plain)


def test_images_are_cropped_as_set_and_evaluated_without_chance() -> None:
    data = DataConfig(train="train.tar", image="png")
    cifar = AugmentConfig(crop="random", size=32, padding=4, flip=0.5)
    label = {"label": dataio.Int("cls")}
    crop = dataio.RandomCrop(32, padding=4)
    trained = {"image": dataio.Image("png", crop=crop, flip=0.5), **label}
    assert image_fields(data, cifar, training=True) == trained
    assert evaluation_fields(data, cifar) == {
        "image": dataio.Image("png", crop=dataio.CenterCrop(32)), **label
    }  # fmt: skip
    large = AugmentConfig(crop="resized", size=224, scale=(0.2, 1.0), resize_short=256)
    resized = dataio.RandomResizedCrop(224, scale=(0.2, 1.0))
    assert image_fields(data, large, training=True) == {
        "image": dataio.Image("png", crop=resized), **label
    }  # fmt: skip
    short, middle = dataio.ResizeShort(256), dataio.CenterCrop(224)
    assert evaluation_fields(data, large) == {
        "image": dataio.Image("png", resize=short, crop=middle), **label
    }  # fmt: skip
    assert evaluation_fields(data, AugmentConfig()) is None


def test_a_run_of_the_whole_recipe_learns_and_goes_on(
    config: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recipe = (
        "augment.crop=random", "augment.size=8", "augment.padding=1", "augment.flip=0.5",
        "augment.cutmix=1.0", "augment.mixup=0.2", "augment.label_smoothing=0.1",
        "augment.mean=[0.3]", "augment.std=[0.2]", "data.drop_last=true", "optimizer.ema=0.5",
        "run.epochs=2", "run.max_steps=9", "importance.kind=infobatch",
    )  # fmt: skip
    run(config, "whole", *recipe)
    whole = lines(config.parent / "whole")
    assert whole[-1]["accuracy"] > 0.5
    with monkeypatch.context() as patch:
        stop_after(patch, 4)
        run(config, "cut", *recipe)
    run(config, "cut", *recipe)
    assert lines(config.parent / "cut") == whole


@pytest.mark.parametrize(
    ("given", "says"),
    [
        (("augment.crop=random",), "augment.size is missing"),
        (("augment.cutmix=1.0", "data.drop_last=true"), "augment.size is missing"),
        (("augment.padding=4",), "augment.crop=random"),
        (("augment.size=32", "augment.resize_short=30"), "expected at least augment.size = 32"),
        (("augment.scale=[1.0, 0.1]",), "two ascending shares"),
        (("augment.mean=[0.5]",), "give both, or neither"),
        (("augment.mean=[0.5, 0.5]", "augment.std=[1.0, 1.0]"), "one for each of data.channels"),
        (("augment.mixup=0.2",), "give data.drop_last=true"),
        (
            ("augment.mixup=0.2", "data.drop_last=true", "importance.kind=kakurenbo"),
            "importance.refresh_every=0",
        ),
        (
            ("augment.resize_short=9", "augment.size=8", "data.image_size=8"),
            "leave the other out",
        ),
    ],
)  # fmt: skip
def test_settings_that_do_not_fit_are_refused(
    config: Path, given: tuple[str, ...], says: str
) -> None:
    with pytest.raises(ConfigError, match=says):
        load_config(config, given)
