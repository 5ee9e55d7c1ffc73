"""What is made wrong is as much as was asked for, known, and the same for a seed each time."""

from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from numpy.typing import NDArray

from examples.damaged import LabelledImages, damage, draw, load_images, main
from tests.tonari.ablate.study import make_study
from tonari.ablate.oracle import is_not_zero

NUM, CLASSES = 400, 4


def images(
    num: int = NUM,
    *,
    truth: NDArray[np.int64] | None = None,
    labels: NDArray[np.int64] | None = None,
) -> LabelledImages:
    rng = np.random.default_rng(0)
    if labels is None:
        labels = np.arange(num) % CLASSES
    nothing = np.zeros(num, np.bool_)
    pixels = rng.integers(256, size=(num, 8, 8, 3), dtype=np.uint8)
    return LabelledImages(pixels, labels, labels if truth is None else truth, nothing, nothing)


def test_without_settings_samples_stay_as_they_are() -> None:
    data = images()
    found = damage(data, num_classes=CLASSES, seed=3)
    assert np.array_equal(found.images, data.images)
    assert np.array_equal(found.labels, data.labels)
    assert not found.is_wrong.any()
    assert not found.is_copy.any()


def test_wrong_labels_are_other_classes_and_no_others_change() -> None:
    data = images()
    before = data.labels.copy()
    found = damage(data, num_classes=CLASSES, seed=3, noise=0.4)
    assert np.array_equal(data.labels, before), "the caller's are left as they are"
    assert found.is_wrong.sum() == 160
    assert np.array_equal(found.labels != before, found.is_wrong)
    steps = np.bincount((found.labels - before)[found.is_wrong] % CLASSES, minlength=CLASSES)
    assert steps[0] == 0
    assert steps[1:].min() > 30, "each other class"
    again, other = (damage(data, num_classes=CLASSES, seed=s, noise=0.4) for s in (3, 4))
    assert np.array_equal(found.is_wrong, again.is_wrong)
    assert not np.array_equal(found.is_wrong, other.is_wrong)


def test_labels_wrong_within_pairs_are_those_of_the_other_of_their_pair() -> None:
    data = images()
    found = damage(data, num_classes=CLASSES, seed=3, pairs=0.25, noise=0.25)
    assert found.is_wrong.sum() == 200
    swapped = found.labels == data.labels ^ 1
    assert 100 <= swapped.sum() < 160, "and some of the others by chance"
    assert (found.is_wrong[swapped]).all()


def test_copies_are_nearly_others_of_their_class() -> None:
    data = images()
    found = damage(data, num_classes=CLASSES, seed=3, duplicates=0.75)
    assert found.is_copy.sum() == 300
    originals = np.flatnonzero(~found.is_copy)
    assert np.array_equal(found.images[originals], data.images[originals])
    for copy in np.flatnonzero(found.is_copy)[:50]:
        nearest = [
            np.abs(np.roll(data.images[originals], shift, axis=(1, 2)).astype(int)
                   - found.images[copy]).max(axis=(1, 2, 3))
            for shift in ((d, r) for d in (-1, 0, 1) for r in (-1, 0, 1))
        ]  # fmt: skip
        of = originals[np.min(nearest, axis=0).argmin()]
        assert np.min(nearest) <= 4
        assert found.labels[copy] == data.labels[of]
    assert not found.is_wrong.any()


def test_junk_is_noise_and_beside_the_wrong_labels() -> None:
    data = images()
    found = damage(data, num_classes=CLASSES, seed=3, junk=0.25, noise=0.5)
    changed = (found.images != data.images).any(axis=(1, 2, 3))
    assert changed.sum() == found.is_junk.sum() == 100
    assert found.is_wrong.sum() == 300
    assert (found.labels != data.labels)[found.is_wrong & ~changed].all()


def test_classes_become_rare_one_after_the_other() -> None:
    data = images(labels=np.repeat(np.arange(CLASSES), 100))
    found = damage(data, num_classes=CLASSES, seed=3, imbalance=8)
    assert np.bincount(found.labels).tolist() == [100, 50, 25, 12]


def test_a_few_rows_are_repeated_exactly_and_as_often_as_each_other() -> None:
    data = images()
    found = damage(data, num_classes=CLASSES, seed=3, repeats=0.5, repeats_of=20)
    assert found.is_copy.sum() == 200
    assert not found.is_wrong.any()
    originals = np.flatnonzero(~found.is_copy)
    labels = {its.tobytes(): label for its, label in zip(data.images, data.labels, strict=True)}
    times = dict.fromkeys((its.tobytes() for its in data.images[originals]), 0)
    for its, label in zip(found.images, found.labels, strict=True):
        times[its.tobytes()] += 1
        assert label == labels[its.tobytes()]
    assert sorted(times.values()) == [1] * 180 + [11] * 20


