"""Map-style datasets are asked for each sample once."""

import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image as Picture
from torch.utils.data import IterableDataset, TensorDataset

from dataio.base.errors import FieldError, SourceError
from dataio.rows.decode import decode_image
from dataio.rows.fields import Array, Bytes, Field, Float, Image, Int, Mask, Text, Tokens
from dataio.rows.views import Resize
from dataio.source import DatasetSource
from dataio.world import World, run_threads, thread_worlds
from tests.dataio.source.shards import Row, ids, read_all, rows_of


class Things:
    """Samples as dicts of every kind of value; counts what is asked for."""

    def __init__(self, num_samples: int = 20) -> None:
        self.num_samples = num_samples
        self.asked: list[int] = []

    def __len__(self) -> int:
        return self.num_samples

    def __getitem__(self, index: int) -> dict[str, Any]:
        self.asked.append(index)
        return {
            "tensor": torch.full((2, 3), index, dtype=torch.float32, requires_grad=True),
            "array": np.full(2, index, np.int16),
            "label": index,
            "scalar": torch.tensor(index),
            "value": index / 2,
            "raw": b"%d" % index,
            "text": f"é{index}",
            "tokens": list(range(index % 4)),
            "picture": Picture.new("RGB", (4, 3), (index, 0, 1)),
            "nothing": None,
        }


FIELDS: dict[str, Field] = {
    "tensor": Array("tensor", (2, 3), "float32"),
    "array": Array("array", (2,), "int16"),
    "label": Int("label"),
    "scalar": Int("scalar"),
    "value": Float("value"),
    "pixels": Image("picture", resize=Resize((3, 4)), decoded=True),
    "raw": Bytes("raw"),
    "text": Text("text"),
    "tokens": Tokens("tokens"),
}


def expected(number: int) -> Row:
    return number, [
        np.full((2, 3), number, np.float32).tobytes(),
        np.full(2, number, np.int16).tobytes(),
        np.int64(number).tobytes(),
        np.int64(number).tobytes(),
        np.float32(number / 2).tobytes(),
        bytes([number, 0, 1]) * 12,
        b"%d" % number,
        f"é{number}".encode(),
        np.arange(number % 4, dtype=np.int32).tobytes(),
    ]


@pytest.mark.parametrize("num_ranks", [1, 3])
def test_each_sample_is_asked_for_once(num_ranks: int) -> None:
    def work(world: World) -> tuple[str, list[Row], list[int]]:
        dataset = Things()
        source = DatasetSource(dataset, name="things")
        mine = np.arange(world.rank, 20, world.world_size)
        rows = rows_of(source.read(mine, FIELDS))
        return source.fingerprint, rows, dataset.asked[: len(mine)]

    ranks = run_threads(thread_worlds([num_ranks]), work)
    assert len({fingerprint for fingerprint, _, _ in ranks}) == 1
    assert sorted(row for _, rows, _ in ranks for row in rows) == [expected(i) for i in range(20)]
    assert sorted(i for _, _, asked in ranks for i in asked) == list(range(20))


def test_tuples_are_keyed_by_position() -> None:
    data = TensorDataset(torch.arange(6.0).reshape(3, 2), torch.tensor([5, 6, 7]))
    fields: dict[str, Field] = {"x": Array("0", (2,), "float32"), "y": Int("1")}
    rows = read_all(DatasetSource(data, name="t"), fields)
    assert rows[2] == (2, [np.array([4, 5], np.float32).tobytes(), np.int64(7).tobytes()])
    alone = DatasetSource([3, 4], name="list")
    assert [row for _, (row,) in read_all(alone, {"y": Int("0")})] == [
        np.int64(i).tobytes() for i in (3, 4)
    ]


@pytest.mark.parametrize("mode", ["1", "L", "P", "RGB", "RGBA", "CMYK"])
def test_pictures_of_any_mode_become_pixels(mode: str) -> None:
    picture = Picture.new("RGB", (4, 3), (200, 200, 200)).convert(mode)
    source = DatasetSource([picture], name="pictures")
    ((_, (pixels,)),) = read_all(source, {"image": Image("0", resize=Resize((3, 4)), decoded=True)})
    true = np.asarray(picture.convert("RGB"))
    assert np.abs(np.frombuffer(pixels, np.uint8).reshape(3, 4, 3) - true.astype(int)).max() <= 1
    ((_, (kept,)),) = read_all(source, {"image": Image("0")})
    assert kept.startswith(b"\x89PNG")


