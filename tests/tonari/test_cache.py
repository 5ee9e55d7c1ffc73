"""`tonari cache`: what was staged is listed, verified, exported, and removed with care."""

import json
import os
import subprocess
import sys

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import dataio
from dataio.source import write_index
from dataio.store.lock import CacheLock
from dataio.store.tools.prune import PruneChoice
from dataio.store.tools.report import CacheReport
from tests.dataio.source.shards import numbered, write_tar
from tonari import cli
from tonari.cache.stage import parse_field

SAMPLES = 20
# One thread reads, so that rows lie in the order of the shard.
FLAGS = ["--fields", "data=bytes:bin", "number=int:cls", "--staging-readers", "1"]


def test_fields_may_be_of_every_kind_that_the_library_has():
    texts = (
        "a=bytes:bin b=float:f c=image:jpg d=image_size:jpg e=int:cls f=mask:seg.png g=text:txt",
        "h=tokens:npy i=tokens:uint16:npy j=array:float32:3x4:npy",
    )
    parsed = dict(map(parse_field, " ".join(texts).split()))
    assert parsed["h"] == dataio.Tokens("npy")
    assert parsed["i"] == dataio.Tokens("npy", "uint16")
    assert parsed["j"] == dataio.Array("npy", (3, 4), "float32")
    assert parsed["f"] == dataio.Mask("seg.png")
    public = {getattr(dataio, name) for name in dataio.__all__}
    kinds = {kind for kind in public if hasattr(kind, "encode")} - {dataio.Field}
    assert {type(field) for field in parsed.values()} == kinds


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
    status, seen, said = call(capsys, "inspect", root)
    assert (status, said) == (0, "")
    assert call(capsys, "ls", root)[0] == 0
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
    assert report["problem"] is None
    verified = {
        "corrupt_samples": {report["directory"]: []},
        "damaged_headers": {report["directory"]: 0},
        "damaged_arrays": {},
        "rebuilt": {},
        "problems": {},
    }
    assert call(capsys, "verify", root) == (0, verified, "")


END_BYTES = 11 << 10
"""Of a shard that has an index: its marker and the filling of its last record."""


def test_staging_again_reads_only_what_counts_the_samples(capsys, tmp_path, staged):
    root, _ = staged
    pattern = tmp_path / "train.tar"
    write_index(pattern)
    _, told, _ = call(capsys, "stage", pattern, *FLAGS, "--cache", root)
    # The index is read whole, and the end of the shard, where it has to end.
    index, shard = pattern.with_suffix(".idx").stat().st_size, pattern.stat().st_size
    assert told["source_bytes"] < index + END_BYTES < shard / 4


def flip(path, place):
    with open(path, "r+b") as file:
        file.seek(place)
        byte = file.read(1)[0]
        file.seek(place)
        file.write(bytes([byte ^ 1]))


@pytest.mark.parametrize(
    ("name", "place", "sample"), [("fixed-0.npy", 128 + 8 * 7, 7), ("heap-0.bin", 3000, 1)]
)
def test_a_flipped_byte_is_found_and_only_its_row_is_read_again(
    capsys, tmp_path, staged, name, place, sample
):
    root, directory = staged
    flip(directory / name, place)
    assert call(capsys, "inspect", root)[0] == 0, "no row is read"
    before = tree(root)
    status, seen, said = call(capsys, "verify", root, "--dry-run")
    assert (status, seen["corrupt_samples"]) == (1, {str(directory): [sample]})
    assert "1 rows do not match their checksums, the first is sample" in said
    assert [path for path, *_ in tree(root)] == [path for path, *_ in before]
    assert call(capsys, "inspect", root)[1]["caches"][0]["num_missing"] == 0
    status, seen, said = call(capsys, "verify", root)
    assert (status, seen["corrupt_samples"]) == (1, {str(directory): [sample]})
    assert said.endswith("the next job reads just these from the source again\n")
    assert call(capsys, "inspect", root)[1]["caches"][0]["num_missing"] == 1
    assert call(capsys, "verify", root)[0] == 0, "the corrupt row is gone"
    write_index(tmp_path / "train.tar")
    _, told, _ = call(capsys, "stage", tmp_path / "train.tar", *FLAGS, "--cache", root)
    assert told["caches"][0]["num_missing"] == 0
    whole = (tmp_path / "train.tar").stat().st_size
    assert told["source_bytes"] < END_BYTES + whole / 4, "the others were kept"
    assert call(capsys, "verify", root)[0] == 0


CUT = ["fixed-0.npy", "headers.npy", "heap-0.bin", "base-*.arrow", "manifest.json", "meta.json"]


