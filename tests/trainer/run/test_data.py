"""Text as samples."""

import bz2
import gzip
import io
import lzma
import tarfile
import zipfile
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from numpy.typing import NDArray

from dataio import Source
from tonari.trainer.errors import ConfigError
from tonari.trainer.run.data import text_sources, token_field


def rows(source: Source, length: int) -> NDArray[np.uint8]:
    """Read all samples of a source: uint8[num_samples, length + 1]."""
    fields = {"tokens": token_field(length)}
    read = [part.fixed[0] for part in source.read(np.arange(source.num_samples), fields)]
    return np.concatenate(read).reshape(-1, length + 1)


def test_every_byte_but_the_first_is_a_target_once(tmp_path: Path) -> None:
    text = b"abcdefghijk"
    (tmp_path / "a.txt").write_bytes(text)
    train, test = text_sources([str(tmp_path / "a.txt")], [], sequence_length=5)
    found = rows(train, 5)
    assert bytes(found[:, 1:].ravel()) == text[1:]
    assert bytes(found[:, :-1].ravel()) == text[:-1]
    assert test is None


def test_no_sample_lies_in_two_files(tmp_path: Path) -> None:
    for name in "ab":
        (tmp_path / name).write_text(7 * name)
    train, _ = text_sources([str(tmp_path / name) for name in "ab"], [], sequence_length=3)
    assert [bytes(row) for row in rows(train, 3)] == [b"aaaa", b"aaaa", b"bbbb", b"bbbb"]


