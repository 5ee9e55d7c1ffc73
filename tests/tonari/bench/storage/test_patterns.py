import os
from collections import Counter
from functools import partial
from pathlib import Path

import numpy as np
import pytest

from tonari.bench.errors import BenchError
from tonari.bench.storage.patterns.calls import TimedCalls, takes_direct
from tonari.bench.storage.patterns.files import OwnFiles, footprint
from tonari.bench.storage.patterns.measure import dataset_files
from tonari.bench.storage.patterns.patterns import (
    READS,
    CheckpointBurst,
    FilePart,
    MetadataStorm,
    PatternFiles,
)
from tonari.bench.storage.patterns.threads import Deadline, ReadTask, run_tasks

KIB = 1 << 10


@pytest.fixture
def files(tmp_path):
    spread = footprint(256 * KIB, sample_bytes=8 * KIB, world_size=2)
    ranks = [
        OwnFiles(tmp_path / "own", rank=rank, theirs=1 - rank, footprint=spread) for rank in (0, 1)
    ]
    for own in ranks:
        own.write(0)
    return ranks[0]


def part(client=0, clients=1, threads=1, direct=False):
    rng = np.random.default_rng(3)
    return FilePart(client=client, clients=clients, threads=threads, direct=direct, rng=rng)


@pytest.fixture
def read(monkeypatch):
    """Notes the reads that are made, by file and offset."""
    made: Counter[tuple[str, int, int]] = Counter()
    preadv = os.preadv

    def noted(descriptor, views, offset):
        path = Path(f"/proc/self/fd/{descriptor}").readlink()
        made[str(path), offset, len(views[0])] += 1
        return preadv(descriptor, views, offset)

    monkeypatch.setattr(os, "preadv", noted)
    return made


def bytes_of(made, name):
    """Which bytes of a file were read, how often."""
    times: Counter[int] = Counter()
    for (path, offset, length), count in made.items():
        if path.endswith(name):
            for block in range(offset, offset + length, 8 * KIB):
                times[block] += count
    return times


@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize("name", READS)
def test_every_byte_is_read_once_by_all_clients_together(files, read, name, threads):
    pattern = READS[name]
    for client in (0, 1):
        own = OwnFiles(files.root, rank=client, theirs=1 - client, footprint=files.footprint)
        given = part(client, 2, threads)
        timed = pattern.run(own, given, until=Deadline(60), least_s=0)
        assert timed.whole
        assert timed.num_read == timed.num_bytes
    if name == "file_per_sample":
        assert sum(read.values()) == 2 * files.footprint.num_samples
        return
    times = bytes_of(read, "shard-0")
    assert set(times) == set(range(0, files.footprint.shard_bytes, 8 * KIB))
    # Both clients read all of one shard, share it, or read another one each.
    assert set(times.values()) == {2 if name == "many_readers" else 1}
    others = bytes_of(read, "shard-1")
    assert not others if name in ("strided", "many_readers") else set(others) == set(times)


def test_a_client_reads_what_the_other_rank_wrote(files):
    for name in ("file_per_sample", "sequential_shard", "random_record"):
        for path in READS[name].paths(files, part()):
            assert "-1" in str(path.relative_to(files.root))


def test_opening_stat_reading_and_closing_a_sample_are_timed_apart(files):
    timed = READS["file_per_sample"].run(files, part(threads=2), until=Deadline(60), least_s=0)
    assert {name: len(seconds) for name, seconds in timed.ops.items()} == dict.fromkeys(
        ("open", "stat", "read", "close"), files.footprint.num_samples
    )
    assert all((seconds > 0).all() for seconds in timed.ops.values())


def test_a_short_pattern_goes_on_for_the_least_time_and_counts_all_that_it_read(files):
    timed = READS["random_record"].run(files, part(threads=2), until=Deadline(60), least_s=0.05)
    assert timed.seconds >= 0.05
    assert timed.num_read > files.footprint.shard_bytes
    assert timed.num_read == len(timed.ops["read"]) * files.footprint.sample_bytes


def test_nothing_is_begun_after_the_deadline(files):
    until = Deadline(60)
    until.stop()
    timed = READS["file_per_sample"].run(files, part(), until=until, least_s=0)
    assert (timed.num_bytes, timed.whole) == (0, False)


def test_a_checkpoint_is_written_and_synced_beside_reads_then_removed(files):
    timed = CheckpointBurst().run(files, part(threads=2), until=Deadline(60), least_s=0)
    spread = files.footprint
    assert timed.num_bytes == spread.shard_bytes + spread.checkpoint_bytes
    assert timed.num_read == spread.shard_bytes
    assert len(timed.ops["fsync"]) == len(timed.ops["checkpoint"]) == 1
    assert timed.ops["checkpoint"][0] >= timed.ops["write"].sum() + timed.ops["fsync"].sum() - 1e-4
    assert not files.checkpoint.exists()


