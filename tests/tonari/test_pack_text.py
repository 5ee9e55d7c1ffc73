"""Documents of text become the tokens that the tokenizer gives, and nothing half-written counts."""

import gzip
import json
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from numpy.typing import NDArray

import dataio
from dataio.base.errors import SourceError
from dataio.source.text.dataset import document_places, read_info, read_infos
from dataio.source.text.tokenizer import ByteTokenizer, open_tokenizer
from tests.tokenizers_made import make_tokenizer
from tonari.cli import main
from tonari.errors import CommandError
from tonari.pack.documents import find_documents
from tonari.pack.text import pack_text

TEXTS = ["to be or not", "that is the question\n\nwhether", "é", "a" * 50, "", "end"]


def packed(directory: Path) -> list[list[int]]:
    """Read the tokens of each document through the source that reads Megatron's files."""
    source = dataio.open_source(str(directory))
    fields = {"tokens": dataio.Tokens("tokens", "int64")}
    found: list[list[int]] = []
    for rows in source.read(np.arange(source.num_samples), fields):
        tokens = rows.variable[0].view("<i8")
        cuts = np.cumsum(rows.lengths[:, 0])[:-1] // 8
        found += [part.tolist() for part in np.split(tokens, cuts)]
    return found


def json_lines(path: Path, texts: Sequence[str] = TEXTS) -> Path:
    data = "".join(json.dumps({"text": text, "n": 1}) + "\n" for text in texts).encode()
    if path.suffix == ".gz":
        data = gzip.compress(data)
    if path.suffix == ".zst":
        data = pa.Codec("zstd").compress(data, asbytes=True)
    path.write_bytes(data)
    return path


def as_bytes(texts: Sequence[str]) -> list[list[int]]:
    return [list(text.encode()) for text in texts if text]


@pytest.mark.parametrize("suffix", ["", ".gz", ".zst"])
def test_json_lines_are_documents(tmp_path: Path, suffix: str) -> None:
    path = json_lines(tmp_path / f"a.jsonl{suffix}")
    assert main(["pack", str(path), str(tmp_path / "out"), "--tokenizer", "bytes"]) == 0
    assert packed(tmp_path / "out") == as_bytes(TEXTS)


def test_a_column_of_parquet_is_documents(tmp_path: Path) -> None:
    pq.write_table(pa.table({"body": TEXTS}), tmp_path / "a.parquet", row_group_size=2)
    line = ["pack", str(tmp_path / "a.parquet"), str(tmp_path / "out"), "--text", "body"]
    assert main([*line, "--tokenizer", "bytes"]) == 0
    assert packed(tmp_path / "out") == as_bytes(TEXTS)


def test_plain_text_is_a_document_a_file_or_a_block(tmp_path: Path) -> None:
    (tmp_path / "in" / "deep").mkdir(parents=True)
    (tmp_path / "in" / "a.TXT").write_text("\ufeffone\ntwo\n\n\n  \nthree\n")
    (tmp_path / "in" / "deep" / "b.txt").write_text("four")
    for split, expected in {
        "file": ["one\ntwo\n\n\n  \nthree\n", "four"], "blank": ["one\ntwo\n", "three\n", "four"],
    }.items():  # fmt: skip
        out = tmp_path / split
        line = ["pack", str(tmp_path / "in"), str(out), "--tokenizer", "bytes", "--split", split]
        assert main(line) == 0
        assert packed(out) == as_bytes(expected)


def test_tokens_are_the_tokenizers_with_the_end_behind_each(tmp_path: Path) -> None:
    tokenizer = open_tokenizer(str(make_tokenizer(tmp_path / "tokenizer.json")))
    path = json_lines(tmp_path / "a.jsonl")
    pack_text(
        find_documents(str(path), text="text", split="file"), tmp_path / "out", tokenizer,
        end="<|endoftext|>",
    )  # fmt: skip
    expected = [[*each.tolist(), 0] for each in tokenizer.encode(TEXTS) if len(each)]
    assert packed(tmp_path / "out") == expected
    info = read_info(tmp_path / "out")
    assert (info.documents, info.tokens) == (len(expected), sum(map(len, expected)))
    # The directory is complete in itself.
    assert open_tokenizer(str(tmp_path / "out")).digest == info.digest


class Dies(ByteTokenizer):
    """Fails after some batches, as a kill does."""

    def __init__(self, batches: int) -> None:
        self.left = batches

    def encode(self, texts: Sequence[str]) -> list[NDArray[np.int64]]:
        """Encode, or fail."""
        self.left -= 1
        if self.left < 0:
            raise KeyboardInterrupt
        return super().encode(texts)


