"""A class has one number, in training and in every evaluation."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import dataio
from dataio import SourceError
from dataio.rows.fields import Field
from dataio.world import World, run_threads, single_world, thread_worlds
from tests.dataio.source.shards import write_tar

CLASSES = ["cat", "dog", "emu"]
FIELDS: dict[str, Field] = {"label": dataio.Int("label"), "path": dataio.Text("path")}


def folder(root: Path, classes: list[str]) -> str:
    for name in classes:
        (root / name).mkdir(parents=True)
        (root / name / "1.jpg").write_bytes(b"1")
    return str(root)


def labels(
    root: Path, train: str, test: str, *, world: World | None = None, **given: Any
) -> dict[str, int]:
    """Evaluate: the number of each class."""
    with dataio.Loader(
        train, batch_size=1, fields=FIELDS, cache=root / "cache", world=world or single_world(),
        reports=dataio.Reports(progress=False),
    ) as loader:  # fmt: skip
        evaluation = loader.evaluation(test, **given)
        return {
            str(path).split("/")[0]: int(label)
            for batch in evaluation
            for path, label, valid in zip(
                batch["path"], batch["label"], batch["valid"], strict=True
            )
            if valid
        }


@pytest.mark.parametrize(
    ("classes", "said"),
    [
        (["cat", "emu"], "it lacks 'dog', number 1 is 'emu' here and 'dog' in training"),
        (["cat", "elk", "emu"], "it lacks 'dog', only it has 'elk', number 1 is 'elk' here"),
        (["ant", *CLASSES], "only it has 'ant', number 0 is 'ant' here and 'cat' in training"),
        ([*CLASSES, "owl"], "only it has 'owl'"),
        (["cat", "dog"], "it lacks 'emu'"),
    ],
)
def test_an_evaluation_of_other_classes_is_refused_on_every_rank(
    tmp_path: Path, classes: list[str], said: str
) -> None:
    train, test = folder(tmp_path / "train", CLASSES), folder(tmp_path / "test", classes)

    def work(world: World) -> str:
        with pytest.raises(SourceError) as caught:
            labels(tmp_path, train, test, world=world)
        return str(caught.value)

    for message in run_threads(thread_worlds([2]), work):
        assert said in message
        assert 'classes="own"' in message
        assert ('classes="training"' in message) == (set(classes) <= set(CLASSES))


def test_a_folder_that_lacks_a_class_is_numbered_as_training_is(tmp_path: Path) -> None:
    train, test = folder(tmp_path / "train", CLASSES), folder(tmp_path / "test", ["cat", "emu"])
    own = labels(tmp_path, train, test, classes="own")
    assert own == {"cat": 0, "emu": 1}
    # Beside the cache that has the folder's own numbers.
    assert labels(tmp_path, train, test, classes="training") == {"cat": 0, "emu": 2}
    assert labels(tmp_path, train, test, classes="own") == own
    with pytest.raises(SourceError, match="has the classes owl, expected only those"):
        labels(tmp_path, train, folder(tmp_path / "new", ["cat", "owl"]), classes="training")


def test_the_same_classes_and_sources_without_names_are_evaluated(tmp_path: Path) -> None:
    train, test = folder(tmp_path / "train", CLASSES), folder(tmp_path / "test", CLASSES)
    assert labels(tmp_path, train, test) == {"cat": 0, "dog": 1, "emu": 2}
    shard = str(write_tar(tmp_path / "t.tar", [("0.cls", b"5"), ("0.txt", b"owl")]))
    own = {"label": dataio.Int("cls"), "path": dataio.Text("txt")}
    assert labels(tmp_path, train, shard, fields=own) == {"owl": 5}


def hugging_face(path: Path, names: list[str], *, file: str) -> str:
    """A file of three rows as Hugging Face writes it, with the names of the classes."""
    features = {"label": {"names": names, "_type": "ClassLabel"}, "name": {"_type": "Value"}}
    schema = pa.schema(
        [("label", pa.int64()), ("name", pa.string())],
        metadata={"huggingface": json.dumps({"info": {"features": features}})},
    )
    table = pa.table([list(range(len(names))), names], schema=schema)
    path.mkdir()
    if file == "parquet":
        pq.write_table(table, path / "a.parquet")
    else:
        with pa.ipc.new_stream(path / "a.arrow", schema) as out:
            out.write_table(table)
    return str(path)


class Feature:
    def __init__(self, names: list[str]) -> None:
        self.names = names


class Dataset:
    """As Hugging Face's: samples are dicts, features have the names of classes."""

    def __init__(self, names: list[str]) -> None:
        self.names = names
        self.features = {"label": Feature(names), "name": None}

    def __len__(self) -> int:
        return len(self.names)

    def __getitem__(self, index: int) -> dict[str, object]:
        return {"label": index, "name": self.names[index]}


