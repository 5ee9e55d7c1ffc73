"""More kinds of foreign data arrive as they are, or are refused by name."""

import io
import json
import struct
import tarfile
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from numpy.typing import NDArray
from PIL import Image as Picture

import dataio
from dataio.rows.fields import Field
from tests.dataio.source.shards import write_tar


def delivered(source: Any, field: dict[str, Field], root: Path, **given: Any) -> list[Any]:
    """Read all samples of an epoch, by number."""
    found = {}
    with dataio.Loader(
        source,
        batch_size=1,
        fields=field,
        cache=root / "cache",
        **given,
    ) as loader:
        for batch in loader:
            found[int(batch["sample_id"][0])] = {name: value[0] for name, value in batch.items()}
    return [found[number] for number in sorted(found)]


def png(values: NDArray[np.uint8], depth: int) -> bytes:
    """Write a gray PNG of so many bits."""
    bits = (values[:, :, None] >> np.arange(depth - 1, -1, -1)) & 1
    rows = b"".join(b"\0" + np.packbits(row.astype(np.uint8).ravel()).tobytes() for row in bits)

    def chunk(name: bytes, data: bytes) -> bytes:
        return (
            struct.pack(">I", len(data)) + name + data
            + struct.pack(">I", zlib.crc32(name + data))
        )  # fmt: skip

    height, width = values.shape
    head = struct.pack(">IIBBBBB", width, height, depth, 0, 0, 0, 0)
    parts = [(b"IHDR", head), (b"IDAT", zlib.compress(rows)), (b"IEND", b"")]
    return b"\x89PNG\r\n\x1a\n" + b"".join(chunk(*part) for part in parts)


@pytest.mark.parametrize("form", [tarfile.GNU_FORMAT, tarfile.PAX_FORMAT])
def test_a_long_name_without_its_member_is_refused(tmp_path: Path, form: int) -> None:
    path = tmp_path / "t.tar"
    with tarfile.open(path, "w", format=form) as file:
        for name in ("a.txt", "n" * 150 + ".txt"):
            info = tarfile.TarInfo(name)
            info.size = 1
            file.addfile(info, io.BytesIO(b"v"))
    # The last member's own header and data become the end.
    data = path.read_bytes().rstrip(b"\0")
    whole = len(data) // 512 * 512
    path.write_bytes(data[: whole - 512] + bytes(4 * 512))
    with pytest.raises(dataio.SourceError, match="the member that an extended header before it"):
        delivered(path, {"x": dataio.Bytes("txt")}, tmp_path)


def test_whole_numbers_of_json_are_not_rounded_by_a_point(tmp_path: Path) -> None:
    path = tmp_path / "t.jsonl"
    path.write_text('{"x": 9007199254740993.0}\n{"x": -9007199254740995.0}\n{"x": 5.0}\n')
    found = delivered(path, {"x": dataio.Int("x")}, tmp_path)
    assert [int(each["x"]) for each in found] == [9007199254740993, -9007199254740995, 5]
    with pytest.raises(dataio.FieldError, match="whole ones are never rounded"):
        delivered(path, {"x": dataio.Float("x")}, tmp_path / "float")
    path.write_text('{"x": [1.0, 9007199254740993.0]}\n')
    with pytest.raises(dataio.FieldError, match="write whole numbers without a point"):
        delivered(path, {"x": dataio.Array("x", (2,), "float64")}, tmp_path / "list")
    path.write_text('{"x": [1.5, 1e300, 18014398509481984.0]}\n')
    (row,) = delivered(path, {"x": dataio.Array("x", (3,), "float64")}, tmp_path / "exact")
    assert row["x"].tolist() == [1.5, 1e300, 2.0**54]


