"""Every bad input, through the public door: one message, status 1 or 2, and a good run after it."""

import errno
import json
import os
import shutil
import subprocess
from pathlib import Path

import pytest
import torch

import dataio.base.filesystem
import shuffle
from dataio import (
    CacheError,
    FieldError,
    OtherDatasetError,
    SourceError,
)
from dataio.source import write_index
from dataio.world import run_threads, thread_worlds
from importance import Kakurenbo
from tests.dataio.source.shards import numbered, write_tar
from tests.faults.refusals import (
    FLAGS,
    GOOD,
    SAMPLES,
    assert_works,
    make,
    mounted,
    refused,
    rows_of,
    stage,
)
from tests.memory_source import MemorySource
from tests.multirank import launch_command, run_job
from tests.trainer.digits import write_config
from tonari import cli
from tonari.trainer import ConfigError
from tonari.trainer.run.build import check_device


@pytest.fixture
def shard(tmp_path):
    return write_tar(tmp_path / "train.tar", numbered(SAMPLES))


@pytest.fixture
def cache(tmp_path):
    return tmp_path / "cache"


@pytest.mark.parametrize(
    ("pattern", "words"),
    [
        ("", ("pattern '' is empty", "expected one such as")),
        (
            "no-{00..03}.tar",
            (r"no-00\.tar: no such file; 4 of the 4", "missing; check the pattern"),
        ),
        ("*.zip.tar", ("the glob holds no shard", "expected files ending in", "check the path")),
        ("empty", ("the directory holds no shard", "expected files ending in", "check the path")),
        ("no-{00..tar", ("braces of", "do not match|no such file", "expected|check")),
    ],
)
def test_a_pattern_that_names_nothing_is_refused(capsys, tmp_path, cache, pattern, words):
    (tmp_path / "empty").mkdir()
    refused(capsys, stage(tmp_path / pattern if pattern else "", cache), *words)
    assert not list(cache.glob("**/manifest.json"))


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (
            b"",
            (r"train\.tar: found b'' at byte 0", "expected a tar header", "copy the shard again"),
        ),
        (bytes(10240), (r"train\.tar: holds no samples", "expected at least one; remove")),
        (b"<html>no</html>" * 50, (r"train\.tar: ", "it is not a tar file")),
    ],
)
def test_what_is_not_a_tar_is_refused(capsys, shard, cache, content, words):
    shard.write_bytes(content)
    refused(capsys, stage(shard, cache), *words)
    write_tar(shard, numbered(SAMPLES))
    assert_works(shard, cache)


