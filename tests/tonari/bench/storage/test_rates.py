"""What the patterns measure of a filesystem whose limits are known."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest

from tonari.bench.storage.patterns.files import OwnFiles, footprint
from tonari.bench.storage.patterns.patterns import READS, FilePart, MetadataStorm, Pattern
from tonari.bench.storage.patterns.threads import Deadline, TimedReads
from tonari.bench.storage.results.timing import summarise

slow = pytest.importorskip("tests.slowfs")
pytestmark = pytest.mark.skipif(bool(slow.what_is_missing()), reason=slow.what_is_missing())

Counts = Callable[[], dict[str, int]]

METADATA = ("getattr", "open", "create", "readdir", "unlink")


@contextmanager
def mounted(
    tmp_path: Path, *, size: int, sample: int, **limits: object
) -> Iterator[tuple[OwnFiles, Counts]]:
    """Show files through a slow mount that has not seen them yet."""
    spread = footprint(size, sample_bytes=sample, world_size=1)
    OwnFiles(tmp_path / "own", rank=0, theirs=0, footprint=spread).write(0)
    with slow.slowfs(tmp_path, **limits) as directory:
        root = directory.paths[0] / "own"
        yield OwnFiles(root, rank=0, theirs=0, footprint=spread), directory.counts


def run(pattern: Pattern, files: OwnFiles, threads: int) -> TimedReads:
    rng = np.random.default_rng(0)
    part = FilePart(client=0, clients=1, threads=threads, direct=False, rng=rng)
    return pattern.run(files, part, until=Deadline(60), least_s=0)


@pytest.mark.parametrize("name", ["sequential_shard", "random_record"])
def test_bandwidth_is_the_bucket_s_within_a_twentieth(tmp_path, name):
    with mounted(tmp_path, size=16 << 20, sample=128 << 10, bytes_per_s=5e6) as (files, _):
        timed = run(READS[name], files, 2)
    assert timed.num_read / timed.seconds == pytest.approx(5e6, rel=0.05)


def test_the_median_latency_is_the_filesystem_s_within_a_tenth(tmp_path):
    # Long beside what a busy machine takes to wake the threads of both
    with mounted(
        tmp_path, size=2 << 20, sample=32 << 10, read_latency_s=0.05, cache="direct_io"
    ) as (files, _):
        timed = run(READS["random_record"], files, 1)
    read = summarise("read", [timed.ops["read"]])
    assert 0.050 <= read.p50_s <= 0.055


def test_the_metadata_rate_is_the_filesystem_s_within_a_tenth(tmp_path):
    with mounted(tmp_path, size=1 << 20, sample=4096, metadata_ops_per_s=100) as (
        files,
        counted_now,
    ):
        before = counted_now()
        timed = run(MetadataStorm(), files, 2)
        after = counted_now()
    made = sum(len(timed.ops[name]) for name in ("list", "stat", "open", "create", "remove"))
    counted = sum(after[kind] - before[kind] for kind in METADATA)
    assert counted / timed.seconds == pytest.approx(100, rel=0.1)
    assert made <= counted