@pytest.mark.parametrize(
    ("log", "kind"),
    [
        ("_delta_log/00000000000000000000.json", "Delta"), (".hoodie/hoodie.properties", "Hudi"),
        ("metadata/version-hint.text", "Iceberg"),
    ],
)  # fmt: skip
def test_a_table_whose_log_says_which_files_are_in_it_is_refused(
    tmp_path: Path, log: str, kind: str
) -> None:
    table = tmp_path / "table"
    (table / log).parent.mkdir(parents=True)
    (table / log).write_text("{}")
    pq.write_table(pa.table({"x": [1]}), table / "part-0.parquet")
    with pytest.raises(dataio.SourceError, match=f"is a table of {kind} .*whose log says which"):
        delivered(str(table), {"x": dataio.Int("x")}, tmp_path)
    named = [str(table / "part-0.parquet")]
    assert [int(each["x"]) for each in delivered(named, {"x": dataio.Int("x")}, tmp_path)] == [1]


@pytest.mark.parametrize("depth", [1, 2, 4, 8])
def test_a_gray_mask_holds_the_numbers_that_its_bits_hold(tmp_path: Path, depth: int) -> None:
    classes = (np.arange(64).reshape(8, 8) % (1 << min(depth, 4))).astype(np.uint8)
    write_tar(tmp_path / "t.tar", [("s.png", png(classes, depth))])
    (row,) = delivered(tmp_path / "t.tar", {"m": dataio.Mask("png")}, tmp_path)
    assert np.array_equal(row["m"], classes)


def pictures(mask: tuple[int, int], path: Path) -> None:
    """Write a picture of 60 x 80 and a mask of another size, both by column."""
    members = []
    for name, (height, width) in (("p.png", (60, 80)), ("m.png", mask)):
        columns = np.arange(width, dtype=np.uint8) * (80 // width)
        data = io.BytesIO()
        Picture.fromarray(np.broadcast_to(columns, (height, width))).save(data, "PNG")
        members.append((f"0.{name}", data.getvalue()))
    write_tar(path, members)


CUTS: dict[str, tuple[dict[str, Any], bool]] = {
    "random": ({"crop": dataio.RandomCrop(20)}, False),
    "centre": ({"crop": dataio.CenterCrop(20)}, False),
    "resized first": ({"resize": dataio.Resize((60, 80)), "crop": dataio.RandomCrop(20)}, True),
    "of any size": ({"crop": dataio.RandomResizedCrop(20)}, True),
}


@pytest.mark.parametrize("cut", CUTS)
def test_a_mask_of_another_size_is_cut_where_its_picture_is_or_refused(
    tmp_path: Path, cut: str
) -> None:
    given, fits = CUTS[cut]
    fields: dict[str, Field] = {
        "p": dataio.Image("p.png", channels=1, **given), "m": dataio.Mask("m.png", **given)
    }  # fmt: skip
    pictures((60, 80), tmp_path / "same.tar")
    (row,) = delivered(tmp_path / "same.tar", fields, tmp_path / "same")
    assert int((row["p"][0].int() - row["m"].int()).abs().max()) <= 4
    pictures((30, 40), tmp_path / "half.tar")
    if fits:
        (row,) = delivered(tmp_path / "half.tar", fields, tmp_path / "half")
        assert int((row["p"][0].int() - row["m"].int()).abs().max()) <= 4
        return
    with pytest.raises(dataio.FieldError, match=r"p 60 x 80, m 30 x 40\), expected the same"):
        delivered(tmp_path / "half.tar", fields, tmp_path / "half")


def test_bytes_behind_an_array_are_refused(tmp_path: Path) -> None:
    data = io.BytesIO()
    np.save(data, np.arange(3))
    write_tar(tmp_path / "t.tar", [("0.npy", data.getvalue() + b"more")])
    with pytest.raises(dataio.FieldError, match=r"expected an .npy of int64\[3\]"):
        delivered(tmp_path / "t.tar", {"x": dataio.Array("npy", (3,), "int64")}, tmp_path)


def test_a_list_to_exclude_in_another_encoding_or_of_two_columns_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "t.jsonl"
    path.write_text("".join(json.dumps({"x": n}) + "\n" for n in range(4)))
    listed = tmp_path / "list.csv"
    for data, said in (
        ("sample_id\n1\n".encode("utf-16"), "cannot be read"),
        (b"sample_id,sample_id\n1,2\n", "has 2 columns sample_id, expected one"),
    ):
        listed.write_bytes(data)
        with pytest.raises(dataio.SourceError, match=said):
            delivered(path, {"x": dataio.Int("x")}, tmp_path, exclude=listed)
