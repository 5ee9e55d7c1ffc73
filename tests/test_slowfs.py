"""The slow filesystem keeps its limits, and counts what was done."""

import contextlib
import os
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from tests.slowfs import ROOT, slowfs, what_is_missing

pytestmark = pytest.mark.skipif(bool(what_is_missing()), reason=what_is_missing())
MIB = 1 << 20


@pytest.fixture
def source(tmp_path: Path) -> Path:
    directory = tmp_path / "source"
    directory.mkdir()
    return directory


def took(work) -> float:
    started = time.perf_counter()
    work()
    return time.perf_counter() - started


def read_all(paths: list[Path]) -> None:
    threads = [threading.Thread(target=path.read_bytes) for path in paths]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


@pytest.mark.parametrize("num_mounts", [1, 2])
def test_readers_on_one_mount_or_two_get_the_limit_together_and_no_more(
    source: Path, num_mounts: int
) -> None:
    data = os.urandom(16 * MIB // num_mounts)
    (source / "file").write_bytes(data)
    rates: list[float] = []
    with slowfs(source, bytes_per_s=20e6, num_mounts=num_mounts, cache="direct_io") as slow:
        paths = [mount / "file" for mount in slow.paths]
        # A busy machine may take longer, never less.
        while len(rates) < 3 and max(rates, default=0) < 19.5e6:
            rates.append(len(paths) * len(data) / took(lambda: read_all(paths)))
        counts = [slow.counts(mount)["read_bytes"] for mount in range(num_mounts)]
    assert max(rates) == pytest.approx(20e6, rel=0.05)
    assert counts == [len(rates) * len(data)] * num_mounts


def stat_all(directory: Path, names: range) -> None:
    for name in names:
        (directory / str(name)).stat()


def test_a_read_takes_its_latency_and_no_more_than_a_millisecond_above(source: Path) -> None:
    (source / "file").write_bytes(bytes(64 * 4096))
    with slowfs(source, read_latency_s=0.005, cache="direct_io") as slow:
        with open(slow.path / "file", "rb", buffering=0) as file:
            reads = [took(lambda: os.pread(file.fileno(), 4096, 0)) for _ in range(40)]
    # A busy machine makes the longer ones.
    assert 0.005 <= min(reads) < 0.006


def test_metadata_operations_take_their_rate_and_latency(source: Path) -> None:
    for number in range(60):
        (source / str(number)).touch()
    with slowfs(source, metadata_ops_per_s=100) as slow:
        before = slow.counts()["getattr"]
        tenths = [took(lambda n=n: stat_all(slow.path, range(n, n + 20))) for n in (0, 20, 40)]
        assert slow.counts()["getattr"] - before == 60
        assert 20 / min(tenths) == pytest.approx(100, rel=0.1)
    with slowfs(source, metadata_latency_s=0.005) as slow:
        stats = [took(lambda n=n: (slow.path / str(n)).stat()) for n in range(40)]
        assert 0.005 <= min(stats) < 0.006


def test_counts_equal_what_was_done(source: Path) -> None:
    with slowfs(source, cache="direct_io") as slow:
        directory = slow.path / "directory"
        directory.mkdir()
        with open(directory / "file", "wb", buffering=0) as file:
            file.write(b"x" * 5000)
            os.fsync(file.fileno())
        with open(directory / "file", "rb", buffering=0) as file:
            assert [len(file.read(3000)) for _ in range(3)] == [3000, 2000, 0]
        os.rename(directory / "file", directory / "moved")
        assert [path.name for path in directory.iterdir()] == ["moved"]
        (directory / "moved").unlink()
        directory.rmdir()
        counts = slow.counts()
    assert list(source.iterdir()) == []
    wanted = dict.fromkeys("mkdir create write fsync open readdir rename unlink rmdir".split(), 1)
    wanted |= {"read_bytes": 5000, "written_bytes": 5000}
    assert {kind: counts[kind] for kind in wanted} == wanted
    # At its end a read is asked for once more, or not, as the kernel knows the size.
    assert counts["read"] in (2, 3)


@pytest.mark.parametrize(
    ("cache", "again"), [("auto_cache", 0), ("kernel_cache", 0), ("direct_io", MIB)]
)
def test_what_was_read_once_is_read_again_as_the_cache_says(
    source: Path, cache, again: int
) -> None:
    (source / "file").write_bytes(os.urandom(MIB))
    with slowfs(source, cache=cache, num_mounts=2) as slow:
        (slow.path / "file").read_bytes()
        before = slow.counts()["read_bytes"]
        assert before == MIB
        (slow.path / "file").read_bytes()
        assert slow.counts()["read_bytes"] - before == again
        # The other mount has pages of its own.
        (slow.paths[1] / "file").read_bytes()
        assert slow.counts(1)["read_bytes"] == MIB


def test_nothing_is_left_after_an_error_or_the_end_of_who_mounted_it(source: Path) -> None:
    (source / "file").write_bytes(b"x")
    with contextlib.suppress(ZeroDivisionError), slowfs(source) as slow:
        held = os.open(slow.path / "file", os.O_RDONLY)
        _ = 1 / 0
    os.close(held)
    assert not slow.path.parent.exists()
    program = (
        "import sys; from pathlib import Path; from tests.slowfs import slowfs\n"
        f"with slowfs(Path({str(source)!r})) as slow:\n"
        "    print(slow.path, flush=True); sys.stdin.read()"
    )
    command = [sys.executable, "-c", program]
    with subprocess.Popen(
        command, cwd=ROOT, env={**os.environ, "TMPDIR": str(source.parent)}, text=True,
        stdin=subprocess.PIPE, stdout=subprocess.PIPE,
    ) as user:  # fmt: skip
        assert user.stdout is not None
        mount = user.stdout.readline().strip()
        assert mount in Path("/proc/mounts").read_text()
        user.kill()
    deadline = time.monotonic() + 10
    while mount in Path("/proc/mounts").read_text():
        assert time.monotonic() < deadline
    assert (source / "file").exists()


def test_what_cannot_be_mounted_is_said(source: Path) -> None:
    wrong = slowfs(source, cache="no_such_option")  # type: ignore[arg-type]
    with pytest.raises(RuntimeError, match="its process ended with"), wrong:
        pass
