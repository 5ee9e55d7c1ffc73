"""A loader takes what people have: datasets, arrays, files that were converted as advised."""

from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.csv
import pyarrow.parquet
import pytest
import torch
from torch.utils.data import IterableDataset, TensorDataset

import dataio
from dataio import Array, Float, Int, Loader, Reports, Staging, Workers
from dataio.world import single_world


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


def test_the_advice_for_csv_works(tmp_path: Path) -> None:
    (tmp_path / "x.csv").write_text("label,score\n" + "".join(f"{i},0.5\n" for i in range(8)))
    with pytest.raises(dataio.DataioError, match=r"pyarrow\.csv\.read_csv\('x\.csv'\)"):
        make(tmp_path / "x.csv", tmp_path / "cache", {"label": Int("label")})
    table = pa.csv.read_csv(tmp_path / "x.csv")
    pa.parquet.write_table(table, tmp_path / "x.parquet")
    loader = make(tmp_path / "x.parquet", tmp_path / "cache", {"label": Int("label")})
    assert rows(loader, "label") == {i: i for i in range(8)}


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