@pytest.mark.parametrize("indexed", [False, True])
def test_a_truncated_tar_is_refused_and_nothing_of_it_kept(capsys, shard, cache, indexed):
    if indexed:  # Only reading then finds out, when the cache is there already.
        write_index(shard)
    whole = shard.read_bytes()
    shard.write_bytes(whole[: len(whole) // 2])
    refused(capsys, stage(shard, cache), r"train\.tar: ", "expected|truncated", "again|copy")
    with pytest.raises(SourceError):
        make(str(shard), cache)
    shard.write_bytes(whole)
    assert_works(shard, cache)


@pytest.mark.parametrize(
    ("last", "words"),
    [
        (
            [("000011.bin", b"x")],
            ("sample '000011' holds bin", "expected 'cls' for field 'number'"),
        ),
        (
            [("000011.bin", b"x"), ("000011.cls", b"cat")],
            ("sample '000011'", "found b'cat'", "expected", "or repair"),
        ),
    ],
)
def test_samples_whose_fields_differ_are_refused(capsys, shard, cache, last, words):
    write_tar(shard, [*numbered(SAMPLES - 1), *last])
    refused(capsys, stage(shard, cache), r"train\.tar: ", *words)
    with pytest.raises(FieldError):
        make(str(shard), cache)
    write_tar(shard, numbered(SAMPLES))
    assert_works(shard, cache)


def test_fewer_samples_than_replicas_is_refused_on_every_rank(shard, tmp_path, cache):
    words = r"tiny.tar: holds 3 samples, expected at least one .* 4 replicas; start fewer ranks"
    tiny = write_tar(tmp_path / "tiny.tar", numbered(3))

    def run(world):
        with pytest.raises(SourceError, match=words):
            make(str(tiny), cache, world=world)
        with make(str(shard), cache, world=world) as loader:
            with pytest.raises(SourceError, match=words):
                loader.evaluation(str(tiny))
            return rows_of(loader)

    ranks = run_threads(thread_worlds([2, 2]), run)
    assert {number: data for rank in ranks for number, data in rank.items()} == GOOD


@pytest.fixture
def torch_alone():
    """Takes back the process group that a failed `tonari train` leaves to its end."""
    yield
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("data.batch_size=41", ("batch_size: 41 is more than a replica's share of 40", "at most")),
        (
            "data.batchsize=8",
            ("run.toml: data.batchsize is unknown; did you mean data.batch_size",),
        ),
        ("run.epochs=0", ("run.epochs is 0, expected a whole number >= 1; correct it",)),
        ("data.train=gone.tar", ("gone.tar: no such file", "check the pattern")),
        ("data.image=jpeg", (r"train\.parquet: found the columns png, cls", "'jpeg'", "name one")),
    ],
)
def test_wrong_settings_are_refused(capsys, tmp_path, torch_alone, override, words):
    config = write_config(tmp_path, num_samples=40)
    refused(capsys, ["train", config, f"data.cache={tmp_path}/cache", override], *words)
    left = {path.name for path in (tmp_path / "runs").rglob("*") if path.is_file()}
    assert left <= {"run.lock"}, "it was taken before the data were looked at"


@pytest.mark.parametrize(
    ("flags", "word"),
    [
        (["data=movie:mp4"], "data=movie:mp4: expected NAME=KIND:KEY, such as"),
        (["x=array:float32:3xa:npy"], "expected NAME=KIND:KEY"),
        (["x=array:flat:3:npy"], "dtype 'flat' is not one of numbers; use"),
        (["data=bytes:bin", "data=int:cls"], "'data' was given before; choose another name"),
        (["weight=float:w"], "'weight' is what the batch itself holds .*; choose another name"),
    ],
)
def test_wrong_fields_are_wrong_arguments(capsys, shard, cache, flags, word):
    argv = ["cache", "stage", shard, "--cache", cache, "--fields", *flags]
    refused(capsys, argv, "tonari cache stage: ", word, status=2)
    assert not cache.exists()


def test_a_directory_that_cannot_be_made_is_refused(capsys, shard, tmp_path):
    (tmp_path / "file").touch()
    refused(
        capsys, stage(shard, tmp_path / "file" / "cache"),
        "cannot be created: Not a directory", "TONARI_CACHE",
    )  # fmt: skip


def test_a_read_only_directory_is_refused(capsys, shard, cache):
    with mounted(cache, "-t", "tmpfs", "-o", "ro", "tmpfs"):
        refused(capsys, stage(shard, cache), "cache directory .* is not writable", "TONARI_CACHE")
        refused(capsys, stage(shard, cache / "a"), "cannot be created: Read-only", "TONARI_CACHE")
    assert_works(shard, cache)


@pytest.mark.parametrize("room_kib", [4, 12, *range(84, 148, 8), 320])
def test_a_full_disk_is_one_message_wherever_it_fills(capsys, tmp_path, cache, room_kib):
    shard = write_tar(tmp_path / "large.tar", numbered(1500, num_bytes=400))
    with mounted(cache, "-t", "tmpfs", "-o", f"size={room_kib}k", "tmpfs"):
        words = "(No space left on device|needs .* free .* reserve .*); free some space or give"
        refused(capsys, stage(shard, cache), "cache.*: could not ", words)
        with pytest.raises(CacheError, match=words):
            make(str(shard), cache)
        subprocess.run(["mount", "-o", "remount,size=64m", str(cache)], check=True)
        with make(str(shard), cache) as loader:
            assert set(rows_of(loader)) == set(range(1500))