class Folder(Dataset):
    """As torchvision's: samples are pairs, `classes` has their names."""

    def __init__(self, names: list[str]) -> None:
        self.names = self.classes = names

    def __getitem__(self, index: int) -> tuple[str, int]:  # type: ignore[override]
        return self.names[index], index


def opened(root: Path, kind: str, names: list[str]) -> Any:
    if kind in ("parquet", "arrow"):
        return hugging_face(root, names, file=kind)
    return (Folder if kind == "torchvision" else Dataset)(names)


@pytest.mark.parametrize("kind", ["parquet", "arrow", "dataset", "torchvision"])
@pytest.mark.parametrize("transformed", [False, True])
def test_columns_of_classes_must_have_the_same_names(
    tmp_path: Path, kind: str, transformed: bool
) -> None:
    keys = ("1", "0") if kind == "torchvision" else ("label", "name")
    fields: dict[str, Field] = {"label": dataio.Int(keys[0]), "name": dataio.Text(keys[1])}
    staging = dataio.Staging(transform=_unchanged if transformed else None)

    def run(test: list[str], root: Path, **given: Any) -> list[int]:
        root.mkdir()
        train = opened(root / "train", kind, CLASSES)
        with dataio.Loader(
            train, batch_size=1, fields=fields, cache=root / "c", world=single_world(),
            staging=staging, reports=dataio.Reports(progress=False),
        ) as loader:  # fmt: skip
            batches = loader.evaluation(opened(root / "test", kind, test), **given)
            return [int(batch["label"][0]) for batch in batches]

    assert run(CLASSES, tmp_path / "a") == [0, 1, 2]
    for number, classes in enumerate(["same", "training"]):
        with pytest.raises(SourceError, match="number 1 is 'emu' here and 'dog' in training"):
            run(["cat", "emu", "dog"], tmp_path / f"b{number}", classes=classes)
    assert run(["cat", "emu", "dog"], tmp_path / "c", classes="own") == [0, 1, 2]


def _unchanged(sample: dict[str, Any]) -> dict[str, Any]:
    return sample


def test_labels_are_numbers_that_the_classes_have(tmp_path: Path) -> None:
    source = dataio.source.open_source(folder(tmp_path / "train", CLASSES))
    assert isinstance(source, dataio.source.ImageFolderSource)
    wide = [f"class {number}" for number in range(300)] + CLASSES
    numbered = source.numbered_as(wide)
    (rows,) = numbered.read(np.arange(3), {"label": dataio.Int("label")})
    assert rows.fixed[0].view("<i8").ravel().tolist() == [300, 301, 302]
    assert numbered.fingerprint != source.fingerprint
    assert source.numbered_as(CLASSES).fingerprint == source.fingerprint


@pytest.mark.parametrize("file", ["parquet", "arrow"])
def test_names_that_a_later_shard_alone_has_are_compared(tmp_path: Path, file: str) -> None:
    unnamed, named, turned = (
        next(Path(hugging_face(tmp_path / part, names, file=file)).iterdir())
        for part, names in (("a", []), ("b", CLASSES), ("c", CLASSES[::-1]))
    )
    table = pa.table({"label": [0, 1], "name": ["cat", "dog"]})
    if file == "parquet":
        pq.write_table(table, unnamed)
    else:
        with pa.ipc.new_stream(unnamed, table.schema) as out:
            out.write_table(table)
    fields: dict[str, Field] = {"label": dataio.Int("label")}
    with dataio.Loader(
        [str(unnamed), str(named)], batch_size=1, fields=fields, cache=tmp_path / "cache",
        world=single_world(), reports=dataio.Reports(progress=False),
    ) as loader:  # fmt: skip
        with pytest.raises(SourceError, match="number 0 is 'emu' here and 'cat' in training"):
            loader.evaluation(str(turned))
        with pytest.raises(SourceError, match=r"class 0 of 'label' is 'emu', and 'cat' in .*/b/"):
            loader.evaluation([str(unnamed), str(named), str(turned)])
        assert len(list(loader.evaluation([str(named), str(unnamed)]))) == 5
