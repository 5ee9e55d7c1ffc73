"""A loader takes what people have: datasets, arrays, files that were converted as advised."""

import json
import os
import re
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
import torch
from torch.utils.data import IterableDataset, TensorDataset

import dataio
from dataio import Array, Float, Int, Loader, Reports, Staging, Workers
from dataio.world import World, run_threads, single_world, thread_worlds


def make(source: Any, cache: Path, fields: dict[str, Any], **options: Any) -> Loader:
    return Loader(
        source, batch_size=4, fields=fields, cache=cache, world=single_world(),
        workers=Workers(threads=0), reports=Reports(progress=False), **options,
    )  # fmt: skip


def rows(loader: Loader, name: str) -> dict[int, Any]:
    """Each sample's value of a field, by its number."""
    with loader:
        return {
            number: batch[name][row].tolist()
            for batch in loader
            for row, number in enumerate(batch["sample_id"].tolist())
        }


class HuggingFaceLike:
    """Rows as dicts, by their number alone; columns by their names, as `datasets.Dataset` has."""

    def __init__(self, first: int) -> None:
        self.first = first

    def __len__(self) -> int:
        return 8

    def __getitem__(self, key: int | str) -> Any:
        if isinstance(key, str):
            return [self[i][key] for i in range(8)]
        return {"x": float(key), "label": self.first + key}


def test_a_dict_of_arrays_is_a_source(tmp_path: Path) -> None:
    x = np.arange(16, dtype=np.float32).reshape(8, 2)
    np.save(tmp_path / "label.npy", np.arange(8))
    source = {"x": x, "label": tmp_path / "label.npy"}
    fields = {"x": Array("x", (2,), "float32"), "label": Int("label")}
    found = rows(make(source, tmp_path / "cache", fields), "x")
    assert [found[i] for i in range(8)] == x.tolist()
    assert rows(make(source, tmp_path / "cache", fields), "label") == {i: i for i in range(8)}


@pytest.mark.parametrize(
    ("dataset", "key"),
    [
        (TensorDataset(torch.arange(8.0), torch.arange(8)), "1"),
        (HuggingFaceLike(0), "label"),
        ([{"label": i} for i in range(8)], "label"),
    ],
    ids=["torch", "hugging face", "list"],
)
def test_a_map_style_dataset_is_a_source(dataset: Any, key: str, tmp_path: Path) -> None:
    with make(dataset, tmp_path, {"label": Int(key)}) as loader:
        evaluated = [batch["label"].tolist() for batch in loader.evaluation(dataset)]
    assert evaluated == [[0, 1, 2, 3], [4, 5, 6, 7]]
    assert rows(make(dataset, tmp_path, {"label": Int(key)}), "label") == {i: i for i in range(8)}


def test_arrays_and_datasets_open_without_a_loader() -> None:
    assert dataio.open_source({"x": np.arange(8)}).num_samples == 8
    assert dataio.open_source(HuggingFaceLike(0)).num_samples == 8


def test_two_datasets_of_one_class_share_a_cache_root(tmp_path: Path) -> None:
    for _ in range(2):
        for first in (0, 100):
            loader = make(HuggingFaceLike(first), tmp_path, {"label": Int("label")})
            assert rows(loader, "label") == {i: first + i for i in range(8)}
    assert len([path for path in tmp_path.iterdir() if path.name != "indexes"]) == 2


def test_two_stage_transforms_share_a_cache_root(tmp_path: Path) -> None:
    """Each function's rows lie in a directory of their own, and are found there again."""

    def plus(sample: dict[str, Any]) -> dict[str, Any]:
        return {"x": sample["x"] + 1}

    def times(sample: dict[str, Any]) -> dict[str, Any]:
        return {"x": sample["x"] * 3}

    source = {"x": np.arange(8, dtype=np.float32)}
    for staged_before in (False, True):
        for transform in (plus, times):
            loader = make(source, tmp_path, {"x": Float("x")}, staging=Staging(transform=transform))
            assert (loader.stats()["staging_s"] == 0) is staged_before
            expected = {i: transform({"x": float(i)})["x"] for i in range(8)}
            assert rows(loader, "x") == expected


def save_rows(path: Path, **others: Any) -> None:
    values: dict[str, Any] = {
        "x": np.arange(24, dtype=np.float32).reshape(8, 3),
        "label": np.arange(8),
    } | others
    if path.suffix == ".npz":
        np.savez(path, **values)
        return
    with h5py.File(path, "w") as file:
        for name, value in values.items():
            file[name] = value


ROWS = {"x": Array("x", (3,), "float32"), "label": Int("label")}


@pytest.mark.parametrize("suffix", [".npz", ".h5"])
@pytest.mark.parametrize("given", ["file", "list", "glob", "directory"])
def test_arrays_of_one_row_a_sample_need_no_declaration(
    suffix: str, given: str, tmp_path: Path
) -> None:
    data = tmp_path / "data"
    data.mkdir()
    save_rows(data / f"a{suffix}")
    source: Any = data / f"a{suffix}"
    if given != "file":
        save_rows(data / f"b{suffix}")
        source = {"list": [source, data / f"b{suffix}"], "glob": str(data / f"*{suffix}")}.get(
            given, data
        )
    found = rows(make(source, tmp_path / "cache", ROWS), "label")
    assert found == {i: i % 8 for i in range(8 if given == "file" else 16)}
    declared = rows(make(dataio.ArrayFiles(source), tmp_path / "cache", ROWS), "label")
    assert declared == found


