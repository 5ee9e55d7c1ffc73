"""Fields turn what the source holds into what is kept, or say what is wrong."""

import io
import struct

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dataio.base.errors import FieldError
from dataio.rows.decode import decode_image
from dataio.rows.fields import Array, Bytes, Field, Float, Image, Int, Raw, Text, Tokens, row_schema
from dataio.rows.rows import FixedColumn
from dataio.rows.views import Resize


def npy(array: np.ndarray, *, allow_pickle: bool = False) -> bytes:
    file = io.BytesIO()
    np.save(file, array, allow_pickle=allow_pickle)
    return file.getvalue()


@given(st.integers(-(2**63), 2**63 - 1))
def test_whole_numbers_survive_in_every_form(number: int) -> None:
    text = f" {number}\n".encode()
    for raw in (number, text, memoryview(text), np.int64(number)):
        assert struct.unpack("<q", Int("cls").encode(raw, "here")) == (number,)  # type: ignore[arg-type]


@given(st.floats(width=32, allow_nan=False))
def test_numbers_survive_in_every_form(number: float) -> None:
    for raw in (number, repr(number).encode()):
        assert struct.unpack("<f", Float("y").encode(raw, "here")) == (number,)


def test_arrays_survive_in_every_form() -> None:
    field = Array("x", (2, 3), "float32")
    array = np.arange(6, dtype=np.float32).reshape(2, 3)
    stored = array.astype("<f4").tobytes()
    forms: list[Raw] = [stored, memoryview(stored), npy(array), array, npy(array.astype(">f4"))]
    for raw in (*forms, npy(np.asfortranarray(array))):
        assert bytes(field.encode(raw, "here")) == stored
    named = Array("mask.npy", (2, 3), "float32")
    assert bytes(named.encode(npy(array), "here")) == stored
    with pytest.raises(FieldError, match="expected the bytes of"):
        named.encode(stored, "here")


@given(st.lists(st.integers(-(2**15), 2**15 - 1)))
def test_tokens_survive_in_every_form(numbers: list[int]) -> None:
    stored = np.array(numbers, "<i2").tobytes()
    forms: list[Raw] = [stored, npy(np.array(numbers, ">i2")), np.array(numbers, np.int64)]
    for raw in forms:
        assert bytes(Tokens("ids", "int16").encode(raw, "here")) == stored
    assert Tokens("ids.npy", "<i2").encode(forms[1], "here") == stored


@given(st.text())
def test_text_survives(text: str) -> None:
    for raw in (text, text.encode(), memoryview(text.encode())):
        assert bytes(Text("txt").encode(raw, "here")) == text.encode()


@pytest.mark.parametrize("channels", [1, 3, 4])
def test_pixels_survive_as_an_image(channels: int) -> None:
    pixels = np.random.default_rng(0).integers(0, 256, (4, 5, channels), np.uint8)
    kept = Image("jpg", channels=channels).encode(pixels, "here")
    out = np.empty_like(pixels)
    decode_image(memoryview(kept), out, Image("jpg", channels=channels), where="here")
    assert (out == pixels).all()
    decoded = Image("jpg", resize=Resize((4, 5)), channels=channels, decoded=True)
    assert decoded.encode(pixels, "here") == decoded.encode(kept, "here") == pixels.tobytes()
    assert decoded.column("x") == FixedColumn("x", "|u1", (4, 5, channels))
    smaller = Image("jpg", resize=Resize(2), channels=channels, decoded=True).encode(kept, "here")
    assert len(smaller) == 2 * 2 * channels


def test_the_schema_keeps_the_order_and_puts_fixed_fields_first() -> None:
    fields: dict[str, Field] = {
        "b": Bytes("bin"),
        "y": Float("y"),
        "a": Image("jpg"),
        "x": Array("x", (3,), ">i2"),
    }
    schema = row_schema(fields)
    assert schema.fixed == (FixedColumn("y", "<f4"), FixedColumn("x", "<i2", (3,)))
    assert schema.variable == ("b", "a")


@pytest.mark.parametrize("name", ["weight", "sample_id", "slot", "valid"])
def test_a_name_that_every_batch_holds_is_refused(name: str) -> None:
    with pytest.raises(ValueError, match=rf"'{name}' is what the batch itself holds.*another name"):
        row_schema({name: Int("cls")})


def test_no_field_is_refused() -> None:
    with pytest.raises(ValueError, match="fields: none given; name at least one"):
        row_schema({})


