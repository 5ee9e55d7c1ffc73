"""What lies in this node's page cache, put there and put out of it for real."""

import importlib
import os
import select
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tonari.bench.errors import BenchError
from tonari.bench.storage.site import kernel
from tonari.bench.storage.site.evidence import CacheVerdict, Watch, evict, judge, resident_bytes
from tonari.bench.storage.site.kernel import cachestat_pages, mincore_pages
from tonari.bench.storage.site.site import Site, describe_site

MIB = 1 << 20
ONE_FILE = Path(__file__).parent / "one_file.py"

Mounted = Callable[..., Path]


@pytest.fixture
def on_disk(tmp_path: Path) -> Path:
    """A directory on a filesystem with a block device below it."""
    if describe_site(tmp_path).name not in ("ext4", "xfs", "btrfs"):
        pytest.skip("temporary files do not lie on a disk's filesystem")
    return tmp_path


@pytest.fixture
def fuse(tmp_path: Path) -> Iterator[Mounted]:
    """Mount a filesystem of one file with these options; gives the file."""
    try:
        importlib.import_module("mfusepy")
    except (ImportError, OSError) as absent:
        # It also looks for the system's libfuse.
        pytest.skip(f"no FUSE for Python: {absent}")
    if not os.access("/dev/fuse", os.R_OK | os.W_OK) or shutil.which("fusermount3") is None:
        pytest.skip("no /dev/fuse for this user, or no fusermount3")
    started: list[tuple[Path, subprocess.Popen[bytes]]] = []

    def mount(*options: str) -> Path:
        point = tmp_path / f"mounted{len(started)}"
        point.mkdir()
        program = [sys.executable, str(ONE_FILE), str(point), str(MIB), *options]
        started.append((point, subprocess.Popen(program)))
        wait_for_mount(point)
        return point / "data"

    yield mount
    for point, process in started:
        subprocess.run(["fusermount3", "-u", str(point)], check=False)
        process.wait(timeout=20)


def wait_for_mount(point: Path) -> None:
    with open("/proc/self/mountinfo") as table:
        changes = select.poll()
        # The kernel reports a changed table so.
        changes.register(table, select.POLLERR | select.POLLPRI)
        while str(point) not in table.read():
            assert changes.poll(20_000), f"nothing was mounted at {point}"
            table.seek(0)


def filled(path: Path, num_bytes: int) -> Path:
    path.write_bytes(os.urandom(num_bytes))
    return path


def read(path: Path) -> int:
    return len(path.read_bytes())


def verdict_of(path: Path, site: Site, *, cold: bool) -> CacheVerdict:
    with Watch([path], site, cold=cold) as watch:
        asked = read(path)
    return judge(watch.evidence(asked), site)


def test_a_planted_warm_file_is_warm_and_an_evicted_one_cold_on_a_disk(on_disk):
    file, site = filled(on_disk / "file", 4 * MIB), describe_site(on_disk)
    read(file)
    assert verdict_of(file, site, cold=False).state == "warm"
    assert verdict_of(file, site, cold=True).state == "cold"
    assert verdict_of(file, site, cold=False).state == "warm"


def test_what_is_half_in_memory_is_neither(on_disk):
    file, site = filled(on_disk / "file", 4 * MIB), describe_site(on_disk)
    evict([file])
    with file.open("rb", buffering=0) as opened:
        os.posix_fadvise(opened.fileno(), 0, 0, os.POSIX_FADV_RANDOM)
        opened.read(2 * MIB)
    assert resident_bytes([file]).bytes_resident == 2 * MIB
    assert verdict_of(file, site, cold=False).state == "unknown"


def test_a_file_of_holes_is_not_called_cold(on_disk):
    file, site = on_disk / "holes", describe_site(on_disk)
    with file.open("wb") as opened:
        opened.truncate(4 * MIB)
    verdict = verdict_of(file, site, cold=True)
    assert verdict.state == "unknown"
    assert "0.0% of what was asked for was fetched" in verdict.why


def test_evicting_takes_what_was_just_written(on_disk):
    files = [filled(on_disk / f"file{number}", 100_000) for number in range(5)]
    assert resident_bytes(files).bytes_resident == 500_000
    evict(files)
    assert resident_bytes(files).bytes_resident == 0


def test_both_calls_count_the_same(on_disk):
    file = filled(on_disk / "file", 10 * 4096 + 1)
    told = resident_bytes([file])
    mapped = resident_bytes([file], cachestat=lambda descriptor: None)
    assert told.bytes_resident == mapped.bytes_resident == told.bytes_in_files == 10 * 4096 + 1
    assert mapped.said_by == "mincore"
    evict([file])
    assert resident_bytes([file], cachestat=lambda descriptor: None).bytes_resident == 0


def test_a_large_file_is_mapped_in_windows(on_disk, monkeypatch):
    monkeypatch.setattr(kernel, "WINDOW_BYTES", 64 * 1024)
    file = filled(on_disk / "file", 200_000)
    evict([file])
    descriptor = os.open(file, os.O_RDONLY)
    try:
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_RANDOM)
        os.pread(descriptor, 4 * 4096, 3 * 64 * 1024 - 4096)
        assert mincore_pages(descriptor) == 2
    finally:
        os.close(descriptor)


