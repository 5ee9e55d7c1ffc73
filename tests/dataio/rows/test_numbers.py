"""A number arrives as it is, or is refused: of every dtype, one by one and many at once."""

import math
import struct
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dataio.base.errors import FieldError
from dataio.rows.encoding import converted
from dataio.rows.fields import Float, Int

DTYPES = "bool int8 uint8 int32 uint32 int64 uint64 float16 float32 float64".split()
EDGES = [
    sign * (2**bits + step)
    for bits in (8, 11, 24, 31, 53, 63, 64)
    for sign in (1, -1)
    for step in (-1, 0, 1)
]
EVERY = st.one_of(
    st.sampled_from(EDGES), st.sampled_from([float(edge) for edge in EDGES]), st.floats(),
    st.integers(-(2**63), 2**64 - 1), st.floats(width=16), st.booleans(),
)  # fmt: skip


def is_held(number: float, dtype: np.dtype[Any]) -> bool:
    """Whether the rule says that a dtype takes a number, by Python's own arithmetic."""
    if dtype.kind in "biu":
        low, high = (0, 1) if dtype.kind == "b" else (np.iinfo(dtype).min, np.iinfo(dtype).max)
        return math.isfinite(number) and number == int(number) and int(low) <= number <= int(high)
    if not math.isfinite(number):
        return True
    with np.errstate(over="ignore"):
        nearest = float(dtype.type(number))
    if not math.isfinite(nearest):
        return False
    is_fraction = Fraction(number).denominator > 1
    return Fraction(nearest) == Fraction(number) or (is_fraction and nearest != 0)


@pytest.mark.parametrize("name", DTYPES)
@given(numbers=st.lists(EVERY, min_size=1, max_size=5))
def test_a_dtype_takes_what_it_holds_and_the_first_other_is_found(
    name: str, numbers: list[float]
) -> None:
    dtype = np.dtype(name)
    for found in {np.asarray(number).dtype for number in numbers}:
        if found.kind not in "biuf":
            continue
        given_ = [number for number in numbers if np.asarray(number).dtype == found]
        stored, at = converted(np.array(given_), dtype)
        held = [is_held(number, dtype) for number in given_]
        assert at == (held.index(False) if False in held else -1)
        if at < 0:
            for one, other in zip(stored.tolist(), given_, strict=True):
                assert one == dtype.type(other) or math.isnan(other)


@given(EVERY)
def test_one_number_is_taken_as_many_are(number: float) -> None:
    found = np.asarray(number)
    if found.dtype.kind not in "biuf":
        return
    for field, dtype, code in ((Int("x"), np.int64, "<q"), (Float("x"), np.float32, "<f")):
        stored, at = converted(found, np.dtype(dtype))
        for raw in (number, found, str(number).encode()):
            if isinstance(raw, bytes) and (isinstance(number, bool) or isinstance(field, Int)):
                continue
            if at >= 0:
                with pytest.raises(FieldError, match=r"^here: found .*expected a .*declare "):
                    field.encode(raw, "here")
            else:
                (one,) = struct.unpack(code, field.encode(raw, "here"))
                assert one == stored or math.isnan(one)


@pytest.mark.parametrize(
    ("text", "number"),
    [("9007199254740993", None), ("1e400", None), ("-1e-400", None), ("1_0", None), ("1e-50", None),
     ("0.1", 0.1), ("0e5", 0), (" inf\n", math.inf), ("1180591620717411303424", 2**70)],
)  # fmt: skip
def test_text_of_a_number_is_read_exactly(text: str, number: float | None) -> None:
    for raw in (text, text.encode(), memoryview(text.encode()), np.array(text)):
        if number is None:
            with pytest.raises(FieldError, match="expected a number of 32 bits"):
                Float("x").encode(raw, "here")
        else:
            assert struct.unpack("<f", Float("x").encode(raw, "here"))[0] == np.float32(number)


def test_times_are_whole_numbers_of_their_unit() -> None:
    times = np.array(["2024-05-01T00:00:01", "NaT"], "M8[s]")
    assert converted(times[:1], np.dtype(np.int64)) == (np.array([1714521601]), -1)
    assert converted(times, np.dtype(np.int64))[1] == 1
    assert struct.unpack("<q", Int("x").encode(times[0], "here")) == (1714521601,)
    with pytest.raises(FieldError, match="expected a whole number"):
        Int("x").encode(times[1], "here")


def test_complex_numbers_are_taken_by_complex_dtypes_alone() -> None:
    found = np.array([0.1 + 2j, 1 + 16777217j])
    assert converted(found, np.dtype(np.complex128))[1] == -1
    assert converted(found, np.dtype(np.complex64))[1] == 1
    assert converted(found, np.dtype(np.float64))[1] == 0
    assert converted(np.array([2**53, 2**53 + 1]), np.dtype(np.complex128))[1] == 1