def test_a_pack_that_was_killed_goes_on_and_gives_the_same_bytes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tonari.pack.text.BATCH_CHARACTERS", 40)
    (tmp_path / "in").mkdir()
    for number in range(4):
        json_lines(tmp_path / "in" / f"{number}.jsonl", [f"{number} {i} " * 7 for i in range(9)])
    documents = find_documents(str(tmp_path / "in"), text="text", split="file")

    def pack(out: str, tokenizer: ByteTokenizer) -> None:
        pack_text(documents, tmp_path / out, tokenizer, shard_bytes=70)

    pack("whole", ByteTokenizer())
    for batches in (1, 5, 6):
        with pytest.raises(KeyboardInterrupt):
            pack("out", Dies(batches))
        assert not (tmp_path / "out").exists()
    assert len(list((tmp_path / ".out.partial").glob("*.idx"))) > 2
    tokenizer = Dies(100)
    pack("out", tokenizer)
    # Only what the whole shards do not hold was encoded again.
    assert 100 - tokenizer.left < 15
    contents = [
        {path.name: path.read_bytes() for path in (tmp_path / out).iterdir()}
        for out in ("whole", "out")
    ]
    assert contents[0] == contents[1]
    assert not (tmp_path / ".out.partial").exists()


def test_an_unfinished_pack_of_other_options_is_not_taken_for_this_one(tmp_path: Path) -> None:
    path = json_lines(tmp_path / "a.jsonl")
    documents = find_documents(str(path), text="text", split="file")
    with pytest.raises(KeyboardInterrupt):
        pack_text(documents, tmp_path / "out", Dies(0))
    with pytest.raises(
        CommandError, match=r"unfinished pack of other .*; give the same .*overwrite"
    ):
        pack_text(documents, tmp_path / "out", ByteTokenizer(), shard_bytes=77)
    pack_text(documents, tmp_path / "out", ByteTokenizer(), shard_bytes=77, overwrite=True)
    assert packed(tmp_path / "out") == as_bytes(TEXTS)


def test_nothing_of_an_unfinished_pack_of_other_options_is_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tonari.pack.text.BATCH_CHARACTERS", 10)
    path = json_lines(tmp_path / "a.jsonl", [f"{i} " * 9 for i in range(20)])
    documents = find_documents(str(path), text="text", split="file")
    with pytest.raises(KeyboardInterrupt):
        pack_text(documents, tmp_path / "out", Dies(15), shard_bytes=20)
    assert len(list((tmp_path / ".out.partial").glob("*.bin"))) > 5
    # A kill while it is cleared: the first file is gone, others are left.
    unlink = Path.unlink

    def dies(path: Path, missing_ok: bool = False) -> None:
        unlink(path, missing_ok=missing_ok)
        raise KeyboardInterrupt

    monkeypatch.setattr(Path, "unlink", dies)
    with pytest.raises(KeyboardInterrupt):
        pack_text(documents, tmp_path / "out", ByteTokenizer(), overwrite=True)
    monkeypatch.setattr(Path, "unlink", unlink)
    info = pack_text(documents, tmp_path / "out", ByteTokenizer(), overwrite=True)
    names = {path.name for path in (tmp_path / "out").iterdir()}
    of_shards = {f"text-000000.{end}" for end in ("bin", "idx", "lines")}
    assert names == {"text.json", "sources.json", *of_shards}
    assert info.documents == 20
    (tmp_path / ".two.partial").mkdir()
    (tmp_path / ".two.partial/mine").touch()
    with pytest.raises(CommandError, match=r"holds mine, which no pack has left"):
        pack_text(documents, tmp_path / "two", ByteTokenizer())
    assert (tmp_path / ".two.partial/mine").exists()


def test_what_another_has_written_meanwhile_is_not_replaced(tmp_path: Path) -> None:
    class Late(ByteTokenizer):
        def encode(self, texts: Sequence[str]) -> list[NDArray[np.int64]]:
            (tmp_path / "out").mkdir()
            (tmp_path / "out/theirs").touch()
            return super().encode(texts)

    documents = find_documents(str(json_lines(tmp_path / "a.jsonl")), text="text", split="file")
    with pytest.raises(CommandError, match=r"is not empty \(holds theirs\)"):
        pack_text(documents, tmp_path / "out", Late())
    assert (tmp_path / "out/theirs").exists()


def test_what_is_there_is_replaced_only_when_asked(tmp_path: Path) -> None:
    line = ["pack", str(json_lines(tmp_path / "a.jsonl")), str(tmp_path / "out")]
    line += ["--tokenizer", "bytes"]
    assert main(line) == 0
    assert main(line) == 1
    assert main([*line, "--overwrite"]) == 0
    (tmp_path / "out" / "mine").touch()
    assert main([*line, "--overwrite"]) == 1