def test_pictures_of_numbers_keep_them() -> None:
    source = DatasetSource([Picture.fromarray(np.array([[False, True]]))], name="bits")
    for field, most in ((Mask("0"), 1), (Image("0", channels=1), 255)):
        ((_, (kept,)),) = read_all(source, {"bits": field})
        out = np.empty((1, 2, 1), np.uint8)
        decode_image(memoryview(kept), out, field, where="")
        assert out.ravel().tolist() == [0, most]
    for dtype in ("uint16", "int32", "float32"):
        deep = np.array([[0.5, 300]]).astype(dtype)
        source = DatasetSource([Picture.fromarray(deep)], name="deep")
        assert read_all(source, {"x": Array("0", (1, 2), dtype)}) == [(0, [deep.tobytes()])]
        with pytest.raises(FieldError, match=rf"found {dtype}.*; declare Array instead of Image"):
            read_all(source, {"x": Image("0")})


def test_the_fingerprint_tells_version_length_and_content() -> None:
    prints = [
        DatasetSource(data, name="n", version=version).fingerprint
        for data, version in (
            ([1, 2], ""),
            ([1, 2], ""),
            ([1, 2], "2"),
            ([1, 2, 2], ""),
            ([1, 3], ""),
        )
    ]
    assert prints[0] == prints[1]
    assert len(set(prints)) == 4


def test_random_samples_are_refused() -> None:
    class Jitter:
        def __init__(self) -> None:
            self.rng = np.random.default_rng(0)

        def __len__(self) -> int:
            return 5

        def __getitem__(self, index: int) -> float:
            return float(self.rng.random())

    with pytest.raises(SourceError, match=r"sample 0 is another one each time.*Loader\(transform="):
        _ = DatasetSource(Jitter(), name="jitter").fingerprint


def test_an_iterable_dataset_is_refused_in_clear_words() -> None:
    class Stream(IterableDataset[int]):
        def __iter__(self) -> Iterator[int]:
            return iter(range(3))

        def __len__(self) -> int:
            return 3

    with pytest.raises(TypeError, match=r"is iterable-style: .*expected a map-style dataset"):
        DatasetSource(Stream(), name="stream")
    with pytest.raises(TypeError, match=r"dataset is .*iterator.*an iterable-style one has no"):
        DatasetSource(iter([1, 2]), name="stream")  # type: ignore[arg-type]
    with pytest.raises(SourceError, match="the dataset is empty, expected at least one"):
        DatasetSource([], name="empty")


def test_an_error_of_the_dataset_names_the_sample() -> None:
    class Torn(Things):
        def __getitem__(self, index: int) -> dict[str, Any]:
            if index == 7:
                raise OSError("torn")
            return super().__getitem__(index)

    source = DatasetSource(Torn(), name="torn")
    with pytest.raises(SourceError, match=r"torn: dataset\[7\] failed \(OSError: torn\), expected"):
        read_all(source, FIELDS)


@pytest.mark.parametrize(
    ("field", "found"),
    [
        (Int("nothing"), "sample 0, field 'field': found NoneType, expected a number, bytes"),
        (Int("absent"), "sample 0 holds tensor, array, .*expected 'absent' for field 'field'"),
        (Array("tensor", (3, 2), "float32"), r"sample 0, field 'field': found float32\[2, 3\]"),
        (Image("tensor"), r"found float32\[2, 3\], expected a compressed image, or uint8\[height"),
    ],
)
def test_a_value_that_a_field_is_not_is_refused(field: Field, found: str) -> None:
    with pytest.raises(FieldError, match=found):
        read_all(DatasetSource(Things(), name="things"), {"field": field})


def test_a_tensor_that_numpy_has_no_form_for_is_refused() -> None:
    source = DatasetSource([torch.zeros(2, dtype=torch.bfloat16)], name="b")
    with pytest.raises(FieldError, match=r"a tensor that NumPy has no form for.*tensor\.float\(\)"):
        list(source.read(ids(0), {"x": Array("0", (2,), "float32")}))


def test_sources_do_not_import_torch() -> None:
    program = "import dataio, sys; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", program], timeout=60).returncode == 0


@pytest.mark.parametrize(
    ("value", "found"),
    [
        (np.ma.masked_array([1, 2], mask=[False, True]), "an array of which 1 values are masked"),
        ([[1, 2], [3]], "list, expected a number"),
        ([2**53 + 1, 0.5], "list, expected a number"),
        (torch.zeros(2, dtype=torch.complex64).conj(), "a tensor that NumPy has no form for"),
    ],
)
def test_a_value_that_an_array_would_change_is_refused(value: Any, found: str) -> None:
    with pytest.raises(FieldError, match=rf"sample 0, field 'x': found {found}"):
        read_all(DatasetSource([{"x": value}], name="d"), {"x": Array("x", (2,), "int64")})


def test_a_list_takes_the_dtype_of_its_field_and_a_view_its_bytes() -> None:
    view = memoryview(np.array([1, 2], np.int32).data)
    source = DatasetSource([{"x": [0.5, 2], "raw": view}], name="d")
    fields: dict[str, Field] = {"x": Array("x", (2,), "float32"), "raw": Bytes("raw")}
    rows = read_all(source, fields)
    assert rows == [(0, [np.array([0.5, 2], np.float32).tobytes(), view.tobytes()])]