def test_labels_that_are_not_the_truth_are_wrong_from_the_start_and_so_are_their_copies() -> None:
    rng = np.random.default_rng(0)
    labels, wrong = rng.integers(CLASSES, size=NUM), rng.random(NUM) < 0.3
    data = images(labels=labels, truth=(labels + wrong) % CLASSES)
    assert np.array_equal(damage(data, num_classes=CLASSES, seed=3).is_wrong, wrong)
    known = {its.tobytes(): is_wrong for its, is_wrong in zip(data.images, wrong, strict=True)}
    copied = damage(data, num_classes=CLASSES, seed=3, repeats=0.75)
    assert copied.is_wrong.any()
    for its, is_wrong in zip(copied.images, copied.is_wrong, strict=True):
        assert is_wrong == known[its.tobytes()]


def test_samples_are_drawn_by_the_seed_and_validation_samples_are_others() -> None:
    data = images(60)
    train, validation = draw(data, 40, 15, seed=3)
    assert (len(train.labels), len(validation.labels)) == (40, 15)
    seen = {its.tobytes() for its in train.images}
    assert not seen & {its.tobytes() for its in validation.images}
    assert np.array_equal(train.images, draw(data, 40, 0, seed=3)[0].images)
    assert not np.array_equal(train.images, draw(data, 40, 0, seed=4)[0].images)
    assert len(draw(data, 0, 15, seed=3)[0].labels) == 45


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--noise", "0.6", "--junk", "0.5"], "are more than all samples; lower one"),
        (["--duplicates", "0.99", "--samples", "4"], "leave none of 4 samples to be copied"),
        (["--samples", "60", "--validation", "5"], "--samples 60 .* there are 64; take fewer"),
        (["--label", "absent"], "absent"),
    ],
)
def test_what_cannot_be_made_is_one_message(
    tmp_path: Path, options: list[str], message: str
) -> None:
    make_study(tmp_path)
    with pytest.raises(SystemExit, match=f"^damaged: .*{message}"):
        main([str(tmp_path / "train.parquet"), str(tmp_path / "o"), "--image", "png", *options])


def test_a_file_a_seed_is_written_that_a_study_can_name(tmp_path: Path) -> None:
    make_study(tmp_path)
    out = str(tmp_path / "made" / "{seed}.parquet")
    options = ["--image", "png", "--size", "8", "--samples", "40", "--noise", "0.25",
               "--validation", "16"]  # fmt: skip
    main([str(tmp_path / "train.parquet"), out, "--seeds", "3:5", *options])
    names = sorted(path.name for path in (tmp_path / "made").iterdir())
    assert names == [f"{seed}{end}.parquet" for seed in (3, 4) for end in ("-validation", "")]
    tables = {name: pq.read_table(tmp_path / "made" / name) for name in names}
    assert [len(table) for table in tables.values()] == [16, 40, 16, 40]
    assert pa.compute.sum(tables["3.parquet"]["is_wrong"]).as_py() == 10
    assert pa.compute.sum(tables["3-validation.parquet"]["is_wrong"]).as_py() == 4
    path = out.format(seed=3)
    read = load_images(path, image="png", label="cls", size=8)
    again = load_images(str(tmp_path / "train.parquet"), image="png", label="cls", size=8)
    assert {i.tobytes() for i in read.images} <= {i.tobytes() for i in again.images}
    wrong = is_not_zero(path, "is_wrong")
    known = {i.tobytes(): c for i, c in zip(again.images, again.labels, strict=True)}
    true = np.array([known[its.tobytes()] for its in read.images])
    assert np.array_equal(true != read.labels, wrong)


def test_samples_are_mixed_or_a_class_after_the_other(tmp_path: Path) -> None:
    make_study(tmp_path)
    for name, options in (("mixed", []), ("sorted", ["--sort"])):
        main([str(tmp_path / "train.parquet"), str(tmp_path / name), "--image", "png", *options])
    mixed, by_class = (pq.read_table(tmp_path / name)["cls"].to_pylist()
                       for name in ("mixed", "sorted"))  # fmt: skip
    assert by_class == sorted(mixed) != mixed