def test_a_storm_lists_stats_opens_makes_and_removes_and_reads_nothing(files, read):
    timed = MetadataStorm().run(files, part(threads=2), until=Deadline(60), least_s=0)
    count = files.footprint.num_samples
    found = {name: len(seconds) for name, seconds in timed.ops.items()}
    assert found == {"list": 2, "stat": count, "open": count, "close": count, "create": count,
                     "remove": count}  # fmt: skip
    assert timed.num_bytes == 0
    assert not read
    assert not [*files.storm.iterdir()]


def test_files_are_whole_and_repeat_nothing(files):
    blocks = set()
    for path in [files.shard(0), files.shard(1), *files.samples(0), *files.samples(1)]:
        data = path.read_bytes()
        assert path.stat().st_blocks * 512 >= len(data), "no holes"
        blocks |= {data[at : at + 4096] for at in range(0, len(data), 4096)}
    # Half of the 64 samples' bytes: the other quarter is the checkpoint's.
    assert (
        len(blocks) == 2 * (files.footprint.total_bytes - files.footprint.checkpoint_bytes) / 4096
    )


def test_direct_reads_go_by_the_page_cache_where_the_filesystem_takes_them(files):
    if not takes_direct(files.shard(0)):
        pytest.skip("this filesystem takes no O_DIRECT")
    timed = READS["random_record"].run(files, part(direct=True), until=Deadline(60), least_s=0)
    assert timed.num_read == files.footprint.shard_bytes


def test_a_filesystem_that_takes_no_direct_reads_is_found_out(tmp_path):
    # Not even opened with it.
    assert not takes_direct(tmp_path)


def test_an_error_in_one_thread_ends_all_and_is_raised(files):
    files.samples(1)[5].unlink()
    with pytest.raises(FileNotFoundError, match="000005"):
        READS["file_per_sample"].run(files, part(threads=3), until=Deadline(60), least_s=0)


def test_a_file_that_became_shorter_is_named(files):
    os.truncate(files.shard(1), 8 * KIB)
    with pytest.raises(BenchError, match="shard-1: ended at 8192 bytes"):
        READS["sequential_shard"].run(files, part(), until=Deadline(60), least_s=0)


def test_threads_begin_together_and_each_is_timed_from_there():
    order: list[str] = []

    def work(calls, name):
        order.append(name)
        yield

    tasks = [ReadTask(calls=TimedCalls(0), work=partial(work, name=name)) for name in "ab"]
    timed = run_tasks(tasks, until=Deadline(60))
    assert sorted(order) == ["a", "b"]
    assert len(timed.seconds_of_thread) == 2
    assert min(timed.seconds_of_thread) >= 0


def test_the_default_footprint_is_64_mib_a_rank_and_a_gib_in_all():
    one = footprint(None, sample_bytes=128 * KIB, world_size=1)
    assert one.total_bytes == 64 << 20
    many = footprint(None, sample_bytes=128 * KIB, world_size=64)
    assert many.total_bytes * 64 == 1 << 30


@pytest.mark.parametrize(("size", "sample"), [(3 * 8192, 8192), (1 << 20, 1000)])
def test_sizes_that_do_not_divide_are_refused(size, sample):
    with pytest.raises(ValueError, match="must be"):
        footprint(size, sample_bytes=sample, world_size=1)


def test_a_dataset_of_shards_is_read_forwards_in_the_loader_s_requests(files, read, tmp_path):
    for number in range(5):
        (tmp_path / f"train-{number}.tar").write_bytes(bytes(9 << 20))
    listed = dataset_files([str(tmp_path / "train-{0..4}.tar")])
    assert [path.name for path in listed] == [f"train-{number}.tar" for number in range(5)]
    pattern = PatternFiles(listed, 1 << 30)
    for client in (0, 1):
        pattern.run(files, part(client, 2), until=Deadline(60), least_s=0)
    assert sorted({(offset, length) for _, offset, length in read}) == [
        (0, 8 << 20),
        (8 << 20, 1 << 20),
    ]
    assert sum(read.values()) == 10


def test_a_dataset_of_files_is_read_whole_up_to_the_size(files, read, tmp_path):
    folder = tmp_path / "images"
    for name in ("cat/1.jpg", "cat/2.jpg", "dog/1.jpg"):
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(bytes(1000))
    listed = dataset_files([str(folder)])
    assert [str(path.relative_to(folder)) for path in listed] == [
        "cat/1.jpg",
        "cat/2.jpg",
        "dog/1.jpg",
    ]
    PatternFiles(listed, 1500).run(files, part(), until=Deadline(60), least_s=0)
    assert sum(length * count for (_, _, length), count in read.items()) == 2000


def test_a_dataset_that_is_no_file_is_refused(tmp_path):
    with pytest.raises(BenchError, match="is a URL"):
        dataset_files(["s3://bucket/train-0.tar"])
    with pytest.raises(BenchError, match="holds no file"):
        dataset_files([str(tmp_path)])
