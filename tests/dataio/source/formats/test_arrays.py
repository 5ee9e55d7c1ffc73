"""NumPy arrays, in memory and in files, are read by rows."""

from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from dataio.base.errors import FieldError, SourceError
from dataio.rows.fields import Array, Bytes, Field, Float, Image, Int, Text, Tokens
from dataio.rows.views import Resize
from dataio.source import NumpySource
from dataio.world import World, run_threads, thread_worlds
from tests.dataio.source.shards import Row, ids, read_all, rows_of

NUM = 23
IMAGES = np.random.default_rng(0).integers(0, 256, (NUM, 4, 5, 3), np.uint8)
LABELS = np.arange(NUM, dtype=np.int32) % 5
FIELDS: dict[str, Field] = {
    "image": Array("image", (4, 5, 3), "uint8"),
    "pixels": Image("image", resize=Resize((4, 5)), decoded=True),
    "label": Int("label"),
    "value": Float("label"),
    "tokens": Tokens("tokens"),
    "name": Text("name"),
}
ARRAYS = {
    "image": IMAGES,
    "label": LABELS,
    "tokens": np.arange(2 * NUM).reshape(NUM, 2),
    "name": np.array([f"é{i}" for i in range(NUM)]),
}

RECORDS = np.zeros(NUM, [("a", "i4"), ("b", "f8")])


def expected(number: int) -> Row:
    return number, [
        IMAGES[number].tobytes(),
        IMAGES[number].tobytes(),
        np.int64(LABELS[number]).tobytes(),
        np.float32(LABELS[number]).tobytes(),
        np.array([2 * number, 2 * number + 1], np.int32).tobytes(),
        f"é{number}".encode(),
    ]


def saved(directory: Path) -> NumpySource:
    for key, array in ARRAYS.items():
        np.save(directory / f"{key}.npy", array)
    return NumpySource({key: directory / f"{key}.npy" for key in ARRAYS})


@settings(
    max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(chosen=st.sets(st.integers(0, NUM - 1)))
def test_files_and_memory_give_the_same_rows(tmp_path: Path, chosen: set[int]) -> None:
    for source in (NumpySource(ARRAYS), saved(tmp_path)):
        assert read_all(source, FIELDS) == [expected(i) for i in range(NUM)]
        wanted = np.array(sorted(chosen), np.int64)
        assert rows_of(source.read(wanted, FIELDS)) == [expected(i) for i in sorted(chosen)]


def test_ranks_agree_and_share_the_reading(tmp_path: Path) -> None:
    saved(tmp_path)

    def work(world: World) -> tuple[str, list[Row]]:
        source = NumpySource({key: f"{tmp_path}/{key}.npy" for key in ARRAYS})
        mine = np.arange(world.rank, NUM, 3)
        return source.fingerprint, rows_of(source.read(mine, FIELDS))

    ranks = run_threads(thread_worlds([2, 1]), work)
    assert len({fingerprint for fingerprint, _ in ranks}) == 1
    assert sorted(row for _, rows in ranks for row in rows) == [expected(i) for i in range(NUM)]


def test_only_the_rows_needed_are_read_in_blocks(tmp_path: Path) -> None:
    np.save(tmp_path / "a.npy", np.zeros((64, 1 << 18), np.float32))
    source = NumpySource({"a": tmp_path / "a.npy"})
    fields: dict[str, Field] = {"a": Array("a", (1 << 18,), "float32")}
    before = source.bytes_read
    blocks = [len(rows) for rows in source.read(ids(3, 40, 41), fields)]
    assert source.bytes_read - before == 3 << 20
    assert blocks == [3]
    assert max(len(rows) for rows in source.read(np.arange(64), fields)) == 8


def test_the_fingerprint_tells_changed_content() -> None:
    before = NumpySource(ARRAYS)
    changed = NumpySource(ARRAYS | {"label": LABELS + (np.arange(NUM) == 7).astype(np.int32)})
    assert NumpySource(dict(ARRAYS)).fingerprint == before.fingerprint != changed.fingerprint
    assert before.name == f"numpy://{before.fingerprint}"
    assert NumpySource(ARRAYS, name="numpy://mine").name == "numpy://mine"


def test_a_changed_file_is_noticed(tmp_path: Path) -> None:
    before = saved(tmp_path)
    assert before.fingerprint == saved_again(tmp_path).fingerprint
    np.save(tmp_path / "label.npy", LABELS + 1)
    assert before.fingerprint != saved_again(tmp_path).fingerprint
    assert before.name == f"{tmp_path}/image.npy"


def saved_again(directory: Path) -> NumpySource:
    return NumpySource({key: directory / f"{key}.npy" for key in ARRAYS})


@pytest.mark.parametrize(
    ("value", "found"),
    [
        (np.array([{}]), r"array 'x' is object\[1\], expected an array of numbers or text"),
        (np.array(3), r"array 'x' is int64\[\]"),
        (np.zeros(2), "the arrays have 'x': 2, 'label': 23 rows, expected one length"),
    ],
)
def test_wrong_arrays_are_refused(value: np.ndarray, found: str) -> None:
    with pytest.raises(SourceError, match=found):
        NumpySource({"x": value, "label": LABELS})


def test_lists_are_refused() -> None:
    with pytest.raises(
        TypeError, match=r"arrays is {'x': \[1, 2\]}, .*convert each with np.asarray"
    ):
        NumpySource({"x": [1, 2]})  # type: ignore[dict-item]


def test_wrong_files_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "a.npy"
    for array, found in (
        (np.array([{"a": 1}]), "found the dtype object, expected numbers.*never unpickled"),
        (np.asfortranarray(IMAGES), "found columns one by one, expected rows"),
        (np.array(3), r"found \d+ bytes for the shape \[\], expected one row a sample"),
    ):
        np.save(path, array)
        with pytest.raises(SourceError, match=found):
            NumpySource({"a": path})
    np.save(path, IMAGES)
    whole = path.read_bytes()
    for data, found in ((whole[:-1], "bytes for the shape"), (b"x" * 100, "no header of an .npy")):
        path.write_bytes(data)
        with pytest.raises(SourceError, match=found):
            NumpySource({"a": path})
    path.write_bytes(whole)
    source = NumpySource({"a": path})
    path.write_bytes(whole[:-1])
    with pytest.raises(SourceError, match=r"a.npy: ends at byte \d+, expected an array up to byte"):
        read_all(source, {"a": Array("a", (4, 5, 3), "uint8")})


@pytest.mark.parametrize(
    ("field", "found"),
    [
        (Int("none"), "found the arrays image, label, tokens, name, record, expected 'none' for f"),
        (Array("image", (4, 5), "uint8"), r"'image', sample 0: found uint8\[4, 5, 3\], expected"),
        (Int("name"), "array 'name', sample 0: found 'é0', expected a whole number"),
        (Bytes("label"), "array 'label', sample 0: found 0, expected bytes"),
        (
            Tokens("record"),
            r"'record', sample 0: found \[\('a', .*expected numbers of int32 in one",
        ),
        (Image("tokens"), r"sample 0: found int64\[2\], expected a compressed image, or uint8\["),
    ],
)
def test_a_field_that_an_array_is_not_is_refused(field: Field, found: str) -> None:
    with pytest.raises(FieldError, match=found):
        read_all(NumpySource(ARRAYS | {"record": RECORDS}), {"field": field})