def test_a_kernel_without_cachestat_says_so(monkeypatch, tmp_path):
    # No call has this number.
    monkeypatch.setattr(kernel, "CACHESTAT", 100_000)
    file = filled(tmp_path / "file", 4096)
    descriptor = os.open(file, os.O_RDONLY)
    try:
        assert cachestat_pages(descriptor) is None
    finally:
        os.close(descriptor)
    assert resident_bytes([file]).said_by == "mincore"


def test_where_neither_call_tells_nothing_is_claimed(tmp_path):
    files = [filled(tmp_path / "file", 4096), filled(tmp_path / "other", 4096)]
    found = resident_bytes(files, cachestat=lambda _: None, mincore=lambda _: None)
    assert (found.bytes_in_files, found.bytes_resident, found.said_by) == (8192, None, "none")


def test_one_file_that_cannot_be_seen_hides_the_sum(tmp_path):
    files = [filled(tmp_path / f"file{number}", 4096) for number in range(3)]
    answers = iter([1, None, 1])
    found = resident_bytes(files, cachestat=lambda _: None, mincore=lambda _: next(answers))
    assert (found.bytes_resident, found.said_by) == (None, "none")


def test_mincore_is_not_asked_for_a_file_of_somebody_else(monkeypatch, tmp_path):
    # The kernel would say that all of it is in memory.
    monkeypatch.setattr("os.geteuid", lambda: tmp_path.stat().st_uid + 1)
    monkeypatch.setattr(kernel, "_may_write", lambda descriptor: False)
    file = filled(tmp_path / "file", 4096)
    assert resident_bytes([file], cachestat=lambda descriptor: None).said_by == "none"


def test_an_empty_file_is_neither_in_memory_nor_an_error(tmp_path):
    file = filled(tmp_path / "empty", 0)
    evict([file])
    for count in (cachestat_pages, lambda descriptor: None):
        found = resident_bytes([file], cachestat=count)
        assert (found.bytes_in_files, found.bytes_resident) == (0, 0)
    assert resident_bytes([]).bytes_resident == 0


@pytest.mark.parametrize("look", [evict, resident_bytes])
def test_a_file_that_vanished_is_one_message(look, tmp_path):
    with pytest.raises(BenchError, match=r"gone: .*No such file.*expected a file that stays"):
        look([tmp_path / "gone"])


@pytest.mark.skipif(not os.access("/dev/shm", os.W_OK), reason="no /dev/shm")
def test_files_in_memory_stay_there_and_are_warm():
    directory = Path("/dev/shm")
    file = filled(directory / f"tonari-test-{os.getpid()}", MIB)
    try:
        assert verdict_of(file, describe_site(directory), cold=True).state == "warm"
    finally:
        file.unlink()


@pytest.mark.skipif(os.geteuid() != 0, reason="mounts an overlay, which needs root")
def test_an_overlay_is_looked_into_by_mapping_its_files(on_disk):
    lower, upper, work, point = (on_disk / name for name in ("lower", "upper", "work", "point"))
    for directory in (lower, upper, work, point):
        directory.mkdir()
    options = f"lowerdir={lower},upperdir={upper},workdir={work}"
    mounted = subprocess.run(["mount", "-t", "overlay", "overlay", "-o", options, str(point)])
    if mounted.returncode != 0:
        pytest.skip("no overlay can be mounted here")
    try:
        file, site = filled(point / "file", MIB), describe_site(point)
        assert site.name == "overlay"
        # The other call looks at the overlay's own pages, and there are none, ever.
        assert resident_bytes([file]).said_by == "mincore"
        assert verdict_of(file, site, cold=False).state == "warm"
        assert verdict_of(file, site, cold=True).state == "cold"
    finally:
        subprocess.run(["umount", str(point)], check=True)


def test_a_fuse_file_that_the_kernel_keeps_is_cold_once_evicted_and_then_warm(fuse):
    file = fuse("auto_cache")
    site = describe_site(file.parent)
    assert (site.name, site.mount.source, site.is_shared) == ("fuse", "one_file", True)
    cold = verdict_of(file, site, cold=True)
    assert (cold.state, "nor one in the client's process" in cold.why) == ("cold", True)
    assert verdict_of(file, site, cold=False).state == "warm"


@pytest.mark.parametrize("option", [[], ["direct_io"]])
def test_a_fuse_file_that_the_kernel_does_not_keep_is_never_warm(fuse, option):
    file = fuse(*option)
    site = describe_site(file.parent)
    read(file)
    assert verdict_of(file, site, cold=False).state != "warm"


def test_what_fails_within_a_watch_is_not_covered_by_it(on_disk):
    file = filled(on_disk / "file", 4096)

    def phase() -> None:
        with Watch([file], describe_site(on_disk), cold=False):
            file.unlink()
            raise RuntimeError("in the phase")

    with pytest.raises(RuntimeError, match="in the phase"):
        phase()
