"""Shards hold the source's samples, look whole only when they are, and bad input is refused."""

import json
import tarfile
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dataio.base.errors import SourceError
from dataio.source import open_source
from tonari.cli import main
from tonari.errors import CommandError
from tonari.pack.shards import Sample, write_shards
from tonari.sizes import format_bytes, parse_bytes

NUM_ROWS = 25


def make_samples(count: int, num_bytes: int = 700) -> Iterator[Sample]:
    return ({"__key__": f"{i:03d}", "bin": bytes([i]) * num_bytes} for i in range(count))


def members(directory: Path) -> dict[str, bytes]:
    """All members of all shards, in order."""
    found: dict[str, bytes] = {}
    for path in sorted(directory.glob("*.tar")):
        with tarfile.open(path) as tar:
            for member in tar:
                file = tar.extractfile(member)
                assert file is not None
                found[member.name] = file.read()
    return found


@pytest.fixture
def parquet(tmp_path: Path) -> Path:
    """Rows in several row groups."""
    path = tmp_path / "digits.parquet"
    columns: dict[str, list[Any]] = {
        "key": [f"a b/{i:02d}.x" for i in range(NUM_ROWS)],
        "JPG": [b"image %d" % i for i in range(NUM_ROWS)],
        "cls": list(range(NUM_ROWS)),
        "weight": [i / 4 for i in range(NUM_ROWS)],
        "text": [f"é{i}" for i in range(NUM_ROWS)],
    }
    pq.write_table(pa.table(columns), path, row_group_size=4)
    return path


def test_parquet_columns_become_fields(parquet: Path, tmp_path: Path) -> None:
    assert main(["pack", str(parquet), str(tmp_path / "out"), "--shard-samples", "10"]) == 0
    found = members(tmp_path / "out")
    assert list(found)[:4] == ["a_b/00_x." + name for name in ("cls", "jpg", "text", "weight")]
    assert [found[f"a_b/07_x.{name}"] for name in ("cls", "jpg", "text", "weight")] == [
        b"7", b"image 7", "é7".encode(), b"1.75",
    ]  # fmt: skip
    index = json.loads((tmp_path / "out" / "index.json").read_text())
    assert (index["__kind__"], index["wids_version"]) == ("wids-shard-index-v1", 1)
    assert [shard["nsamples"] for shard in index["shardlist"]] == [10, 10, 5]
    for shard in index["shardlist"]:
        assert (tmp_path / "out" / shard["url"]).stat().st_size == shard["filesize"]


def test_what_is_packed_is_a_source(parquet: Path, tmp_path: Path) -> None:
    main(["pack", str(parquet), str(tmp_path / "out"), "--shard-samples", "10"])
    assert open_source(str(tmp_path / "out" / "out-{000000..000002}.tar")).num_samples == NUM_ROWS


def test_a_seed_orders_the_same_samples_anew(parquet: Path, tmp_path: Path) -> None:
    for name, more in [("plain", []), ("a", ["--shuffle-seed=1"]), ("b", ["--shuffle-seed=1"])]:
        main(["pack", str(parquet), str(tmp_path / name), "--columns=cls,JPG", *more])
    plain, a, b = (members(tmp_path / name) for name in ("plain", "a", "b"))
    assert list(a.items()) == list(b.items())
    assert a == plain
    assert list(a) != list(plain)


def test_the_same_samples_make_the_same_bytes(parquet: Path, tmp_path: Path) -> None:
    for name in "ab":
        main(["pack", str(parquet), str(tmp_path / name)])
    files = [(tmp_path / name / f"{name}-000000.tar").read_bytes() for name in "ab"]
    assert files[0] == files[1]


