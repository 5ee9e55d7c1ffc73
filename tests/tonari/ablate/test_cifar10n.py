"""Labels that people gave get to the images they were given to, and no file runs code."""

import io
import sys
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from numpy.typing import NDArray
from PIL import Image

from examples import cifar10n
from examples.damaged import load_images

NUM = 60


@pytest.fixture
def made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, NDArray[np.int64]]:
    """A dataset like CIFAR-10, in its binary batches, as Parquet, and with labels of people."""
    monkeypatch.chdir(tmp_path)
    rng = np.random.default_rng(0)
    coarse = rng.integers(256, size=(NUM, 3, 8, 8), dtype=np.uint8)
    images = coarse.repeat(4, axis=2).repeat(4, axis=3)
    labels = {"clean_label": rng.integers(10, size=NUM)}
    for name in cifar10n.HUMAN:
        labels[name] = np.where(
            rng.random(NUM) < 0.4, rng.integers(10, size=NUM), labels["clean_label"]
        )
    clean = labels["clean_label"].astype(np.uint8)[:, None]
    records = np.concatenate([clean, images.reshape(NUM, -1)], axis=1)
    Path("binary").mkdir()
    records[:40].tofile("binary/data_batch_1.bin")
    records[40:].tofile("binary/data_batch_2.bin")
    torch.save(labels, "labels.pt")
    write_parquet(images, labels["clean_label"], np.arange(NUM))
    return labels


def write_parquet(
    images: NDArray[np.uint8], classes: NDArray[np.int64], order: NDArray[np.int64]
) -> None:
    rows = []
    for place in order.tolist():
        file = io.BytesIO()
        Image.fromarray(images[place].transpose(1, 2, 0)).save(
            file, "JPEG", quality=95, subsampling=0
        )
        rows.append({"key": str(place), "jpg": file.getvalue(), "cls": int(classes[place])})
    pq.write_table(pa.Table.from_pylist(rows), "train.parquet")


def convert(monkeypatch: pytest.MonkeyPatch, *options: str, labels: str = "labels.pt") -> pa.Table:
    monkeypatch.setattr(sys, "argv", ["cifar10n", labels, "train.parquet", "out.parquet", *options])
    cifar10n.main()
    return pq.read_table("out.parquet")


def check(table: pa.Table, labels: dict[str, NDArray[np.int64]], kind: str) -> None:
    of = np.array([int(key) for key in table["key"].to_pylist()])
    assert sorted(of.tolist()) == list(range(NUM))
    assert table["cls"].to_numpy().tolist() == labels[kind][of].tolist()
    assert table["true_cls"].to_numpy().tolist() == labels["clean_label"][of].tolist()
    wrong = labels[kind] != labels["clean_label"]
    assert table["is_wrong"].to_numpy().tolist() == wrong[of].tolist()
    for name in cifar10n.HUMAN:
        assert table[name].to_numpy().tolist() == labels[name][of].tolist()


def test_rows_in_the_order_published_get_their_labels(made, monkeypatch, capsys):
    check(convert(monkeypatch), made, "worse_label")
    share = (made["worse_label"] != made["clean_label"]).mean()
    assert f"worse_label, {share:.1%} of 60 labels wrong" in capsys.readouterr().out
    check(convert(monkeypatch, "--kind", "random_label2"), made, "random_label2")
    np.savez("labels.npz", **made)
    check(convert(monkeypatch, labels="labels.npz"), made, "worse_label")


def test_rows_in_another_order_are_refused_and_found_by_their_images(made, monkeypatch):
    images = load_images("train.parquet", image="jpg", label="cls", size=32).images
    write_parquet(
        images.transpose(0, 3, 1, 2),
        made["clean_label"],
        np.argsort(made["clean_label"], kind="stable"),
    )
    with pytest.raises(SystemExit, match=r"classes are not those of clean_label.*--originals"):
        convert(monkeypatch)
    check(convert(monkeypatch, "--originals", "binary"), made, "worse_label")


def test_images_that_are_none_of_those_published_are_refused(made, monkeypatch):
    other = np.random.default_rng(1).integers(256, size=(NUM, 3, 32, 32), dtype=np.uint8)
    write_parquet(other, made["clean_label"], np.arange(NUM))
    with pytest.raises(SystemExit, match="60 images are like none in binary"):
        convert(monkeypatch, "--originals", "binary")
    np.zeros(3073 * 3, np.uint8).tofile("binary/data_batch_1.bin")
    with pytest.raises(SystemExit, match="its 23 labels are not those of clean_label"):
        convert(monkeypatch, "--originals", "binary")


def test_one_image_that_is_another_is_refused_where_all_find_a_place(tmp_path):
    rng = np.random.default_rng(2)
    images = rng.integers(256, size=(2, 3, 32, 32), dtype=np.uint8)
    classes = np.array([0, 1])
    records = np.concatenate([classes.astype(np.uint8)[:, None], images.reshape(2, -1)], axis=1)
    records.tofile(tmp_path / "data_batch_1.bin")
    assert cifar10n.find_images(images, classes, tmp_path, classes).tolist() == [0, 1]
    images[1] = 0
    with pytest.raises(ValueError, match=r"1 images are like none in .*, and 0 like one that"):
        cifar10n.find_images(images, classes, tmp_path, classes)


class Evil:
    def __reduce__(self) -> tuple[object, tuple[str, str]]:
        return open, ("was_run", "w")


def test_a_file_that_would_run_code_is_refused_unread(made, monkeypatch):
    torch.save({**made, "more": Evil()}, "labels.pt")
    Path("was_run").unlink(missing_ok=True)
    with pytest.raises(SystemExit, match="cannot be read without running code"):
        convert(monkeypatch)
    np.save("labels.npy", np.array(made, dtype=object), allow_pickle=True)
    with pytest.raises(SystemExit, match="cannot be read without running code"):
        convert(monkeypatch, labels="labels.npy")
    assert not Path("was_run").exists()


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"worse_label": np.arange(NUM)}, r"worse_label is int64\[60\], expected as many whole"),
        ({"aggre_label": np.zeros(NUM)}, r"aggre_label is float64\[60\]"),
        ({"aggre_label": np.zeros(3, np.int64)}, r"aggre_label is int64\[3\]"),
        ({"aggre_label": None}, "expected the arrays clean_label, aggre_label"),
    ],
)
def test_labels_that_are_none_are_refused(made, monkeypatch, changed, message):
    kept = {name: values for name, values in {**made, **changed}.items() if values is not None}
    np.savez("labels.npz", **kept)
    with pytest.raises(SystemExit, match=message):
        convert(monkeypatch, labels="labels.npz")
    with pytest.raises(SystemExit, match=r"nowhere.pt"):
        convert(monkeypatch, labels="nowhere.pt")


def test_other_numbers_of_rows_and_other_columns_are_refused(made, monkeypatch):
    with pytest.raises(SystemExit, match="no column 'label', expected one of key, jpg, cls"):
        convert(monkeypatch, "--label", "label")
    pq.write_table(pq.read_table("train.parquet").slice(0, 50), "train.parquet")
    with pytest.raises(SystemExit, match="50 rows for 60 labels, expected as many"):
        convert(monkeypatch)