@pytest.mark.parametrize(
    ("name", "data", "message"),
    [
        ("a.jsonl", b'{"text": "a"}\n{"body": 3}\n', r"line 2: found .*KeyError.*under 'text'"),
        ("a.jsonl", b'{"text": 3}\n', "line 1: found a int there, expected text under 'text'"),
        ("a.jsonl", b"{", "line 1: found .*expected text"),
        ("a.jsonl.gz", b"no gzip", "cannot be read .*expected a whole file"),
        ("a.jsonl", b'{"text": "a", "text": "b"}', "line 1: found .*the key 'text' twice"),
        ("a.jsonl", b'{"text": "\\ud83d"}', "line 1: found .*surrogates not allowed"),
        ("a.txt", "utf".encode("utf-16-le"), r"found .*a byte of zero, at 1.*iconv"),
        ("a.txt", b"\xff\xfe", r"found bytes that are no UTF-8 .*iconv"),
        ("a.parquet", b"no parquet", "expected a whole Parquet file"),
        ("a.csv", b"a,b", "its suffix says nothing of documents, expected one of .jsonl"),
        ("a.txt", b"", "found no text in 1 files, expected at least one document"),
    ],
)
def test_bad_documents_are_named(tmp_path: Path, name: str, data: bytes, message: str) -> None:
    (tmp_path / name).write_bytes(data)
    with pytest.raises(SourceError, match=message):
        pack_text(
            find_documents(str(tmp_path / name), text="text", split="file"), tmp_path / "out",
            ByteTokenizer(),
        )  # fmt: skip
    assert not (tmp_path / "out").exists()


def test_each_document_is_known_by_its_file_and_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tonari.pack.text.BATCH_CHARACTERS", 10)
    (tmp_path / "in").mkdir()
    json_lines(tmp_path / "in/a.jsonl.gz")
    pq.write_table(pa.table({"text": TEXTS}), tmp_path / "in/b.parquet")
    (tmp_path / "in/c.txt").write_text("\n\none\ntwo\n\n\n \nthree")
    documents = find_documents(str(tmp_path / "in"), text="text", split="blank")
    with pytest.raises(KeyboardInterrupt):
        pack_text(documents, tmp_path / "out", Dies(4), shard_bytes=40)
    info = pack_text(documents, tmp_path / "out", ByteTokenizer(), shard_bytes=40)
    assert len(info.shards) > 3
    shards = [str(tmp_path / "out" / name) for name in info.shards]
    counts = [dataio.open_source(shard).num_samples for shard in shards]
    found = [
        place
        for shard, count in zip(shards, counts, strict=True)
        for place in document_places(shard, np.arange(count))
    ]
    # TEXTS has an empty one as its fifth
    assert found == [
        *(f"{tmp_path}/in/a.jsonl.gz line {line}" for line in (1, 2, 3, 4, 6)),
        *(f"{tmp_path}/in/b.parquet row {row}" for row in (0, 1, 2, 3, 5)),
        *(f"{tmp_path}/in/c.txt line {line}" for line in (3, 8)),
    ]
    (tmp_path / "out/sources.json").write_text("[]")
    with pytest.raises(SourceError, match=r"lines: cannot be read .*copy it and sources.json"):
        document_places(shards[0], np.array([0]))
    Path(shards[0]).with_suffix(".lines").unlink()
    assert document_places(shards[0], np.array([0])) == [""], "an older pack"


def test_a_file_beside_its_own_compressed_copy_is_refused(tmp_path: Path) -> None:
    for name in ("a.jsonl", "a.jsonl.gz"):
        json_lines(tmp_path / name)
    with pytest.raises(SourceError, match=r"a.jsonl.gz: found beside .*a.jsonl, .* come twice"):
        find_documents(str(tmp_path), text="text", split="file")


def test_options_of_rows_are_refused_for_text(tmp_path: Path) -> None:
    line = ["pack", "a.jsonl", str(tmp_path / "out"), "--tokenizer", "bytes"]
    assert main([*line, "--shuffle-seed", "3"]) == 2


def test_datasets_of_two_tokenizers_do_not_mix(tmp_path: Path) -> None:
    path = json_lines(tmp_path / "a.jsonl")
    other = make_tokenizer(tmp_path / "tokenizer.json")
    for name, tokenizer in (("one", "bytes"), ("two", str(other))):
        assert main(["pack", str(path), str(tmp_path / name), "--tokenizer", tokenizer]) == 0
    with pytest.raises(
        SourceError, match=r"two/text.json: was packed with .*expected bytes .*; pa"
    ):
        read_infos([str(tmp_path / "one"), str(tmp_path / "two")])
    with pytest.raises(SourceError, match=r"found no whole packed text .*run `tonari pack"):
        read_info(tmp_path)
