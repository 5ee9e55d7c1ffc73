"""What is made wrong is as much as was asked for, known, and the same in all arms of a seed."""

import dataclasses

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from dataio.base.seeding import digest
from tests.tonari.ablate.study import make_study
from tests.tonari.ablate.test_study import blobs
from tonari.ablate.cells import train_missing
from tonari.ablate.study.config import SettingsConfig, load_study
from tonari.ablate.study.corrupt import Found, corrupt
from tonari.ablate.study.data import LabelledImages
from tonari.ablate.study.run import train_cell
from tonari.trainer.errors import ConfigError

NUM, CLASSES = 400, 4


def images_of(found: Found) -> np.ndarray:
    """Take the images, which may be others than the caller's."""
    assert isinstance(found.data, LabelledImages)
    return found.data[0]


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
        knobs={"fraction": 0.5, "delta": 1.0}, shuffle="global",
    )  # fmt: skip
    result = train_cell(settings, found, blobs(50, seed=1), num_classes=CLASSES, seed=0)
    # Random pruning hides half of all rows, and half of the wrong ones.
    assert result.hidden_precision == pytest.approx(0.3, abs=0.07)
    assert result.hidden_recall == pytest.approx(0.5, abs=0.1)
    caught = sum(point.hidden_wrong for point in result.points)
    assert result.hidden_recall == pytest.approx(caught / (6 * 60))
    whole = dataclasses.replace(settings, importance="full", knobs={}, epochs=1)
    full = train_cell(whole, found, blobs(50, seed=1), num_classes=CLASSES, seed=0)
    assert full.hidden_precision is full.hidden_recall is None


def test_a_few_rows_are_repeated_exactly_and_as_often_as_each_other():
    rng = np.random.default_rng(0)
    images = rng.integers(256, size=(NUM, 3, 8, 8), dtype=np.uint8)
    data = LabelledImages(images, np.arange(NUM) % CLASSES)
    found = corrupt(data, num_classes=CLASSES, seed=3, repeats=0.5, repeats_of=20)
    assert found.is_copy.sum() == 200
    assert not found.is_wrong.any()
    originals = np.flatnonzero(~found.is_copy)
    assert np.array_equal(found.data[0][originals], images[originals])
    labels = {image.tobytes(): label for image, label in zip(*data[:2], strict=True)}
    times = dict.fromkeys((image.tobytes() for image in images[originals]), 0)
    for image, label in zip(found.data[0], found.data.labels, strict=True):
        times[image.tobytes()] += 1
        assert label == labels[image.tobytes()]
    assert sorted(times.values()) == [1] * 180 + [11] * 20
    every = corrupt(data, num_classes=CLASSES, seed=3, repeats=0.5, repeats_of=NUM)
    assert len(np.unique(every.data[0], axis=0)) == 200, "no more than there are others"
    with pytest.raises(ConfigError, match=r"is 0.5 and data.repeats 0.5, which leaves none of 400"):
        corrupt(data, num_classes=CLASSES, seed=3, duplicates=0.5, repeats=0.5)


def test_labels_that_are_not_the_truth_are_wrong_from_the_start_and_so_are_their_copies():
    rng = np.random.default_rng(0)
    images = rng.integers(256, size=(NUM, 3, 8, 8), dtype=np.uint8)
    labels, wrong = rng.integers(CLASSES, size=NUM), rng.random(NUM) < 0.3
    data = LabelledImages(images, labels, (labels + wrong) % CLASSES)
    found = corrupt(data, num_classes=CLASSES, seed=3)
    assert np.array_equal(found.is_wrong, wrong)
    assert np.array_equal(found.data.labels, labels)
    known = {image.tobytes(): is_wrong for image, is_wrong in zip(images, wrong, strict=True)}
    copied = corrupt(data, num_classes=CLASSES, seed=3, repeats=0.75)
    assert copied.is_wrong.any()
    for image, is_wrong in zip(copied.data[0], copied.is_wrong, strict=True):
        assert is_wrong == known[image.tobytes()]
    both = corrupt(data, num_classes=CLASSES, seed=3, noise=0.4, duplicates=0.2, imbalance=2)
    assert 0.4 < both.is_wrong.mean() < 0.7


def test_what_was_made_of_a_seed_before_is_made_of_it_now():
    """Cells that were trained are of these samples: without `repeats` nothing may change."""
    found = corrupt(
        blobs(NUM), num_classes=CLASSES, seed=3, noise=0.2, duplicates=0.5, junk=0.1, imbalance=4
    )
    parts = (*found.data[:2], found.is_wrong, found.is_copy)
    assert (
        digest(b"".join(np.ascontiguousarray(part).tobytes() for part in parts))
        == "69c41ce23dc37fe9"
    )


def test_the_digest_of_a_cell_that_was_there_before_is_what_it_was(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "study.toml"
    path.write_text(
        '[study]\nbaseline = "a"\n[data]\ntrain = "x"\ntest = "y"\nimage_size = 32\n'
        '[arms.a]\nshuffle = "global"\n'
    )
    digests = {
        setting: load_study(path, (setting,)).cells()[0].digest
        for setting in (
            "study.seeds=1", "data.noise=0.4", "data.repeats=0.0", "data.truth=",
            "data.repeats=0.5", "data.repeats_of=9", "data.truth=true_cls",
        )
    }  # fmt: skip
    was = "db73bd657c90"
    assert digests["data.noise=0.4"] == "197df1530ad8"
    assert [digests[each] for each in ("study.seeds=1", "data.repeats=0.0", "data.truth=")] == [
        was
    ] * 3
    assert len(set(digests.values())) == 5


def test_a_field_of_right_labels_says_which_labels_are_wrong(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    path = make_study(tmp_path)
    table = pq.read_table("train.parquet")
    truth = table["cls"]
    wrong = pa.array([(label + (row < 20)) % 4 for row, label in enumerate(truth.to_pylist())])
    table = table.append_column("true_cls", truth)
    table = table.set_column(table.schema.get_field_index("cls"), "cls", wrong)
    pq.write_table(table, "train.parquet")
    study = load_study(path, ("data.truth=true_cls", "data.train_samples=60", "study.seeds=1"))
    seen: list[int] = []
    real = train_cell

    def watched(settings, train, test, **rest):
        seen.append(int(train.is_wrong.sum()))
        return real(settings, train, test, **rest)

    monkeypatch.setattr("tonari.ablate.cells.train_cell", watched)
    train_missing(
        study, study.cells(), tmp_path / "out", command="", call="", tell=lambda event: None
    )
    assert seen == [20, 20]
    bad = load_study(path, ("data.truth=key",))
    with pytest.raises(ConfigError, match=r"data.truth: has classes 0 to 59"):
        train_missing(
            bad, bad.cells(), tmp_path / "out", command="", call="", tell=lambda event: None
        )