def test_an_image_folder_is_labelled_by_its_folders(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    hidden = (".git/x.jpg", "@eaDir/x.jpg", "cat/@eaDir/x.jpg", "cat/.x/x.jpg")
    for name in ("dog/b.jpg", "dog/a.1.JPEG", "cat/deep/c.jpg", "cat/notes.txt", *hidden):
        path = tmp_path / "in" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(name.encode())
    (tmp_path / "in/dog/more").symlink_to(tmp_path / "in/cat/deep")
    assert main(["pack", str(tmp_path / "in"), str(tmp_path / "out"), "--json"]) == 0
    assert members(tmp_path / "out") == {
        "cat/deep/c.cls": b"0", "cat/deep/c.jpg": b"cat/deep/c.jpg",
        "dog/a_1.cls": b"1", "dog/a_1.jpg": b"dog/a.1.JPEG",
        "dog/b.cls": b"1", "dog/b.jpg": b"dog/b.jpg",
        "dog/more/c.cls": b"1", "dog/more/c.jpg": b"cat/deep/c.jpg",
    }  # fmt: skip
    assert json.loads((tmp_path / "out" / "classes.json").read_text()) == ["cat", "dog"]
    document = json.loads(capsys.readouterr().out)
    assert (document["samples"], document["shards"]) == (4, 1)


@given(st.lists(st.integers(0, 3000), min_size=1, max_size=20), st.integers(2048, 9000))
def test_no_shard_is_larger_than_asked_unless_one_sample_is(sizes: list[int], most: int) -> None:
    samples: list[Sample] = [
        {"__key__": f"{i}", "bin": bytes(size)} for i, size in enumerate(sizes)
    ]
    with tempfile.TemporaryDirectory() as name:
        paths = write_shards(samples, Path(name) / "out", shard_bytes=most)
        index = json.loads((Path(name) / "out" / "index.json").read_text())
        counts = [shard["nsamples"] for shard in index["shardlist"]]
        assert sum(counts) == len(sizes)
        assert list(members(Path(name) / "out").values()) == [bytes(size) for size in sizes]
        for path, count in zip(paths, counts, strict=True):
            assert path.stat().st_size <= most or count == 1


def test_a_failure_leaves_nothing(tmp_path: Path) -> None:
    def failing() -> Iterator[Sample]:
        yield from make_samples(5)
        assert list((tmp_path / "deep").glob(".out.partial-*/train-000001.tar"))
        assert not (tmp_path / "deep" / "out").exists()
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        write_shards(failing(), tmp_path / "deep" / "out", shard_samples=2)
    assert not list((tmp_path / "deep").iterdir())


def test_overwrite_replaces_shards_and_nothing_else(tmp_path: Path) -> None:
    out = tmp_path / "out"
    write_shards(make_samples(5), out, shard_samples=1)
    with pytest.raises(CommandError, match=r"out: is not empty .*name another one, or give --over"):
        write_shards(make_samples(2), out, shard_samples=1)
    write_shards(make_samples(2), out, shard_samples=1, overwrite=True)
    assert [path.name for path in tmp_path.iterdir()] == ["out"]
    assert len(list(out.glob("*.tar"))) == 2
    (out / "thesis.tex").touch()
    with pytest.raises(CommandError, match=r"holds thesis.tex.*--overwrite replaces nothing else"):
        write_shards(make_samples(2), out, shard_samples=1, overwrite=True)
    assert (out / "thesis.tex").exists()


def test_a_file_in_the_way_is_refused(tmp_path: Path) -> None:
    (tmp_path / "out").touch()
    with pytest.raises(CommandError, match=r"out: is a file, expected a directory; name another"):
        write_shards(make_samples(2), tmp_path / "out", shard_samples=1)
    with pytest.raises(CommandError, match=r"out/a: cannot be written: File exists; free"):
        write_shards(make_samples(2), tmp_path / "out" / "a", shard_samples=1)


@pytest.mark.parametrize(
    ("samples", "message"),
    [
        ([], "found no samples, expected at least one"),
        ([{"__key__": "a.b", "x": b""}], r"sample 0: has key 'a\.b', expected no white space, no"),
        ([{"__key__": "__a", "x": b""}], "sample 0: has key '__a', expected no white space"),
        ([{"__key__": "a", "x": b""}] * 2, "sample 1: has key 'a' a second time, expected another"),
        (
            [{"__key__": "a", "x": b""}, {"__key__": "b", "y": b""}],
            r"sample 1: has the fields \['y'\], expected \['x'\] as in the first sample; change it",
        ),
    ],
)
def test_samples_that_readers_would_misread_are_refused(
    samples: list[Sample], message: str, tmp_path: Path
) -> None:
    with pytest.raises(SourceError, match=message):
        write_shards(samples, tmp_path / "out", shard_samples=1)
    assert not list(tmp_path.iterdir())


def refused(capsys: pytest.CaptureFixture[str], *argv: object) -> str:
    assert main(["pack", *map(str, argv)]) == 1
    message = capsys.readouterr().err
    assert message.startswith("tonari pack: ")
    assert message.count("\n") == 1
    return message


def test_bad_sources_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "out"
    assert "found nothing there" in refused(capsys, tmp_path / "absent", out)
    assert "found nothing there" in refused(capsys, tmp_path / "*.parquet", out)
    (tmp_path / "in" / "cat").mkdir(parents=True)
    assert "found no images, expected Parquet" in refused(capsys, tmp_path / "in/cat", out)
    (tmp_path / "in" / "cat" / "a.jpg").touch()
    (tmp_path / "in" / "dog").mkdir()
    assert "in/dog: the directory holds no image" in refused(capsys, tmp_path / "in", out)
    (tmp_path / "in" / "dog" / "a.png").touch()
    assert "found jpg and png images, expected one" in refused(capsys, tmp_path / "in", out)
    (tmp_path / "bad.parquet").write_bytes(b"no Parquet")
    assert "expected a whole Parquet file" in refused(capsys, tmp_path / "bad.parquet", out)
    for name in ("corpus.jsonl.zst", "corpus.txt"):
        (tmp_path / name).write_bytes(b"{}")
        assert "to pack text give --tokenizer: " in refused(capsys, tmp_path / name, out)
    assert not out.exists()


@pytest.mark.parametrize(
    ("columns", "argv", "message"),
    [
        ({"a": [[1]]}, [], "column 'a' holds list<"),
        (
            {"a": [1, None]},
            [],
            "row 1: column 'a' is empty, expected a value in every row; fill it",
        ),
        ({"a": [1]}, ["--columns=b"], "has the columns ['a'], expected ['b']; name columns that"),
        ({"a": [1], "A": [2]}, [], "columns ['a', 'A'] differ only in case"),
        ({"key": ["x"]}, [], "expected one beside the key"),
        ({"a": pa.array([], "int64")}, [], "found no samples"),
        ({"a": pa.array([], "int64")}, ["--shuffle-seed=0"], "found no samples"),
    ],
)
def test_bad_columns_are_refused(
    columns: dict[str, Any],
    argv: list[str],
    message: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    pq.write_table(pa.table(columns), tmp_path / "a.parquet")
    assert message in refused(capsys, tmp_path / "a.parquet", tmp_path / "out", *argv)
    assert [path.name for path in tmp_path.iterdir()] == ["a.parquet"]


def test_files_of_two_datasets_are_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pq.write_table(pa.table({"a": [1]}), tmp_path / "a.parquet")
    pq.write_table(pa.table({"a": [1], "b": [1]}), tmp_path / "b.parquet")
    assert "expected ['a'] as in" in refused(capsys, tmp_path, tmp_path / "out")


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--shard-samples=0"], "--shard-samples is 0, must be >= 1"),
        (["--shard-bytes=many"], "expected a size of at least 1 byte"),
        (["--shard-bytes=1", "--shard-samples=1"], "not both"),
        (["--prefix=a/b"], "--prefix is 'a/b'"),
    ],
)
def test_wrong_arguments_exit_2(
    argv: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["pack", "in", "out", *argv]) == 2
    assert message in capsys.readouterr().err


def test_sizes_are_read_as_people_write_them() -> None:
    sizes = [parse_bytes(text) for text in ("4096", "64MiB", "1.5 gb", "1kb")]
    assert sizes == [4096, 64 * 2**20, 1_500_000_000, 1000]
    assert [format_bytes(size) for size in (0, 999, 1000, 25_691_648)] == [
        "0 B", "999 B", "1 KB", "25.7 MB",
    ]  # fmt: skip
    for text in ("", "0", "-1", "64 MiBs"):
        with pytest.raises(ValueError, match="expected a size of at least 1 byte, such as 64MiB"):
            parse_bytes(text)


def test_webdataset_reads_the_shards(tmp_path: Path) -> None:
    from webdataset.tariterators import group_by_keys, tar_file_expander

    (path,) = write_shards(make_samples(4), tmp_path / "out", shard_samples=4)
    with path.open("rb") as file:
        read = list(group_by_keys(tar_file_expander([{"url": str(path), "stream": file}])))
    assert [sample["__key__"] for sample in read] == ["000", "001", "002", "003"]
    assert read[2]["bin"] == bytes([2]) * 700