@pytest.mark.parametrize(
    ("field", "raw", "found"),
    [
        (
            Int("cls"),
            b"cat",
            r"^here: found b'cat' \(3 bytes\), expected a whole number of 64 bits",
        ),
        (Int("cls"), b"", r"found b'' \(0 bytes\)"),
        (Int("cls"), b"1.5", "declare Float or Bytes instead of Int"),
        (Int("cls"), 1.5, "found 1.5, expected a whole number"),
        (Int("cls"), str(2**63).encode(), "expected a whole number of 64 bits"),
        (Float("y"), b"high", "found b'high' .* expected a number of 32 bits"),
        (Float("y"), b"1e300", "expected a number of 32 bits"),
        (Array("x", (2,), "int8"), b"123", r"expected the bytes of int8\[2\], or an \.npy"),
        (
            Array("x", (2,), "int8"),
            npy(np.zeros(3, np.int8)),
            r"found int8\[3\], expected int8\[2\]",
        ),
        (Array("x", (2,), "int8"), npy(np.zeros(2)), r"found float64\[2\], expected int8\[2\]"),
        (Array("x", (2,), "int8"), npy(np.zeros(2))[:20], r"expected an \.npy of int8\[2\]"),
        (Array("x", (2,), "int8"), npy(np.zeros(2, np.int8)) + b"xy", "without the 2 bytes behind"),
        (Tokens("ids"), npy(np.zeros(2, np.int32)) + bytes(4), "without the 4 bytes behind it"),
        (Array("x", (2,), "int8"), 1, r"found int64\[\], expected int8\[2\]"),
        (Image("jpg"), 3, "found 3, expected bytes; declare Int, Float or Array instead of Image"),
        (Bytes("bin"), 3, "found 3, expected bytes"),
        (Text("txt"), b"a\xff", r"expected UTF-8 text \(invalid start byte\); declare Bytes"),
        (Text("txt"), "\ud800", "expected UTF-8 text"),
        (Text("txt"), 3, "found 3, expected bytes"),
        (Tokens("ids"), b"12345", "expected numbers of int32 in one dimension, as raw bytes or"),
        (Tokens("ids"), np.zeros((2, 2)), r"found float64\[2, 2\], expected numbers of int32"),
        (Tokens("ids"), np.array([0.5]), r"found float64\[1\], expected numbers of int32"),
        (Tokens("ids"), np.array([2**31]), "expected numbers of int32"),
        (Tokens("ids", "uint8"), np.array([-1]), "expected numbers of uint8"),
        (Tokens("ids"), npy(np.zeros(2))[:70], "expected numbers of int32 in one dimension"),
        (Image("jpg"), np.zeros((2, 2)), r"found float64\[2, 2\], expected a compressed image, or"),
        (Image("jpg"), np.zeros((2, 2, 5), np.uint8), r"uint8\[2, 2, 5\], expected a compressed"),
        (
            Image("jpg", resize=Resize(2), decoded=True),
            b"torn",
            "here: 4 bytes beginning b'torn' do not decode",
        ),
        (Array("x", (2,), "int8"), "text", r"found 'text', expected int8\[2\]; declare Text"),
    ],
)
def test_a_wrong_value_is_refused(field: Field, raw: Raw, found: str) -> None:
    with pytest.raises(FieldError, match=found):
        field.encode(raw, "here")


def test_an_npy_of_objects_is_refused_unopened() -> None:
    raw = npy(np.array([{"a": 1}], object), allow_pickle=True)
    with pytest.raises(FieldError, match=r"expected an \.npy of int8\[1\]"):
        Array("x", (1,), "int8").encode(raw, "here")


@pytest.mark.parametrize("key", ["", ".jpg"])
def test_a_wrong_key_is_refused(key: str) -> None:
    with pytest.raises(ValueError, match="the extension without its dot"):
        Int(key)


def test_wrong_declarations_are_refused() -> None:
    for size in (0, (1, 0)):
        with pytest.raises(
            ValueError, match=r"size is .*, expected a whole number >= 1 or a tuple"
        ):
            Image("jpg", resize=Resize(size))
    with pytest.raises(
        TypeError, match=r"size is \(1, 2, 3\), expected a whole number >= 1 or a tuple of"
    ):
        Image("jpg", resize=Resize((1, 2, 3)))  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="channels is 2, must be 1, 3 or 4"):
        Image("jpg", channels=2)
    with pytest.raises(ValueError, match="decoded without one size, must have the size"):
        Image("jpg", decoded=True)
    with pytest.raises(ValueError, match="dtype 'str' is not one of numbers"):
        Tokens("x", "str")
    with pytest.raises(ValueError, match="length is 0, expected a whole number >= 1 or None"):
        Tokens("x", length=0)
    with pytest.raises(ValueError, match="pad is -1, must be a number of uint8"):
        Tokens("x", "uint8", pad=-1)
    with pytest.raises(ValueError, match="dtype 'object' is not one of numbers"):
        Array("x", (1,), "object")
    with pytest.raises(
        ValueError, match=r"shape is \(2, 0\), expected a tuple of a whole number >= 1"
    ):
        Array("x", (2, 0), "int8")