def test_an_npy_is_rows(tmp_path: Path) -> None:
    np.save(tmp_path / "x.npy", np.arange(24, dtype=np.float32).reshape(8, 3))
    found = rows(
        make(tmp_path / "x.npy", tmp_path / "c", {"x": Array("arr_0", (3,), "float32")}), "x"
    )
    assert found[7] == [21, 22, 23]


@pytest.mark.parametrize("suffix", [".npz", ".h5"])
@pytest.mark.parametrize("other", [np.arange(3), np.float32(1)], ids=["another length", "scalar"])
def test_arrays_that_differ_are_refused_with_advice_that_works(
    suffix: str, other: Any, tmp_path: Path
) -> None:
    path = tmp_path / f"a{suffix}"
    save_rows(path, other=other)

    def work(world: World) -> str:
        with pytest.raises(dataio.SourceError, match="expected arrays that all have") as error:
            dataio.open_source(path, world=world)
        return str(error.value)

    said = run_threads(thread_worlds([2]), work)
    assert said[0] == said[1]
    call = re.search(r"dataio\.ArrayFiles\(.*?axis=0\)", said[0])
    assert call is not None
    source = eval(call[0], {"dataio": dataio})
    assert rows(make(source, tmp_path / "cache", ROWS), "label") == {i: i for i in range(8)}


def test_several_arrays_without_names_may_be_samples_or_rows(tmp_path: Path) -> None:
    for i in range(2):
        np.save(tmp_path / f"{i}.npy", np.zeros((8, 3)))
    with pytest.raises(dataio.SourceError, match=r"of 2 files, .*axis=None for whole files"):
        dataio.open_source(tmp_path)


def test_shards_are_opened_whatever_arrays_lie_beside_them(tmp_path: Path) -> None:
    np.save(tmp_path / "mean.npy", np.zeros(3))
    (tmp_path / "a.jsonl").write_text("".join(f'{{"label": {i}}}\n' for i in range(8)))
    assert dataio.open_source(tmp_path).num_samples == 8


def write_csv(path: Path) -> None:
    path.write_text("label,score\n" + "".join(f"{i},0.5\n" for i in range(8)))


def write_tsv(path: Path) -> None:
    path.write_text("label\tscore\n" + "".join(f"{i}\t0.5\n" for i in range(8)))


def write_json(path: Path) -> None:
    path.write_text(json.dumps([{"label": i} for i in range(8)]))


@pytest.mark.parametrize(
    ("suffix", "write", "in_directory"),
    [
        (".csv", write_csv, False),
        (".csv", write_csv, True),
        (".tsv", write_tsv, False),
        (".json", write_json, False),
    ],
)
def test_the_advice_for_tables_works(
    suffix: str, write: Any, in_directory: bool, tmp_path: Path
) -> None:
    path = tmp_path / "data" / f"x.v1{suffix}"
    path.parent.mkdir()
    write(path)
    with pytest.raises(dataio.SourceError) as error:
        make(path.parent if in_directory else path, tmp_path / "cache", {"label": Int("label")})
    advice = re.search(r"`(import .*)`, and give '(.*)'", str(error.value))
    assert advice is not None, error.value
    exec(advice[1], {})
    assert rows(make(advice[2], tmp_path / "cache", {"label": Int("label")}), "label") == {
        i: i for i in range(8)
    }


@pytest.mark.parametrize(
    ("name", "message"), [("x.lance", "pip install pylance"), ("nothing", "check the path, and")]
)
def test_a_directory_that_holds_no_shard_gets_advice(
    name: str, message: str, tmp_path: Path
) -> None:
    (tmp_path / name / "data").mkdir(parents=True)
    with pytest.raises(dataio.SourceError, match=message):
        dataio.open_source(tmp_path / name)


class Endless(IterableDataset[int]):
    def __iter__(self) -> Any:
        return iter(range(8))


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ({"train": HuggingFaceLike(0), "test": HuggingFaceLike(8)}, "of train, test, of which 'tr"),
        ({"x": [1, 2, 3]}, "'x' is a list, expected arrays of NumPy .* np.asarray"),
        (b"x.tar", "source: found bytes, expected the names of shards"),
        (Endless(), "Loader: source is .*Endless.*; give shards by their names, a dataset that"),
        ([Path("x.tar"), 3], "a list of names and of 3, expected names of shards"),
    ],
)
def test_what_is_no_source_is_refused(source: Any, message: str, tmp_path: Path) -> None:
    with pytest.raises((TypeError, dataio.DataioError), match=message):
        make(source, tmp_path / "cache", {"x": Int("x")})
    assert not (tmp_path / "cache").exists()


def test_a_shard_may_have_a_name_that_is_no_utf_8(tmp_path: Path) -> None:
    path = os.fsdecode(os.fsencode(tmp_path) + b"/a\xff.jsonl")
    Path(path).write_text("\n".join(json.dumps({"x": i}) for i in range(8)))
    for _ in range(2):  # staged, and found in the cache
        assert rows(make(path, tmp_path / "cache", {"x": Int("x")}), "x") == {
            i: i for i in range(8)
        }
