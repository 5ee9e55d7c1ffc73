"""Keys that lead into members of JSON, and names that have dots before their extension."""

import gzip
import io
import json
import re
import shutil
import subprocess
from pathlib import Path

import numpy as np
import pytest

from dataio import Array, Bytes, Field, FieldError, Float, Int, SourceError, Text, Tokens
from dataio.source import open_source, write_index
from tests.dataio.source.shards import read_all, rows_of, write_tar

FIELDS: dict[str, Field] = {
    "label": Int("json.label"),
    "deep": Float("json.meta.Deep"),
    "box": Array("json.meta.box", (4,), "float32"),
    "tags": Text("json.tags"),
    "dotted": Text("json.a.b"),
    "area": Int("seg.json.area"),
    "whole": Text("json"),
    "raw": Bytes("JSON.gz"),
}


def document(i: int) -> dict[str, object]:
    return {
        "label": i, "meta": {"Deep": i / 2, "box": [i, 1, 2.5, 3]}, "tags": ["a", {"b": i}],
        "a.b": f"text {i}",
    }  # fmt: skip


def members(i: int) -> list[tuple[str, bytes]]:
    return [
        (f"{i:03d}.json", json.dumps(document(i)).encode()),
        (f"{i:03d}.seg.json", json.dumps({"area": 10 * i}).encode()),
        # An extension of its own, however much it looks like a key of the member of JSON.
        (f"{i:03d}.json.gz", b"raw %d" % i),
    ]


def write(path: Path, how: str) -> str:
    write_tar(path, [member for i in range(20) for member in members(i)])
    if how == "index":
        write_index(path)
    if how == "gz":
        Path(f"{path}.gz").write_bytes(gzip.compress(path.read_bytes()))
        return f"{path}.gz"
    return str(path)


@pytest.mark.parametrize("how", ["headers", "index", "gz"])
def test_a_key_leads_into_a_member_of_json(how: str, tmp_path: Path) -> None:
    source = open_source(write(tmp_path / "x.tar", how))
    whole = read_all(source, FIELDS)
    assert len(whole) == 20
    fixed = [name for name, field in FIELDS.items() if field.column(name) is not None]
    order = [*fixed, *(name for name in FIELDS if name not in fixed)]
    for i, values in whole:
        held = dict(zip(order, values, strict=True))
        assert np.frombuffer(held["label"], "<i8").tolist() == [i]
        assert np.frombuffer(held["area"], "<i8").tolist() == [10 * i]
        assert np.frombuffer(held["deep"], "<f4").tolist() == [i / 2]
        assert np.frombuffer(held["box"], "<f4").tolist() == [i, 1, 2.5, 3]
        assert json.loads(held["tags"]) == ["a", {"b": i}]
        assert held["dotted"] == f"text {i}".encode()
        assert json.loads(held["whole"]) == document(i)
        assert held["raw"] == b"raw %d" % i
    chosen = np.array([3, 4, 17])
    assert rows_of(source.read(chosen, FIELDS)) == [whole[i] for i in chosen.tolist()]


@pytest.mark.parametrize("how", ["headers", "index"])
@pytest.mark.parametrize(
    ("key", "data", "error", "message"),
    [
        ("json.a", b'{"a": 1, "a": 2}', SourceError, r"member 'json'.*\(the key 'a' twice\)"),
        ("json.a", b'{"a": 1e400}', FieldError, r"found a number beyond 1.8e308"),
        (
            "json.cls",
            b'{"label": 1}',
            FieldError,
            r"'00', member 'json' holds label, expected 'cls'",
        ),
        (
            "json.label",
            b"{label",
            SourceError,
            r"'00', member 'json': found b'\{label', expected JSON",
        ),
        ("json.label", b'{"label": null}', FieldError, r"member 'json', key 'label'"),
        ("seg.json.label", b"{}", FieldError, r"'00' holds jpg, json, expected 'seg\.json' for fi"),
    ],
)
def test_what_a_member_of_json_lacks_is_named(
    how: str, key: str, data: bytes, error: type[Exception], message: str, tmp_path: Path
) -> None:
    names = ("00.json", "00.jpg", "01.json", "01.jpg")
    path = write_tar(tmp_path / "x.tar", [(name, data) for name in names])
    if how == "index":
        write_index(Path(path))
    source = open_source(str(path))
    with pytest.raises(error, match=message):
        rows_of(source.read(np.array([0]), {"label": Int(key)}))


