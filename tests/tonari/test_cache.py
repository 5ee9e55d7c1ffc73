"""`tonari cache`: what was staged is listed and verified, and looking changes nothing."""

import json
import os

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from dataio.source import write_index
from tests.dataio.source.shards import numbered, write_tar
from tonari import cli

SAMPLES = 20
FLAGS = ["--fields", "data=bytes:bin", "number=int:cls"]


def write_source(directory, kind):
    path = directory / f"train.{kind}"
    if kind == "tar":
        return write_tar(path, numbered(SAMPLES))
    members = numbered(SAMPLES)
    table = {"bin": [data for _, data in members[::2]], "cls": list(range(SAMPLES))}
    pq.write_table(pa.table(table), path)
    return path


def call(capsys, *argv):
    """Exit status, the JSON document and stderr of `tonari cache`."""
    status = cli.main(["cache", *map(str, argv), "--json"])
    said = capsys.readouterr()
    return status, json.loads(said.out) if said.out else None, said.err


def tree(directory):
    """Every file below, its bytes and its times."""
    files = sorted(path for path in directory.rglob("*"))
    return [(path, path.stat().st_mtime_ns, path.is_file() and path.read_bytes()) for path in files]


@pytest.fixture
def staged(capsys, tmp_path):
    """A cache of a tar shard: its root and its node directory."""
    root = tmp_path / "cache"
    status, told, _ = call(capsys, "stage", write_source(tmp_path, "tar"), *FLAGS, "--cache", root)
    assert status == 0
    (report,) = told["caches"]
    return root, tmp_path / report["directory"]


@pytest.mark.parametrize("kind", ["tar", "parquet"])
def test_what_was_staged_is_inspected_and_verified(capsys, tmp_path, kind):
    source, root = write_source(tmp_path, kind), tmp_path / "cache"
    status, told, said = call(capsys, "stage", source, *FLAGS, "--cache", root)
    assert (status, said) == (0, "")
    assert told["source_bytes"] > 0
    before = tree(root)
    status, seen, said = call(capsys, "inspect", root, "--verify")
    assert (status, said) == (0, "")
    assert tree(root) == before, "looking changes nothing"
    (report,) = seen["caches"]
    assert report == told["caches"][0]
    assert report["source"] == str(source)
    assert report["num_slots"] == SAMPLES
    assert report["num_missing"] == 0
    assert sorted(report["fields"]) == ["data", "number"]
    data_bytes = sum(len(data) for name, data in numbered(SAMPLES) if name.endswith("bin"))
    assert report["payload_bytes"] == data_bytes + 8 * SAMPLES
    assert report["in_use_by"] is None
    assert seen["corrupt_samples"] == {report["directory"]: []}


def test_staging_again_reads_only_what_counts_the_samples(capsys, tmp_path, staged):
    root, _ = staged
    pattern = tmp_path / "train.tar"
    write_index(pattern)
    _, told, _ = call(capsys, "stage", pattern, *FLAGS, "--cache", root)
    assert told["source_bytes"] < 100


@pytest.mark.parametrize(
    ("name", "place", "sample"), [("fixed-0.npy", 128 + 8 * 7, 7), ("heap-0.bin", 3000, 1)]
)
def test_a_flipped_byte_is_found_and_its_sample_named(capsys, staged, name, place, sample):
    root, directory = staged
    with open(directory / name, "r+b") as file:
        file.seek(place)
        byte = file.read(1)[0]
        file.seek(place)
        file.write(bytes([byte ^ 1]))
    assert call(capsys, "inspect", root)[0] == 0, "without --verify no row is read"
    status, seen, said = call(capsys, "inspect", root, "--verify")
    assert status == 1
    (corrupt,) = seen["corrupt_samples"].values()
    assert corrupt == [sample]
    assert said == (
        f"{directory}: 1 rows do not match their checksums, the first is sample {sample}; "
        "remove the directory: the next job stages it again\n"
    )


@pytest.mark.parametrize("name", ["fixed-0.npy", "heap-0.bin", "manifest.json", "meta.json"])
def test_a_cut_file_is_one_message(capsys, staged, name):
    root, directory = staged
    os.truncate(directory / name, 140 if name.startswith(("fixed", "heap")) else 9)
    status, _, said = call(capsys, "inspect", root, "--verify")
    assert status == 1
    assert said.count("\n") == 1
    assert said.startswith(f"tonari cache: {directory}")
    assert "expected" in said
    assert "remove" in said or "name a cache root" in said


def test_an_empty_directory_holds_no_caches(capsys, tmp_path):
    assert call(capsys, "inspect", tmp_path) == (0, {"caches": []}, "")
    assert cli.main(["cache", "inspect", str(tmp_path)]) == 0
    assert capsys.readouterr().out == f"{tmp_path}: no caches\n"


def test_a_missing_directory_is_refused_and_not_made(capsys, tmp_path):
    status, _, said = call(capsys, "inspect", tmp_path / "gone")
    assert status == 1
    assert said == (
        f"tonari cache: {tmp_path}/gone: no such directory, expected one that holds caches; check "
        "the path, or leave it out to look where jobs on this node put theirs\n"
    )
    assert not (tmp_path / "gone").exists()


def test_the_default_directory_need_not_be_there_yet(capsys, monkeypatch, tmp_path):
    monkeypatch.setenv("TONARI_CACHE", str(tmp_path / "later"))
    assert call(capsys, "inspect") == (0, {"caches": []}, "")
    assert not (tmp_path / "later").exists()


@pytest.mark.skipif(os.getuid() != 0, reason="only root can give a directory away")
def test_another_users_caches_can_be_looked_at_and_need_not_be_writable(
    capsys, monkeypatch, staged
):
    root, directory = staged
    memmap = np.memmap

    def read_only(path, dtype, mode, **where):
        assert mode == "r"
        return memmap(path, dtype, mode, **where)

    monkeypatch.setattr(np, "memmap", read_only)
    for path in (root, *root.rglob("*")):
        os.chown(path, 12345, 12345)
    status, seen, _ = call(capsys, "inspect", root, "--verify")
    assert status == 0
    assert seen["caches"][0]["directory"] == str(directory)
