"""What a transform returns decides the batch: one form is stacked, whatever the field was."""

from collections.abc import Mapping
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image as Pillow

from dataio import AsList, FieldError
from dataio.rows.fields import Array, Bytes, Field, Int, Tokens
from tests.dataio.batch.gather_pool import gathered, open_pool
from tests.dataio.batch.test_gather import assert_same

FIELDS: Mapping[str, Field] = {
    "data": Bytes("bin"),
    "ragged": Tokens("tok", "int32"),
    "label": Int("cls"),
}
WORKERS: list[dict[str, int]] = [
    {"num_threads": 0},
    {"num_threads": 3},
    {"num_processes": 1},
    {"num_processes": 2},
]

# What runs in a process stands at module level, where it is found again.


def give(sample, rng, *, what):
    return {"x": VALUES[what](int(sample["label"]))}


VALUES: dict[str, Any] = {
    "array": lambda i: np.full((2, 3), i, np.float32),
    "strided": lambda i: np.full((2, 3), i, np.uint8)[::-1, ::2],
    "big-endian": lambda i: np.full(2, i, ">i2"),
    "read-only": lambda i: np.frombuffer(bytes([i] * 4), np.uint8),
    "scalar": np.float32,
    "int": int,
    "float": float,
    "bool": lambda i: i > 4,
    "numbers": lambda i: [i, 2.5],
    "nested numbers": lambda i: ([i, 2], [3, 4], (5, 6)),
    "tensor": lambda i: torch.full((3, 4, 5), i, dtype=torch.uint8),
    "permuted": lambda i: torch.full((4, 5, 3), i, dtype=torch.uint8).permute(2, 0, 1),
    "gradient": lambda i: torch.full((2,), float(i), requires_grad=True),
    "bfloat16": lambda i: torch.full((2, 3), i, dtype=torch.bfloat16),
    "half": lambda i: torch.full((2,), i, dtype=torch.float16),
    "float8": lambda i: torch.full((2,), i).to(torch.float8_e4m3fn),
    "number of bfloat16": lambda i: torch.tensor(i, dtype=torch.bfloat16),
    "mask": lambda i: torch.tensor([i > 4, True]),
    "rgb": lambda i: Pillow.new("RGB", (5, 4), (i, 1, 2)),
    "gray": lambda i: Pillow.new("L", (5, 4), i),
    "deep": lambda i: Pillow.new("I;16", (5, 4), 256 * i),
    "indexed": lambda i: Pillow.new("P", (5, 4), i),
}
FORMS: dict[str, tuple[torch.dtype, tuple[int, ...]]] = {
    "array": (torch.float32, (2, 3)),
    "strided": (torch.uint8, (2, 2)),
    "big-endian": (torch.int16, (2,)),
    "read-only": (torch.uint8, (4,)),
    "scalar": (torch.float32, ()),
    "int": (torch.int64, ()),
    "float": (torch.float64, ()),
    "bool": (torch.bool, ()),
    "numbers": (torch.float64, (2,)),
    "nested numbers": (torch.int64, (3, 2)),
    "tensor": (torch.uint8, (3, 4, 5)),
    "permuted": (torch.uint8, (3, 4, 5)),
    "gradient": (torch.float32, (2,)),
    "bfloat16": (torch.bfloat16, (2, 3)),
    "half": (torch.float16, (2,)),
    "float8": (torch.float8_e4m3fn, (2,)),
    "number of bfloat16": (torch.bfloat16, ()),
    "mask": (torch.bool, (2,)),
    "rgb": (torch.uint8, (3, 4, 5)),
    "gray": (torch.uint8, (1, 4, 5)),
    "deep": (torch.uint16, (1, 4, 5)),
    "indexed": (torch.uint8, (1, 4, 5)),
}


