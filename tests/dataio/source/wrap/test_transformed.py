"""A stage transform is applied once to each sample, and what it returns is kept."""

import functools
import subprocess
import sys
from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image as Picture

from dataio.base.errors import FieldError, SourceError
from dataio.rows.fields import Array, Bytes, Field, Float, Image, Int, Mask, Text, Tokens
from dataio.rows.views import RandomCrop, Resize
from dataio.source import DatasetSource, TransformedSource
from dataio.source.wrap.function_hash import describe_function
from dataio.world import World, run_threads, thread_worlds
from tests.dataio.source.shards import Row, ids, read_all, rows_of

NUM = 12
FIELDS: dict[str, Field] = {
    "image": Image("image"),
    "label": Int("label"),
    "value": Float("value"),
    "ids": Tokens("ids", "int16", length=3),
    "text": Text("text"),
    "raw": Bytes("raw"),
}


def inner() -> DatasetSource:
    samples = [
        {
            "image": np.full((4 + i, 5, 3), i, np.uint8),
            "label": i,
            "value": i / 2,
            "ids": np.arange(i % 4, dtype=np.int16),
            "text": f"é{i}",
            "raw": b"%d" % i,
        }
        for i in range(NUM)
    ]
    return DatasetSource(samples, name="inner")


def shrink(sample: dict[str, Any]) -> dict[str, Any]:
    assert sample["image"].shape == (4 + int(sample["label"]), 5, 3)
    assert sample["image"].dtype == np.uint8
    image = Picture.fromarray(sample["image"]).resize((2, 3))
    made = {
        "image": np.asarray(image),
        "mean": torch.from_numpy(sample["image"].mean(axis=(0, 1))),
        "label": sample["label"] + 1,
        "double": float(sample["value"]) * 2,
        "ids": sample["ids"][::-1],
        "words": sample["text"] + "!",
        "raw": sample["raw"] * 2,
    }
    sample["label"] = None
    return made


SHRUNK: dict[str, Field] = {
    "image": Image("image", resize=Resize((3, 2)), decoded=True),
    "mean": Array("mean", (3,), "float64"),
    "label": Int("label"),
    "double": Float("double"),
    "ids": Tokens("ids", "int16", length=3),
    "words": Text("words"),
    "raw": Bytes("raw"),
}


def expected(number: int) -> Row:
    return number, [
        bytes([number]) * 18,
        np.full(3, number, np.float64).tobytes(),
        np.int64(number + 1).tobytes(),
        np.float32(number).tobytes(),
        np.arange(number % 4, dtype=np.int16)[::-1].tobytes(),
        f"é{number}!".encode(),
        b"%d%d" % (number, number),
    ]


@pytest.mark.parametrize("num_ranks", [1, 3])
def test_every_rank_keeps_what_the_transform_returns(num_ranks: int) -> None:
    def work(world: World) -> tuple[Mapping[str, Field], str, list[Row]]:
        source = TransformedSource(inner(), FIELDS, shrink, world=world)
        fields = source.fields
        mine = np.arange(world.rank, NUM, world.world_size)
        return fields, source.fingerprint, rows_of(source.read(mine, fields))

    ranks = run_threads(thread_worlds([num_ranks]), work)
    assert all(fields == SHRUNK for fields, _, _ in ranks)
    assert len({fingerprint for _, fingerprint, _ in ranks}) == 1
    assert sorted(row for _, _, rows in ranks for row in rows) == [expected(i) for i in range(NUM)]


def test_one_rank_reads_the_first_sample_for_all() -> None:
    def work(world: World) -> int:
        inside = inner()
        assert TransformedSource(inside, FIELDS, shrink, world=world).fields
        return inside.bytes_read

    assert [bool(read) for read in run_threads(thread_worlds([2, 1]), work)] == [True, False, False]


def test_an_error_on_the_first_sample_is_raised_by_all() -> None:
    def fail(sample: dict[str, Any]) -> dict[str, Any]:
        return {"x": object()}

    def work(world: World) -> str:
        with pytest.raises(FieldError, match="sample 0, transformed, field 'x': found object"):
            _ = TransformedSource(inner(), FIELDS, fail, world=world).fields
        return "raised"

    assert run_threads(thread_worlds([2, 1]), work) == ["raised"] * 3


def changed(sample: dict[str, Any], **values: object) -> dict[str, Any]:
    if int(sample["label"]) < 7:
        return {"x": np.zeros((2, 3), np.float32), "y": 1}
    made = {"x": np.zeros((2, 3), np.float32), "y": 1} | values
    return {name: value for name, value in made.items() if value is not None}


