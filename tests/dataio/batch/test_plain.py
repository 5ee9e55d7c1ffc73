"""Values that feeders send come back as they were, or are refused where they are written."""

from collections import OrderedDict
from typing import Any

import numpy as np
import pytest
import torch

from dataio.batch.feeders.plain import NoPlainFormError, read, written


def sent(value: Any) -> tuple[bytes, np.ndarray]:
    form, arrays = written(value)
    data = b"".join(each if isinstance(each, bytes) else each.tobytes() for each in arrays)
    return form, np.frombuffer(data, np.uint8)


VALUES = [
    [None, True, 7, 1.5, float("-inf"), "é\ud800", b"", b"ab", (1, [frozenset({2})]), 10**30],
    {"a": {1: "one", (1, "b"): []}, "shape": ((3, 4), np.dtype("<f4"))},
    np.dtype([("bfloat16", "<i2")]),
]
ARRAYS: list[Any] = [
    np.arange(6, dtype=np.int16).reshape(2, 3).T, np.zeros((0, 3)), np.array(5, np.uint8),
    np.array(["ab", "c"]), np.zeros(2, [("a", "<f4"), ("b", "u1", (2,))]), np.float32(0.1),
    np.datetime64("2020-02-29T01", "ns"), torch.arange(3), torch.ones(2, 2, dtype=torch.bfloat16),
    torch.tensor(2.5), torch.zeros(0, 2),
]  # fmt: skip


def test_plain_values_come_back_as_they_were():
    for value in VALUES:
        assert read(*sent(value)) == value
    found = read(*sent([b"odd", *ARRAYS]))
    assert [type(each) for each in found[1:]] == [type(each) for each in ARRAYS]
    for array, made in zip(ARRAYS, found[1:], strict=True):
        assert (made.dtype, made.shape) == (array.dtype, array.shape)
        assert bool((made == array).all())


def test_what_would_not_come_back_as_it_was_is_refused():
    for value in (
        object(), OrderedDict(), np.array([object()]), np.dtype(object), np.ma.masked_array([1]),
        torch.ones(1, requires_grad=True), torch.nn.Parameter(torch.ones(1)),
        torch.ones(2).to_sparse(), 10**5000,
    ):  # fmt: skip
        with pytest.raises(NoPlainFormError):
            written([{"of": value}])


def test_wrong_bytes_are_not_read():
    form, data = sent([np.arange(3.0), b"ab"])
    for wrong in (form[:-1], form.replace(b"<f8", b"|O8"), form.replace(b"array", b"other"),
                  form.replace(b"3", b"4"), form.replace(b"3", b"-3"), b"[" * 100_000):  # fmt: skip
        with pytest.raises(Exception):  # noqa: B017  (of any kind)
            read(wrong, data)
    with pytest.raises(ValueError, match="none of plain values"):
        read(b'["array", "|V0", 9]', data[:0])
    assert read(b'["bytes", "<i1"]', np.array([5], np.uint8)) == b"\5"
    for num_bytes in (0, len(data) - 1):
        with pytest.raises((TypeError, ValueError)):
            read(form, data[:num_bytes])
    with pytest.raises(ValueError, match="1 bytes more"):
        read(form, np.append(data, data[:1]))