def test_the_last_samples_are_held_out_and_none_is_in_both(tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    path.write_bytes(bytes(range(32, 127)) + b"abcdef")
    train, test = text_sources([str(path)], [], sequence_length=10, test_fraction=0.3)
    assert test is not None
    assert (train.num_samples, test.num_samples) == (7, 3)
    whole = rows(text_sources([str(path)], [], sequence_length=10)[0], 10)
    assert np.array_equal(np.concatenate([rows(train, 10), rows(test, 10)]), whole)
    assert train.name != test.name
    assert train.fingerprint != test.fingerprint


def test_changed_text_and_another_length_are_other_datasets(tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    path.write_text("abcdefghi")
    before, _ = text_sources([str(path)], [], sequence_length=2)
    longer, _ = text_sources([str(path)], [], sequence_length=3)
    assert before.name != longer.name
    told = before.fingerprint
    path.write_text("abcdefghX")
    changed, _ = text_sources([str(path)], [], sequence_length=2)
    assert changed.fingerprint != told


def test_text_that_is_absent_or_too_short_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"data.train: .*absent cannot be read .*; give the path"):
        text_sources([str(tmp_path / "absent")], [], sequence_length=2)
    (tmp_path / "a").write_text("abc")
    with pytest.raises(ConfigError, match=r"data.train: .*a has 3 bytes, expected more than .* 3;"):
        text_sources([str(tmp_path / "a")], [], sequence_length=3)


ENGLISH = " ".join(f"line {n} of a text, whose words vary: {n * n}" for n in range(3000)).encode()
JSON = b"\n".join(b'{"text": "' + ENGLISH[at : at + 300] + b'"}' for at in range(0, 60_000, 300))


def _tar(data: bytes) -> bytes:
    file = io.BytesIO()
    with tarfile.open(fileobj=file, mode="w") as out:
        for number in range(0, len(data), 1000):
            info = tarfile.TarInfo(f"{number}.txt")
            part = data[number : number + 1000]
            info.size = len(part)
            out.addfile(info, io.BytesIO(part))
    return file.getvalue()


def _docx(data: bytes) -> bytes:
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w", zipfile.ZIP_STORED) as out:
        out.writestr("word/document.xml", data * 20)
    return file.getvalue()


def _parquet(data: bytes) -> bytes:
    file = io.BytesIO()
    pq.write_table(
        pa.table({"text": [data[at : at + 1000] for at in range(0, len(data), 1000)]}), file
    )
    return file.getvalue()


def _mds(data: bytes) -> bytes:
    # As the format has it: how many samples, where each begins, and a length before each text.
    texts = [data[at : at + 20_000] for at in range(0, len(data), 20_000)]
    parts = [len(text).to_bytes(4, "little") + text for text in texts]
    starts = np.cumsum([8 + 4 * len(parts), *map(len, parts)], dtype="<u4")
    return len(parts).to_bytes(4, "little") + starts.tobytes() + b"".join(parts)


@pytest.mark.parametrize(
    ("name", "make", "said"),
    [
        ("a.jsonl.gz", lambda: gzip.compress(JSON), r"a\.jsonl\.gz \(gzip\) holds bytes"),
        ("a.txt", lambda: gzip.compress(JSON), r"a\.txt \(gzip\) holds bytes"),
        ("a.jsonl.zst", lambda: pa.compress(JSON, "zstd", asbytes=True), r"\(Zstandard\) holds"),
        ("a.bz2", lambda: bz2.compress(JSON), r"\(bzip2\) holds bytes"),
        ("a.xz", lambda: lzma.compress(JSON), r"\(xz\) holds bytes"),
        ("a.parquet", lambda: _parquet(ENGLISH), r"\(Parquet\) holds bytes"),
        ("a.tar", lambda: _tar(ENGLISH), r"a\.tar holds bytes that no text has, such as 0x00"),
        ("a.mds", lambda: _mds(ENGLISH), r"a\.mds"),
        ("a.bin", lambda: np.arange(20_000, dtype="<u2").tobytes(), r"a\.bin holds bytes"),
        ("b.bin", lambda: np.full(9000, 0x6162, "<u2").tobytes(), r"b\.bin is a shard of records"),
        ("a.utf16", lambda: ENGLISH.decode().encode("utf-16"), r"\(UTF-16\) holds bytes .* 0x00"),
        ("a.jsonl", lambda: JSON, r"a\.jsonl holds records in JSON \(named \.txt,"),
        ("A.NDJSON", lambda: ENGLISH, r"A\.NDJSON holds records in JSON"),
        ("a.json", lambda: b"\n[" + JSON.replace(b"\n", b",\n") + b"{}]", r"a\.json holds records"),
        ("corpus", lambda: JSON, r"corpus holds records in JSON"),
        ("part-0.dat", lambda: JSON[:70_000].split(b"\n")[0], r"part-0\.dat holds records in JSON"),
        ("a.docx", lambda: _docx(ENGLISH), r"a\.docx \(zip\) begins as no text does, with b'PK"),
        ("a.pdf", lambda: b"%PDF-1.7\n" + ENGLISH, r"a\.pdf \(PDF\) begins as no text does"),
        (
            "a.doc",
            lambda: b"\xd0\xcf\x11\xe0\xa1\xb1\x1a\xe1" + ENGLISH,
            r"a\.doc begins as no text",
        ),
        ("a.png", lambda: b"\x89PNG\r\n\x1a\n" + ENGLISH, r"a\.png begins as no text does, with"),
        ("a.npy", lambda: b"\x93NUMPY\x01\0" + ENGLISH, r"a\.npy begins as no text does, with"),
        ("late.txt", lambda: ENGLISH * 4 + gzip.compress(ENGLISH) * 4, r"late\.txt holds bytes"),
    ],
)
def test_what_is_no_text_is_refused_with_the_table_that_it_needs(
    tmp_path: Path, name: str, make: Callable[[], bytes], said: str
) -> None:
    path = tmp_path / name
    path.write_bytes(make())
    if name == "b.bin":
        path.with_suffix(".idx").write_bytes(b"MMIDIDX")
    for train, test in ([path], []), ([], [path]):
        (tmp_path / "text.txt").write_bytes(ENGLISH)
        named = [str(each) for each in train or [tmp_path / "text.txt"]]
        with pytest.raises(ConfigError, match=f"{said}.*tonari pack.*\\[text\\] with packing"):
            text_sources(named, list(map(str, test)), sequence_length=64)


@pytest.mark.parametrize(
    "text",
    [
        ENGLISH,
        JSON,
        ("日本語の文章です。" * 900).encode(),
        ("déjà vu à Genève " * 900).encode("latin-1"),
        ("Été à Genève " * 900).encode("latin-1"),
        b"\xef\xbb\xbf" + ENGLISH,
        ENGLISH[:5000] + b"\0" + ENGLISH[5000:],
        b"page\f\r\n\tcolumn \x1b[1mbold\x1b[0m " * 500,
        b"BZhang and PARIS, PAR1 is a rune\n" * 100,
    ],
)
def test_texts_of_all_kinds_are_read(tmp_path: Path, text: bytes) -> None:
    path = tmp_path / "a.txt"
    path.write_bytes(text)
    train, _ = text_sources([str(path)], [], sequence_length=64)
    assert train.num_samples == (len(text) - 1) // 64