@pytest.mark.parametrize(
    ("values", "found"),
    [
        (
            {"x": np.zeros((3, 2), np.float32)},
            r"'x': found Array.*\(3, 2\).* expected Array.*\(2, 3\)",
        ),
        ({"x": np.zeros((2, 3))}, "'x': found Array.*float64.* expected Array.*float32"),
        ({"x": b"x"}, "'x': found Bytes.* expected Array"),
        ({"y": None}, "'y': found nothing, expected Int"),
        ({"z": 1}, "'z': found Int.*, expected nothing as sample 0 has"),
        ({"y": np.array("a")}, "found what cannot be kept .*is not one of numbers"),
    ],
)
def test_the_first_sample_that_differs_is_named(values: dict[str, Any], found: str) -> None:
    source = TransformedSource(inner(), FIELDS, functools.partial(changed, **values))
    with pytest.raises(FieldError, match=f"sample 7, transformed.*{found}"):
        read_all(source, source.fields)


def test_a_transform_that_fails_or_returns_no_sample_is_named() -> None:
    def fail(sample: dict[str, Any]) -> dict[str, Any]:
        return {"x": 1 / int(sample["label"] - 5)}

    source = TransformedSource(inner(), FIELDS, fail)
    with pytest.raises(SourceError, match=r"transform failed on sample 5 \(ZeroDivisionError"):
        read_all(source, source.fields)

    def none(sample: dict[str, Any]) -> Any:
        return None

    with pytest.raises(FieldError, match="sample 0, transformed: found NoneType, expected the"):
        _ = TransformedSource(inner(), FIELDS, none).fields
    source = TransformedSource(inner(), FIELDS, shrink)
    with pytest.raises(FieldError, match=r"the transform returns image, mean, .* expected 'none'"):
        source.read(ids(0), {"x": Int("none")})


def test_some_of_the_fields_can_be_read_under_other_names() -> None:
    source = TransformedSource(inner(), FIELDS, shrink)
    rows = rows_of(source.read(ids(3), {"target": source.fields["label"]}))
    assert rows == [(3, [np.int64(4).tobytes()])]
    assert source.num_samples == NUM
    assert source.shard_starts.tolist() == [0]


def resize(size: int, offset: int = 0) -> Any:
    def inside(sample: dict[str, Any]) -> dict[str, Any]:
        return {"x": size + offset, "known": "b" in {"a", "b", "c"}}

    return inside


class Called:
    def __call__(self, sample: dict[str, Any]) -> dict[str, Any]:
        return {}


def test_the_fingerprint_tells_code_version_and_settings() -> None:
    def print_of(transform: Any, version: str = "") -> str:
        return TransformedSource(inner(), FIELDS, transform, version=version).fingerprint

    assert print_of(resize(2)) == print_of(resize(2))
    assert print_of(Called()) == print_of(Called())
    partial = functools.partial
    different = [resize(2), resize(3), resize(2, 1), shrink, partial(changed, x=1), Called()]
    different += [partial(changed, x=2), lambda sample: {"x": 1}, lambda sample: {"x": 2}]
    assert len({print_of(transform) for transform in different}) == len(different)
    assert print_of(shrink, "2") != print_of(shrink)


def test_every_process_describes_a_function_alike() -> None:
    program = (
        "from tests.dataio.source.wrap.test_transformed import resize, describe_function;"
        "print(describe_function(resize(2)))"
    )
    said = {
        subprocess.run(
            [sys.executable, "-W", "ignore", "-c", program],
            env={"PYTHONHASHSEED": seed, "PYTHONPATH": ":".join(sys.path)},
            capture_output=True, text=True, timeout=120, check=True,
        ).stdout.strip()
        for seed in ("1", "2")
    }  # fmt: skip
    assert said == {describe_function(resize(2))}


def test_what_is_drawn_of_an_image_is_drawn_after_the_transform() -> None:
    drawn = Image("image", crop=RandomCrop((2, 1)), flip=0.5)
    seen = []

    def look(sample: Any) -> Any:
        seen.append(sample["image"].shape)
        return sample

    field = TransformedSource(inner(), {"image": drawn}, look).fields["image"]
    (shape,) = set(seen)
    kept = Resize(shape[:2])
    assert shape[0] > 2
    assert field == Image("image", resize=kept, crop=RandomCrop((2, 1)), flip=0.5, decoded=True)
    gray = DatasetSource([{"mask": np.zeros((4, 5), np.uint8)}], name="gray")
    with pytest.raises(FieldError, match="expected a Mask without flip or random crop"):
        print(TransformedSource(gray, {"mask": Mask("mask", flip=0.5)}, dict).fields)