@pytest.mark.parametrize("what", VALUES)
def test_values_of_one_form_are_stacked(tmp_path, what):
    dtype, shape = FORMS[what]
    with open_pool(tmp_path, FIELDS) as pool:
        for batch in gathered(pool, FIELDS, transform=partial(give, what=what), num_threads=2):
            assert batch["x"].dtype == dtype
            assert batch["x"].shape == (8, *shape)
            for row, i in zip(batch["x"], (batch["sample_id"] % 10).tolist(), strict=True):
                first = row.flatten()[0]
                wanted = {"bool": i > 4, "mask": i > 4, "deep": 256 * i}.get(what, i)
                assert first.float() == float(wanted)


def test_a_bfloat16_is_every_one_of_its_bits(tmp_path):
    def give_all(sample, rng):
        bits = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16)
        return {"x": bits.view(torch.bfloat16)}

    with open_pool(tmp_path, FIELDS) as pool:
        batch = gathered(pool, FIELDS, transform=give_all)[0]
    assert torch.equal(batch["x"].view(torch.int16)[5], give_all({}, None)["x"].view(torch.int16))


LISTED: dict[str, Any] = {
    "bytes": lambda i: bytes(i),
    "text": lambda i: "a" * i,
    "none": lambda i: None,
    "boxes": lambda i: AsList(np.zeros((i, 4), np.float32)),
    "tensors": lambda i: AsList(torch.full((i,), i, dtype=torch.bfloat16)),
    "one by one": lambda i: AsList(torch.tensor(i)),
    "nested": lambda i: {"boxes": torch.ones(i, 4, dtype=torch.bfloat16), "names": ["a", i]},
    "views": lambda i: [torch.ones(2), torch.ones(i)],
}


def give_lists(sample, rng):
    return {name: make(int(sample["label"])) for name, make in LISTED.items()}


def deep(value):
    """What a value holds, in a form that can be compared."""
    if isinstance(value, torch.Tensor):
        return value.dtype, value.shape, value.float().tolist()
    if isinstance(value, (list, tuple)):
        return [*map(deep, value)]
    return {k: deep(v) for k, v in value.items()} if isinstance(value, dict) else value


@pytest.mark.parametrize("workers", WORKERS, ids=str)
def test_what_has_no_one_form_is_a_list(tmp_path, workers):
    with open_pool(tmp_path, FIELDS) as pool:
        batches = gathered(pool, FIELDS, transform=give_lists, **workers)
    for batch in batches:
        numbers = (batch["sample_id"] % 10).tolist()
        assert batch["bytes"] == [bytes(i) for i in numbers]
        assert batch["text"] == ["a" * i for i in numbers]
        assert batch["none"] == [None] * 8
        assert [tuple(boxes.shape) for boxes in batch["boxes"]] == [(i, 4) for i in numbers]
        assert [*map(int, batch["one by one"])] == numbers
        for name in ("boxes", "tensors", "one by one"):
            assert all(isinstance(row, torch.Tensor) for row in batch[name])
        for name in ("nested", "views", "tensors"):
            made = [LISTED[name](i) for i in numbers]
            wanted = [one.value if isinstance(one, AsList) else one for one in made]
            assert deep(batch[name]) == deep(wanted)


def decode_data(sample, rng):
    """The fields keep their names, and their rows get one form."""
    padded = np.zeros(9, np.uint8)
    padded[: len(sample["data"])] = np.frombuffer(sample["data"], np.uint8)
    length = min(len(sample["ragged"]), 1)
    return sample | {
        "data": torch.from_numpy(padded),
        "ragged": np.resize(sample["ragged"][:length], 2),
    }


@pytest.mark.parametrize("workers", WORKERS, ids=str)
def test_a_variable_field_that_keeps_its_name_is_stacked(tmp_path, workers):
    with open_pool(tmp_path, FIELDS) as pool:
        batches = gathered(pool, FIELDS, transform=decode_data, **workers)
        assert_same(batches, gathered(pool, FIELDS, transform=decode_data))
    for batch in batches:
        assert batch["data"].shape == (8, 9)
        assert batch["data"].dtype == torch.uint8
        assert batch["ragged"].shape == (8, 2)
        assert batch["ragged"].dtype == torch.int32