@pytest.mark.parametrize("name", CUT)
def test_a_cut_file_is_one_message_and_ends_no_listing(capsys, tmp_path, staged, name):
    root, directory = staged
    other = write_tar(tmp_path / "other.tar", numbered(5))
    assert call(capsys, "stage", other, *FLAGS, "--cache", root)[0] == 0
    (path,) = directory.glob(name)
    os.truncate(path, 140 if name.endswith(("npy", "bin")) else 9)
    status, seen, said = call(capsys, "verify", root, "--dry-run")
    assert status == 1
    if name != "heap-0.bin":
        assert len(seen["corrupt_samples"]) == 1, "the other cache is verified all the same"
        assert said.count("\n") == 1
        assert said.startswith(f"tonari cache: {directory}")
        assert "expected" in said
        assert "remove" in said
    status, seen, _ = call(capsys, "ls", root)
    assert status == 0
    assert len(seen["caches"]) == 2
    if name != "heap-0.bin":  # Only reading its rows shows that a heap is too short.
        assert call(capsys, "inspect", root)[0] == 1
        assert sum(report["problem"] is not None for report in seen["caches"]) == 1
    status, seen, said = call(capsys, "verify", root)
    assert status == 1
    if name == "meta.json":
        assert "what the cache holds is not known" in said
        return
    assert (name == "heap-0.bin") == (not seen["rebuilt"])
    (report,) = call(capsys, "inspect", directory)[1]["caches"]
    if name in ("manifest.json", "base-*.arrow"):
        assert (report["num_slots"], report["num_missing"]) == (SAMPLES, 0), (
            "rows know who they are"
        )
    assert call(capsys, "stage", tmp_path / "train.tar", *FLAGS, "--cache", root)[0] == 0
    assert call(capsys, "verify", root)[0] == 0


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
    status, seen, _ = call(capsys, "inspect", root)
    assert status == 0
    assert seen["caches"][0]["directory"] == str(directory)
    assert seen["caches"][0]["owner"] == 12345
    assert call(capsys, "verify", root, "--dry-run")[0] == 0
    for change in (["verify"], ["prune", "--all"]):
        status, _, said = call(capsys, *change, root)
        assert status == 1
        assert "belongs to user 12345, not to this one (0); ask its owner" in said
    assert (directory / "manifest.json").exists()


def test_pruning_removes_all_that_a_cache_wrote_and_nothing_else(capsys, tmp_path, staged):
    root, directory = staged
    (root / "mine.txt").write_text("kept")
    left = root / "gone-0123" / "node3"
    left.mkdir(parents=True)
    (left / "lock").touch()
    (left / "meta.json.partial").touch()
    status, told, _ = call(capsys, "prune", root, "--all", "--dry-run")
    assert (status, set(told["removed"])) == (0, {str(directory), str(left)})
    assert directory.exists()
    assert call(capsys, "prune", root, "--all")[0] == 0
    assert [path.name for path in root.iterdir()] == ["mine.txt"]
    assert (tmp_path / "train.tar").exists()


@pytest.mark.parametrize("kind", ["file", "link", "directory"])
def test_pruning_names_foreign_files_and_leaves_the_directory_whole(capsys, tmp_path, staged, kind):
    root, directory = staged
    precious = tmp_path / "precious"
    precious.mkdir()
    (precious / "data").write_text("kept")
    if kind == "file":
        (directory / "notes.txt").write_text("kept")
    elif kind == "link":
        (directory / "heap-7.bin").symlink_to(precious / "data")
    else:
        (directory / "base-9.arrow").mkdir()
    before = tree(root)
    status, told, said = call(capsys, "prune", root, "--all")
    assert (status, told["removed"]) == (1, {})
    assert "expected only files that a cache writes; move them away" in said
    assert tree(root) == before
    assert (precious / "data").read_text() == "kept"


def test_a_link_to_a_cache_is_not_followed(capsys, tmp_path, staged):
    _root, directory = staged
    other = tmp_path / "links" / "set"
    other.mkdir(parents=True)
    (other / "node0").symlink_to(directory)
    assert call(capsys, "prune", tmp_path / "links", "--all")[1]["removed"] == {}
    assert (directory / "manifest.json").exists()


def test_a_cache_in_use_is_not_pruned_and_says_by_whom(capsys, staged):
    root, directory = staged
    lock = CacheLock(directory)
    assert lock.join()
    assert call(capsys, "prune", root, "--all")[1]["removed"] == {}
    (report,) = call(capsys, "ls", root)[1]["caches"]
    assert f"process {os.getpid()} on " in report["in_use_by"]
    assert "sharing" in report["in_use_by"]
    status, _, said = call(capsys, "verify", root)
    assert (status, "the cache is in use by process" in said) == (1, True)
    assert call(capsys, "verify", root, "--dry-run")[0] == 0
    lock.release()
    assert call(capsys, "prune", root, "--all")[0] == 0
    assert not directory.exists()


def test_a_changed_dataset_makes_its_cache_stale_and_prune_removes_just_that(
    capsys, tmp_path, staged
):
    root, directory = staged
    other = write_tar(tmp_path / "other.tar", numbered(5))
    assert call(capsys, "stage", other, *FLAGS, "--cache", root)[0] == 0
    listed = call(capsys, "ls", root, "--sources")[1]["caches"]
    assert [report["stale"] for report in listed] == [False, False]
    write_tar(tmp_path / "train.tar", numbered(SAMPLES + 1))
    status, _, said = call(capsys, "stage", tmp_path / "train.tar", *FLAGS, "--cache", root)
    assert status == 1
    assert "its files have changed; to stage it anew remove the directory" in said
    listed = call(capsys, "ls", root, "--sources")[1]["caches"]
    assert sorted(report["stale"] for report in listed) == [False, True]
    status, told, _ = call(capsys, "prune", root, "--stale")
    assert (status, list(told["removed"])) == (0, [str(directory)])
    assert call(capsys, "stage", tmp_path / "train.tar", *FLAGS, "--cache", root)[0] == 0


