"""Patterns name files; every byte that is read is counted."""

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import fsspec
import pytest

from dataio.base.errors import SourceError
from dataio.rows.fields import Field, Int
from dataio.source import Storage, expand, open_source
from tests.dataio.source.shards import numbered, read_all, write_tar


def touch(directory: Path, *names: str) -> None:
    for name in names:
        (directory / name).write_bytes(b"x")


def test_braces_globs_directories_and_lists_expand(tmp_path: Path) -> None:
    touch(tmp_path, "a-000.tar", "a-001.tar", "a-002.tar", "b.parquet", "README.md", "a-000.idx")
    three = [f"{tmp_path}/a-{i:03d}.tar" for i in range(3)]
    assert expand(f"{tmp_path}/a-{{000..002}}.tar") == three
    assert expand(f"{tmp_path}/a-*.tar") == three
    assert expand(f"{tmp_path}/[a]-00?.tar") == three
    assert expand(str(tmp_path)) == [*three, f"{tmp_path}/b.parquet"]
    assert expand([three[2], f"{tmp_path}/a-{{000,001}}.tar"]) == [three[2], *three[:2]]


def test_a_relative_pattern_expands(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    touch(tmp_path, "a.tar")
    monkeypatch.chdir(tmp_path)
    assert expand("*.tar") == expand("a.tar") == expand(".") == ["a.tar"]


@pytest.mark.parametrize(
    ("pattern", "found"),
    [
        ("", "the shard pattern '' is empty, expected one such as"),
        ([], r"the shard pattern \[\] is empty"),
        (["a.tar", ""], "is empty"),
        ("no-*.tar", r"no-\*\.tar: the glob holds no shard, expected files ending in \.tar"),
        (".", r"\.: the directory holds no shard"),
        ("a-{000..003", "the braces of 'a-{000..003' do not match"),
        ("a-{0..3}.tar", r"^a-1\.tar: no such file; 2 of the 4 shards of .* are missing; check"),
    ],
)
def test_a_pattern_that_names_nothing_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, pattern: str | list[str], found: str
) -> None:
    monkeypatch.chdir(tmp_path)
    if pattern == "a-{0..3}.tar":
        touch(tmp_path, "a-0.tar", "a-3.tar")
    with pytest.raises(SourceError, match=found):
        expand(pattern)


def test_storage_counts_every_byte_from_any_thread(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(bytes(range(256)) * 40)
    storage = Storage()
    with storage.open(str(tmp_path / "a")) as file, ThreadPoolExecutor(4) as threads:
        assert file.size == 10240
        parts = list(threads.map(lambda i: file.read_at(10 * i, 10), range(1024)))
        assert b"".join(parts) == bytes(range(256)) * 40
        assert storage.bytes_read == 10240
        assert file.read_at(10230, 100) == bytes(range(246, 256))
        assert file.read_at(20000, 5) == b""
    assert storage.bytes_read == 10250
    assert storage.num_opens == 1


def test_a_file_that_shrinks_or_is_missing_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "a"
    path.write_bytes(b"x" * 100)
    with Storage().open(str(path)) as file:
        path.write_bytes(b"x" * 10)
        with pytest.raises(SourceError, match="is 10 bytes long, was 100 bytes long when opened"):
            file.read_at(0, 100)
    with pytest.raises(SourceError, match=r"none: cannot be opened .*No such file.*check the path"):
        Storage().open(str(tmp_path / "none"))


def test_a_url_reads_like_a_file(tmp_path: Path) -> None:
    path = write_tar(tmp_path / "a.tar", numbered(5))
    memory = fsspec.filesystem("memory")
    memory.pipe("/shards/a.tar", path.read_bytes())
    fields: dict[str, Field] = {"label": Int("cls")}
    try:
        expected = read_all(open_source(str(path)), fields)
        assert read_all(open_source("memory://shards/a.tar"), fields) == expected
        assert read_all(open_source("memory://shards/*.tar"), fields) == expected
        memory.pipe("/shards/_delta_log/0.json", b"{}")
        for name in ("memory://shards", "memory://shards/*.tar", "memory://shards/?.t*"):
            with pytest.raises(SourceError, match=r"memory://shards: is a table of Delta"):
                open_source(name)
        assert read_all(open_source("memory://shards/a.tar"), fields) == expected
        memory.rm("/shards/_delta_log", recursive=True)
        memory.pipe("/shards/metadata/1.metadata.json", b"{}")
        with pytest.raises(SourceError, match=r"memory://shards: is a table of Iceberg"):
            open_source("memory://shards")
        with pytest.raises(SourceError, match=r"memory://shards/b\.tar: cannot be opened"):
            open_source("memory://shards/b.tar")
        with pytest.raises(SourceError, match="cannot be opened"):
            open_source("nosuch://shards/b.tar")
    finally:
        memory.rm("/shards", recursive=True)