def pass_on(sample, rng):
    return dict(sample)


def change_in_place(sample, rng):
    sample["ragged"] *= 2
    return sample


@pytest.mark.parametrize("workers", WORKERS, ids=str)
def test_what_a_transform_hands_on_is_delivered_as_without_it(tmp_path, workers):
    with open_pool(tmp_path, FIELDS) as pool:
        plain = gathered(pool, FIELDS)
        assert_same(plain, gathered(pool, FIELDS, transform=pass_on, **workers))
        for batch, before in zip(
            gathered(pool, FIELDS, transform=change_in_place, **workers), plain, strict=True
        ):
            assert [*map(deep, batch["ragged"])] == [deep(2 * row) for row in before["ragged"]]


def grow(sample, rng, *, how, name):
    """Samples of which some have another form."""
    odd = int(sample["label"]) % 2
    return {
        name: {
            "shape": lambda: np.zeros(1 + odd),
            "dtype": lambda: np.zeros(1, np.float32 if odd else np.float64),
            "kind": lambda: np.zeros(1) if odd else b"1",
            "listed": lambda: AsList(np.zeros(1)) if odd else np.zeros(1),
            "touched": lambda: sample["ragged"].copy() if odd else sample["ragged"],
        }[how]()
    }


@pytest.mark.parametrize("how", ["shape", "dtype", "kind", "listed", "touched"])
@pytest.mark.parametrize("workers", WORKERS[:3], ids=str)
def test_samples_of_one_batch_with_two_forms_are_one_error_with_the_cure(tmp_path, how, workers):
    fields = {name: FIELDS[name] for name in ("label", "ragged")}
    name = "ragged" if how == "touched" else "x"
    transform = partial(grow, how=how, name=name)
    message = (
        rf"sample \d+, field '{name}': returned .*expected .* like sample \d+ of its batch; "
        r".*(resize, crop, pad).*dataio\.AsList.*collate"
    )
    with open_pool(tmp_path, fields) as pool:
        with pytest.raises(FieldError, match=message):
            gathered(pool, fields, transform=transform, **workers)


def by_number(sample, rng, *, large):
    return {"x": np.ones(5 if int(sample["pair"][0]) in large else 3)}


@pytest.mark.parametrize("workers", WORKERS, ids=str)
def test_no_batch_decides_for_the_next(tmp_path, workers):
    """Larger images in later epochs, say: only the rows of a batch have to agree."""
    fields = {"pair": Array("pair", (2,), "float32")}
    with open_pool(tmp_path, fields) as pool:
        large = frozenset(gathered(pool, fields)[2]["sample_id"].tolist())
        transform = partial(by_number, large=large)
        batches = gathered(pool, fields, transform=transform, **workers)
    assert [batch["x"].shape[1] for batch in batches] == [3, 3, 5, 3, 3]


def refuse_some(sample, rng):
    if sample["label"] % 5 == 2:
        raise FieldError("no such picture")
    return sample


@pytest.mark.parametrize("workers", WORKERS[:3], ids=str)
def test_a_sample_that_the_transform_refuses_is_an_error_or_padding(tmp_path, workers):
    with open_pool(tmp_path, FIELDS) as pool:
        with pytest.raises(FieldError, match=r"sample \d*[27], epoch 1: no such picture"):
            gathered(pool, FIELDS, transform=refuse_some, **workers)
        skipped = gathered(pool, FIELDS, transform=refuse_some, on_error="skip", **workers)
    ids = [i for batch in skipped for i in batch["sample_id"].tolist()]
    assert sorted(i for i in ids if i >= 0) == [i for i in range(40) if i % 5 != 2]
    for batch in skipped:
        assert (batch["weight"] == (batch["sample_id"] >= 0).float()).all()