@pytest.mark.parametrize("failing", range(4))
def test_room_that_cannot_be_claimed_leaves_nothing_half_made(
    capsys, monkeypatch, shard, cache, failing
):
    """Call after call: the fixed field's file, the headers', the heap; then staging as a whole."""
    calls = iter(range(100))
    claim = os.posix_fallocate

    def full(descriptor, offset, length):
        if next(calls) == failing:
            raise OSError(errno.ENOSPC, "No space left on device")
        claim(descriptor, offset, length)

    with monkeypatch.context() as patched:
        patched.setattr(os, "posix_fallocate", full)
        if failing < 3:
            refused(capsys, stage(shard, cache), "could not ", "No space left on device; free some")
        else:
            assert cli.main(["cache", "stage", str(shard), *FLAGS, "--cache", str(cache)]) == 0
    assert_works(shard, cache)


def test_a_shared_filesystem_is_refused(capsys, monkeypatch, tmp_path, shard, cache):
    table = tmp_path / "mountinfo"
    table.write_text(f"41 1 0:41 / {cache} rw - lustre mds@tcp:/scratch rw\n")
    with monkeypatch.context() as patched:
        patched.setattr(dataio.base.filesystem, "MOUNTINFO", table)
        words = ("lies on lustre", "other nodes see too; a cache must be", "local disk", "TONARI")
        refused(capsys, stage(shard, cache), *words)
        assert not cache.exists()
    assert_works(shard, cache)


def test_launchers_that_disagree_are_refused(capsys, monkeypatch, tmp_path):
    config = write_config(tmp_path, num_samples=40)
    for name, value in {"PMI_RANK": 0, "PMI_SIZE": 4, "RANK": 0, "WORLD_SIZE": 2}.items():
        monkeypatch.setenv(name, str(value))
    words = ("MPI and torch disagree", "PMI_SIZE=4", "WORLD_SIZE=2", "use one launcher")
    refused(capsys, ["train", config], *words)
    assert not (tmp_path / "runs").exists()


def test_a_cache_of_another_version_of_the_dataset_is_refused_and_kept(capsys, shard, cache):
    assert_works(shard, cache)
    whole, times = shard.read_bytes(), (shard.stat().st_atime_ns, shard.stat().st_mtime_ns)
    write_tar(shard, numbered(SAMPLES + 1))
    words = ("the cache holds .*train.tar with fingerprint", "now has", "remove the directory")
    refused(capsys, stage(shard, cache), *words)
    with pytest.raises(OtherDatasetError):
        make(str(shard), cache)
    shard.write_bytes(whole)
    os.utime(shard, ns=times)
    with make(str(shard), cache) as loader:
        assert rows_of(loader) == GOOD
        assert loader.stats()["staging_s"] == 0, "what was staged is still there"


def test_a_cache_in_use_is_shared_by_those_who_only_read(capsys, shard, cache):
    with make(str(shard), cache) as loader:
        assert_works(shard, cache)
        assert cli.main(["cache", "stage", str(shard), *FLAGS, "--cache", str(cache)]) == 0
        assert rows_of(loader) == GOOD
    assert [path.name for path in cache.glob("*/node*")] == ["node0"]


@pytest.mark.parametrize(
    ("name", "content", "word"),
    [
        ("meta.json", b"{", "meta.json: damaged"),
        ("meta.json", b'{"format": 99}', "cache format 99, this version reads 3"),
        ("meta.json", None, "the cache holds rows with fingerprint that is lost with meta.json"),
        ("heap-0.bin", 100, "heap-0.bin: is 100 bytes long, expected at least"),
    ],
)
def test_a_damaged_cache_is_refused(shard, cache, name, content, word):
    assert_works(shard, cache)
    (path,) = cache.glob(f"*/node0/{name}")
    if content is None:
        path.unlink()
    else:
        path.write_bytes(path.read_bytes()[:content] if isinstance(content, int) else content)
    with pytest.raises(CacheError, match=rf"(?s){word}.*remov"):
        with make(str(shard), cache) as loader:
            rows_of(loader)
    shutil.rmtree(path.parent)
    assert_works(shard, cache)


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("manifest.json", b""),
        ("manifest.json", b"[]"),
        ("manifest.json", None),
        ("base-*.arrow", b"ARROW1"),
        ("base-*.arrow", None),
        ("headers.npy", b"x" * 400),
        ("headers.npy", None),
        ("fixed-0.npy", b"x" * 400),
        ("fixed-0.npy", 150),
        ("fixed-0.npy", None),
    ],
)
def test_a_cache_that_cannot_say_what_it_holds_is_made_anew(shard, cache, name, content):
    """Of rows that prove themselves, and of the source."""
    assert_works(shard, cache)
    (path,) = cache.glob(f"*/node0/{name}")
    if content is None:
        path.unlink()
    else:
        path.write_bytes(path.read_bytes()[:content] if isinstance(content, int) else content)
    for _ in range(2):
        with make(str(shard), cache) as loader:
            assert rows_of(loader) == GOOD
    assert_works(shard, cache)


