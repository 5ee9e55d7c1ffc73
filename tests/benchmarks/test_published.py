"""The study of the recipe, without its hours."""

from pathlib import Path

import pytest
import torch

from benchmarks.studies.published import RECIPE, WAYS, bare_batches, settings_of, summary
from tonari.trainer.config.config import load_config


def test_the_example_is_read_and_every_way_sets_what_it_is_named_for() -> None:
    for way in WAYS:
        config = load_config(RECIPE, settings_of(way, 10))
        hides = way not in ("bare", "full", "shorter")
        assert config.importance.kind == (way if hides else "full")
        assert config.run.epochs == (7 if way == "shorter" else 15)


def test_a_bare_batch_holds_parts_of_its_padded_images_some_of_them_flipped() -> None:
    images = torch.arange(8 * 3 * 32 * 32).reshape(8, 3, 32, 32)
    labels, seen = torch.arange(8), []
    rng = torch.Generator().manual_seed(0)
    for batch, its in bare_batches(images, labels, 4, rng):
        for image, label in zip(batch, its, strict=True):
            padded = torch.nn.functional.pad(images[label], (4, 4, 4, 4))
            cuts = [padded[:, y : y + 32, x : x + 32] for y in range(9) for x in range(9)]
            plain = any(torch.equal(image, cut) for cut in cuts)
            assert plain or any(torch.equal(image, cut.flip(2)) for cut in cuts)
            seen.append((int(label), plain))
    assert sorted(label for label, _ in seen) == list(range(8))
    assert {plain for _, plain in seen} == {True, False}


def test_differences_are_within_a_seed() -> None:
    def runs(*accuracies: float) -> list[dict[str, float]]:
        return [{"accuracy": each, "ema_accuracy": each} for each in accuracies]

    said = summary({"bare": runs(0.5, 0.9), "full": runs(0.6, 0.9)})
    assert said["full_accuracy"] == 0.75
    # 0.05 with a deviation of 0.0707: times 12.706 over the root of 2.
    assert said["full_accuracy_over_bare"] == [pytest.approx(0.05), pytest.approx(0.6353)]
    assert Path(RECIPE).name == "cifar10_resnet.toml"