def test_a_dataset_that_is_not_there_now_is_not_called_stale(capsys, tmp_path, staged):
    root, _ = staged
    (tmp_path / "train.tar").rename(tmp_path / "away.tar")
    _, told, said = call(capsys, "prune", root, "--stale")
    assert told["removed"] == {}
    assert "whether it is stale is not known" in said


def report(name, *, used, num_bytes, in_use_by=None, problem=None):
    return CacheReport(
        name, last_used_s=used, disk_bytes=num_bytes, in_use_by=in_use_by, problem=problem
    )


REPORTS = [
    report("old", used=10, num_bytes=5),
    report("used", used=0, num_bytes=50, in_use_by="somebody"),
    report("new", used=90, num_bytes=20),
    report("broken", used=95, num_bytes=1, problem="cut"),
]


@pytest.mark.parametrize(
    ("choice", "gone"),
    [
        (PruneChoice(everything=True), ["old", "new", "broken"]),
        (PruneChoice(unused_s=50), ["old"]),
        (PruneChoice(stale=True), ["new", "broken"]),
        (PruneChoice(keep_bytes=71), ["old"]),
        (PruneChoice(keep_bytes=60), ["old", "new"]),
        (PruneChoice(keep_bytes=1), ["old", "new", "broken"]),
        (PruneChoice(keep_bytes=1000), []),
        (PruneChoice(unused_s=50, keep_bytes=71), ["old"]),
    ],
)
def test_the_least_recently_used_go_first_and_those_in_use_stay(choice, gone):
    going = choice.of(REPORTS, [False, True, True, False], now_s=100)
    assert [report.directory for report in going] == gone


@pytest.mark.parametrize(
    "flags", [[], ["--older-than", "7"], ["--keep-bytes", "many"], ["--older-than", "x d"]]
)
def test_pruning_without_a_choice_is_a_wrong_argument(capsys, tmp_path, flags):
    assert cli.main(["cache", "prune", str(tmp_path), *flags]) == 2


@pytest.mark.parametrize("kind", ["parquet", "arrow"])
@pytest.mark.parametrize("per_file", [None, 7])
def test_an_export_holds_every_row_once(capsys, tmp_path, staged, kind, per_file):
    root, _directory = staged
    target = tmp_path / "out"
    some = ["--rows-per-file", per_file] if per_file else []
    status, told, _ = call(capsys, "export", root, target, "--format", kind, *some)
    assert status == 0
    assert len(told["files"]) == (3 if per_file else 1)
    read = pq.read_table if kind == "parquet" else lambda path: pa.ipc.open_file(path).read_all()
    rows = [row for path in sorted(told["files"]) for row in read(path).to_pylist()]
    data = [data for name, data in numbered(SAMPLES) if name.endswith("bin")]
    assert rows == [{"sample_id": i, "number": i, "data": data[i]} for i in range(SAMPLES)]
    assert sum(told["files"].values()) == SAMPLES
    before = tree(target)
    status, _, said = call(capsys, "export", root, target, "--format", kind, *some)
    assert status == 1
    assert "is there already" in said
    assert tree(target) == before
    assert call(capsys, "ls", root)[1]["caches"][0]["in_use_by"] is None


def test_fixed_arrays_are_exported_as_fixed_size_lists(capsys, tmp_path):
    source = tmp_path / "array.parquet"
    values = np.arange(24, dtype="<f4").reshape(4, 6)
    pq.write_table(pa.table({"x": [v.tobytes() for v in values]}), source)
    fields = ["--fields", "x=array:float32:2x3:x"]
    assert call(capsys, "stage", source, *fields, "--cache", tmp_path / "c")[0] == 0
    _, told, _ = call(capsys, "export", tmp_path / "c", tmp_path / "out")
    (path,) = told["files"]
    found = pq.read_table(path)
    assert found.schema.field("x").metadata[b"shape"] == b"2,3"
    assert found["x"].to_pylist() == values.tolist()


def test_every_command_teaches_what_it_does(capsys):
    for name in ("ls", "inspect", "stage", "verify", "prune", "export"):
        assert cli.main(["cache", name, "--help"]) == 0
        assert "usage: tonari cache" in capsys.readouterr().out


def test_files_and_directories_are_private(staged):
    _root, directory = staged
    modes = {path.name: path.stat().st_mode & 0o777 for path in directory.iterdir()}
    assert set(modes.values()) == {0o600}, modes
    assert directory.stat().st_mode & 0o777 == directory.parent.stat().st_mode & 0o777 == 0o700


def test_the_commands_of_caches_do_not_import_torch():
    program = "import tonari.cache.command, sys; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", program], timeout=60).returncode == 0