def test_a_report_of_the_wrong_length_is_refused_and_records_nothing(shard, cache):
    policy = Kakurenbo(0.5, drops=(), alphas=(1.0,), warmup_epochs=0)
    with make(str(shard), cache, importance=policy) as loader:
        batch = next(iter(loader))
        for wrong in (torch.tensor(1.0), torch.ones(2), torch.ones(3, 1)):
            with pytest.raises(ValueError, match=r"report: loss has shape .*, expected \(3,\)"):
                loader.report(batch, wrong)
        assert (loader._session.pool.scores["epoch"] == -1).all()
        loader.report(batch, torch.ones(3))
        loader._session.feedback.flush()
        assert (loader._session.pool.scores["epoch"] == 0).sum() == 3


class TornSource(MemorySource):
    """Fails on the first row of the second half: only one rank reads it."""

    def read(self, sample_ids, fields):
        for rows in super().read(sample_ids, fields):
            if (rows.sample_id >= 30).any():
                raise SourceError("memory: row 30 cannot be read, expected it; write it again")
            yield rows


@pytest.mark.parametrize("layout", [[1, 1], [2], [2, 2]])
def test_an_error_that_one_rank_sees_ends_all_at_once(cache, layout):
    def run(world, source):
        with make(source, cache, world=world, shuffle=shuffle.Partial(0.5)) as loader:
            return sorted(rows_of(loader))

    with pytest.raises(SourceError, match="row 30 cannot be read"):
        run_threads(thread_worlds(layout), lambda world: run(world, TornSource(60)))
    ranks = run_threads(thread_worlds(layout), lambda world: run(world, MemorySource(60)))
    assert sum(map(len, ranks)) > 0


@pytest.mark.multirank
def test_a_bad_sample_that_one_rank_reads_ends_the_job_with_its_message(shard, cache):
    write_tar(shard, [*numbered(SAMPLES - 1), ("000011.bin", b"x")])
    begin = [*launch_command("mpiexec", 2), "-m", "tonari"]
    argv = [*begin, *map(str, stage(shard, cache)), "--json"]
    status, said = run_job(argv, env=None, timeout_s=30)
    assert status not in (0, None)
    assert said.count("tonari cache: ") == 1, said
    assert "sample '000011' holds bin, expected 'cls'" in said
    assert "Traceback" not in said
    write_tar(shard, numbered(SAMPLES))
    status, said = run_job(argv, env=None, timeout_s=30)
    assert status == 0, said
    assert json.loads(said)["caches"][0]["num_missing"] == 0
    assert_works(shard, cache)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_a_gpu_that_is_not_there_is_refused_before_any_data_is_staged(tmp_path: Path) -> None:
    words = r"device is 'cuda(:1)?', but torch .* sees no GPU here; give \"cpu\", or look at"
    for device in ("cuda", "cuda:1"):
        with pytest.raises(ValueError, match=f"^Loader: {words}"):
            dataio.Loader("none", batch_size=1, fields={}, cache=tmp_path / "cache", device=device)
    with pytest.raises(ValueError, match=f"^join: {words}"), dataio.join(device="cuda"):
        pass
    with pytest.raises(ConfigError, match=f"^run.{words}"):
        check_device("cuda")
    assert not (tmp_path / "cache").exists()
