"""What is made wrong is as much as was asked for, known, and the same in all arms of a seed."""

import dataclasses

import numpy as np
import pytest

from tests.tonari.ablate.test_study import blobs
from tonari.ablate.study.config import SettingsConfig
from tonari.ablate.study.corrupt import Found, corrupt
from tonari.ablate.study.data import LabelledImages
from tonari.ablate.study.run import train_cell
from trainer.errors import ConfigError

NUM, CLASSES = 400, 4


def images_of(found: Found) -> np.ndarray:
    """Take the images, which may be others than the caller's."""
    assert isinstance(found.data, LabelledImages)
    return found.data.images


def test_without_settings_samples_stay_as_they_are():
    data = blobs(NUM)
    found = corrupt(data, num_classes=CLASSES, seed=3)
    assert np.array_equal(images_of(found), data.images)
    assert np.array_equal(found.data.labels, data.labels)
    assert not found.is_wrong.any()
    assert not found.is_copy.any()


def test_wrong_labels_are_other_classes_and_no_others_change():
    data = blobs(NUM)
    before = data.labels.copy()
    found = corrupt(data, num_classes=CLASSES, seed=3, noise=0.4)
    assert np.array_equal(data.labels, before), "the caller's are left as they are"
    assert found.is_wrong.sum() == 160
    assert np.array_equal(found.data.labels != before, found.is_wrong)
    steps = np.bincount((found.data.labels - before)[found.is_wrong] % CLASSES, minlength=CLASSES)
    assert steps[0] == 0
    assert steps[1:].min() > 30, "each other class"
    again, other = (corrupt(data, num_classes=CLASSES, seed=s, noise=0.4) for s in (3, 4))
    assert np.array_equal(found.is_wrong, again.is_wrong)
    assert not np.array_equal(found.is_wrong, other.is_wrong)


def test_copies_are_nearly_others_of_their_class():
    rng = np.random.default_rng(0)
    images = rng.integers(256, size=(NUM, 3, 8, 8), dtype=np.uint8)
    data = LabelledImages(images, np.arange(NUM) % CLASSES)
    found = corrupt(data, num_classes=CLASSES, seed=3, duplicates=0.75)
    assert found.is_copy.sum() == 300
    originals = np.flatnonzero(~found.is_copy)
    assert np.array_equal(images_of(found)[originals], images[originals])
    for copy in np.flatnonzero(found.is_copy)[:50]:
        nearest = [
            np.abs(np.roll(images[originals], shift, axis=(2, 3)).astype(int)
                   - images_of(found)[copy]).max(axis=(1, 2, 3))
            for shift in ((d, r) for d in (-1, 0, 1) for r in (-1, 0, 1))
        ]  # fmt: skip
        of = originals[np.min(nearest, axis=0).argmin()]
        assert np.min(nearest) <= 4
        assert found.data.labels[copy] == data.labels[of]
    assert not found.is_wrong.any()


def test_junk_is_noise_and_beside_the_wrong_labels():
    data = blobs(NUM)
    found = corrupt(data, num_classes=CLASSES, seed=3, junk=0.25, noise=0.5)
    changed = (images_of(found) != data.images).any(axis=(1, 2, 3))
    assert changed.sum() == 100
    assert found.is_wrong.sum() == 300
    assert (found.data.labels != data.labels)[found.is_wrong & ~changed].all()
    with pytest.raises(ConfigError, match=r"data.noise is 0.6 and data.junk 0.5, together more"):
        corrupt(data, num_classes=CLASSES, seed=3, junk=0.5, noise=0.6)


def test_classes_become_rare_one_after_the_other():
    labels = np.repeat(np.arange(CLASSES), 100)
    data = LabelledImages(np.zeros((NUM, 3, 2, 2), np.uint8), labels)
    found = corrupt(data, num_classes=CLASSES, seed=3, imbalance=8)
    assert np.bincount(found.data.labels).tolist() == [100, 50, 25, 12]
    assert len(found.is_wrong) == 187


def test_no_original_left_is_refused():
    with pytest.raises(ConfigError, match=r"data.duplicates is 0.99, which leaves none of 4"):
        corrupt(blobs(4), num_classes=CLASSES, seed=3, duplicates=0.99)


def test_a_cell_says_how_many_of_the_hidden_rows_are_wrong():
    found = corrupt(blobs(200), num_classes=CLASSES, seed=3, noise=0.3)
    settings = SettingsConfig(
        replicas=1, batch_size=20, width=4, norm="group", lr=0.05, epochs=6, importance="random",
        fraction=0.5, delta=1.0,
    )  # fmt: skip
    result = train_cell(settings, found, blobs(50, seed=1), num_classes=CLASSES, seed=0)
    # Random pruning hides half of all rows, and half of the wrong ones.
    assert result.hidden_precision == pytest.approx(0.3, abs=0.07)
    assert result.hidden_recall == pytest.approx(0.5, abs=0.1)
    caught = sum(point.hidden_wrong for point in result.points)
    assert result.hidden_recall == pytest.approx(caught / (6 * 60))
    whole = dataclasses.replace(settings, importance="full", fraction=None, delta=None, epochs=1)
    full = train_cell(whole, found, blobs(50, seed=1), num_classes=CLASSES, seed=0)
    assert full.hidden_precision is full.hidden_recall is None