def test_the_advice_for_names_with_dots_works(tmp_path: Path) -> None:
    """The command of the message, run as it stands, writes a shard that opens."""
    assert shutil.which("tar") is not None
    held = [
        (f"sub/frame.{i:04d}.v1.{extension}", b"%d" % i)
        for i in range(20)
        for extension in ("cls", "jpg")
    ]
    path = write_tar(tmp_path / "x.tar", held)
    fields: dict[str, Field] = {"label": Int("cls"), "jpg": Bytes("jpg")}
    source = open_source(str(path))
    assert source.num_samples == 1
    message = r"holds 0000\.v1\.cls, .* and 28 more, expected 'cls' .* name '0000\.v1\.cls' if all"
    with pytest.raises(FieldError, match=message) as error:
        read_all(source, fields)
    command = re.search(r"`(mkdir .*)`", str(error.value))
    assert command is not None
    subprocess.run(["sh", "-c", command[1]], cwd=tmp_path, check=True)
    rows = read_all(open_source(str(tmp_path / "x.new.tar")), fields)
    assert [int(values[1]) for _, values in rows] == list(range(20))


def test_one_extension_with_dots_is_named_as_a_whole(tmp_path: Path) -> None:
    path = write_tar(tmp_path / "x.tar", [(f"{i}.v1.cls", b"%d" % i) for i in range(3)])
    with pytest.raises(FieldError, match=r"name 'v1\.cls' if all samples have that"):
        read_all(open_source(str(path)), {"label": Int("cls")})
    rows = read_all(open_source(str(path)), {"label": Int("v1.cls")})
    assert [int.from_bytes(values[0], "little") for _, values in rows] == [0, 1, 2]


@pytest.mark.parametrize("extension", ["txt", "cls", "json", "caption.txt"])
def test_text_of_a_member_is_no_array_of_letter_codes(tmp_path: Path, extension: str) -> None:
    path = str(write_tar(tmp_path / "a.tar", [(f"0.{extension}", b"1234"), ("0.raw", b"1234")]))
    source = open_source(path)
    for field in (
        Array(extension, (4,), "uint8"),
        Array(extension, (), "int32"),
        Tokens(extension),
    ):
        with pytest.raises(FieldError, match=rf"member '{extension}': found text.*field 'x'.*Text"):
            read_all(source, {"x": field})
    assert read_all(source, {"x": Array("raw", (4,), "uint8")}) == [(0, [b"1234"])]


def test_an_npy_is_not_taken_for_the_raw_bytes_of_a_longer_array(tmp_path: Path) -> None:
    file = io.BytesIO()
    np.save(file, np.arange(4))
    data = file.getvalue()
    source = open_source(str(write_tar(tmp_path / "a.tar", [("0.x", data), ("1.x", data)])))
    with pytest.raises(FieldError, match=rf"found int64\[4\], expected uint8\[{len(data)}\]"):
        read_all(source, {"x": Array("x", (len(data),), "uint8")})
    assert read_all(source, {"x": Array("x", (4,), "int64")})[1][1] == [np.arange(4).tobytes()]


@pytest.mark.parametrize("encoding", ["utf-8", "utf-8-sig", "utf-16", "utf-32-be"])
def test_a_member_of_json_is_read_in_each_of_its_encodings(encoding: str, tmp_path: Path) -> None:
    path = write_tar(tmp_path / "a.tar", [("s.json", '{"a": 1, "b": "\u00fc"}'.encode(encoding))])
    fields: dict[str, Field] = {"a": Int("json.a"), "b": Text("json.b")}
    (row,) = rows_of(open_source(str(path)).read(np.arange(1), fields))
    assert "ü".encode() in row[1]
