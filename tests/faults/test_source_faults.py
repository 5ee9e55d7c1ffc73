"""A source that fails, stalls or changes: every byte all the same, or one clear message."""

import errno
import itertools
import os
import shutil
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import fsspec
import numpy as np
import pytest

from dataio.base.errors import SourceError
from dataio.base.filesystem import Filesystem
from dataio.rows.fields import Field, Int
from dataio.source import Retry, Storage, StorageFile, open_source
from dataio.source.storage.deadline import CallDeadline
from dataio.source.storage.handle import Status
from dataio.source.storage.retry import FIRST_WAIT_S, LONGEST_WAIT_S
from dataio.world import World, run_threads, thread_worlds
from tests.dataio.source.shards import numbered, read_all, write_tar

FIELDS: dict[str, Field] = {"label": Int("cls")}
DATA = bytes(range(256)) * 40


class FakeTime:
    """A clock that only moves when someone sleeps."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self.waits_s: list[float] = []

    def clock(self) -> float:
        return self.now_s

    def sleep(self, duration_s: float) -> None:
        self.now_s += duration_s
        self.waits_s.append(duration_s)

    def retry(self, *, read_timeout_s: float = 60.0, retry_s: float = 120.0) -> Retry:
        rng = np.random.Generator(np.random.Philox(0))
        return Retry(
            read_timeout_s=read_timeout_s,
            retry_s=retry_s,
            clock=self.clock,
            sleep=self.sleep,
            rng=rng,
        )


Read = Callable[[int, int], bytes]


def whole(offset: int, length: int) -> bytes:
    return DATA[offset : offset + length]


class FakeMedium:
    """Reads as it is told, one way after the other; at last everything works."""

    opened = Status(len(DATA), 1)

    def __init__(self, *ways: Read, watched: bool = False, now: Status = opened) -> None:
        self.ways = list(ways)
        self.watched = watched
        self.changes_in_place = not watched
        self.now = now
        self.requests: list[tuple[int, int]] = []
        self.num_renewed = 0

    def status(self) -> Status:
        return self.now

    def pread(self, offset: int, length: int) -> bytes:
        self.requests.append((offset, length))
        return (self.ways.pop(0) if self.ways else whole)(offset, length)

    def renew(self) -> None:
        self.num_renewed += 1

    def close(self) -> None:
        return None


def fails(error: BaseException) -> Read:
    def read(offset: int, length: int) -> bytes:
        raise error

    return read


def opened(medium: FakeMedium, time: FakeTime, **options: float) -> tuple[StorageFile, Storage]:
    storage = Storage(retry=time.retry(**options))
    return StorageFile("shards/a.tar", medium, storage), storage


@pytest.mark.parametrize(
    "error",
    [
        OSError(errno.EIO, "Input/output error"),
        OSError(errno.ESTALE, "Stale file handle"),
        OSError(errno.EAGAIN, "Resource temporarily unavailable"),
        OSError(errno.ESHUTDOWN, "Cannot send after transport endpoint shutdown"),
        ConnectionResetError("reset"),
        TimeoutError("slow"),
    ],
)
@pytest.mark.parametrize("watched", [False, True])
def test_what_may_pass_is_tried_again(error: OSError, watched: bool) -> None:
    medium, time = FakeMedium(*[fails(error)] * 3, watched=watched), FakeTime()
    file, storage = opened(medium, time)
    assert file.read_at(100, 1000) == DATA[100:1100]
    assert (storage.num_retries, storage.bytes_read) == (3, 1000)
    assert medium.requests == [(100, 1000)] * 4
    assert medium.num_renewed == 3


def test_waits_grow_and_are_drawn_and_end(caplog: pytest.LogCaptureFixture) -> None:
    medium, time = FakeMedium(*[fails(OSError(errno.EIO, "bad"))] * 1000), FakeTime()
    file, storage = opened(medium, time, retry_s=200)
    with pytest.raises(SourceError) as caught:
        file.read_at(4096, 1000)
    assert str(caught.value).startswith("shards/a.tar: reading 1000 bytes at 4096 failed ")
    for part in (" times in 1", "bad", "expected", "within 200 s; check that the storage is up"):
        assert part in str(caught.value)
    bounds = [min(FIRST_WAIT_S * 2**i, LONGEST_WAIT_S) for i in range(len(time.waits_s))]
    assert all(wait_s <= bound for wait_s, bound in zip(time.waits_s, bounds, strict=True))
    assert len({round(wait_s, 6) for wait_s in time.waits_s}) == len(time.waits_s)
    assert 190 - LONGEST_WAIT_S <= time.now_s <= 200
    assert storage.bytes_read == 0
    assert "shards/a.tar: reading 1000 bytes at 4096 failed" in caplog.text


@pytest.mark.parametrize("number", [errno.EACCES, errno.EISDIR, errno.EBADF])
def test_what_does_not_pass_is_raised_at_once(number: int) -> None:
    medium, time = FakeMedium(fails(OSError(number, os.strerror(number)))), FakeTime()
    file, storage = opened(medium, time)
    with pytest.raises(SourceError, match=r"reading 10 bytes at 5 failed .*check the filesystem"):
        file.read_at(5, 10)
    assert (time.waits_s, storage.num_retries, len(medium.requests)) == ([], 0, 1)


def test_a_short_read_is_read_again() -> None:
    medium, time = FakeMedium(lambda o, n: whole(o, n - 1), lambda o, n: b""), FakeTime()
    file, storage = opened(medium, time)
    assert file.read_at(0, 10_000) == DATA[:10_000]
    assert storage.num_retries == 2


def test_a_file_that_stays_short_is_refused() -> None:
    file, _ = opened(FakeMedium(*[lambda o, n: whole(o, n - 1)] * 99), FakeTime())
    with pytest.raises(
        SourceError, match=r"1 bytes at 99 failed .*last: got 0 of 1 bytes; expected"
    ):
        file.read_at(0, 100)


@pytest.mark.parametrize("watched", [False, True])
def test_an_answer_that_is_cut_goes_on_where_it_stopped(
    watched: bool, caplog: pytest.LogCaptureFixture
) -> None:
    cut = [
        lambda o, n: whole(o, 60),
        fails(ConnectionResetError("reset")),
        lambda o, n: whole(o, 7),
    ]
    medium, time = FakeMedium(*cut, watched=watched), FakeTime()
    file, storage = opened(medium, time)
    assert file.read_at(100, 1000) == DATA[100:1100]
    assert medium.requests == [(100, 1000), (160, 940), (160, 940), (167, 933)]
    assert (storage.num_retries, storage.bytes_read) == (3, 1000)
    assert "reading 1000 bytes at 100 was cut after 60 bytes; asking for the rest" in caplog.text


def test_a_server_that_sends_more_than_asked_is_refused() -> None:
    file, _ = opened(FakeMedium(lambda o, n: DATA, watched=True), FakeTime())
    with pytest.raises(SourceError, match=r"asked for 10 bytes at 5, got 10240; .*parts of a file"):
        file.read_at(5, 10)


@pytest.fixture
def hang() -> Iterator[Read]:
    """A read that does not return before the test ends."""
    release = threading.Event()

    def read(offset: int, length: int) -> bytes:
        release.wait(60)
        return b""

    yield read
    release.set()


def test_a_read_that_stalls_is_given_up_by_its_deadline(hang: Read) -> None:
    medium, time = FakeMedium(hang, watched=True), FakeTime()
    file, _ = opened(medium, time, read_timeout_s=0.02, retry_s=0)
    with pytest.raises(SourceError) as caught:
        file.read_at(512, 100)
    for part in ("shards/a.tar: reading 100 bytes at 512", "no answer in 0.02 s", "check that"):
        assert part in str(caught.value)


def test_a_stall_that_passes_costs_one_deadline(hang: Read) -> None:
    medium, time = FakeMedium(hang, watched=True), FakeTime()
    file, storage = opened(medium, time, read_timeout_s=0.02)
    assert file.read_at(512, 100) == DATA[512:612]
    assert storage.num_retries == 1


def test_a_request_without_an_answer_is_logged_once_before_it_is_given_up(monkeypatch) -> None:
    for module in ("deadline", "retry"):
        monkeypatch.setattr(f"dataio.source.storage.{module}.LATE_S", 0.01)
    is_said, said = threading.Event(), list[str]()

    def warning(words: str, *arguments: object) -> None:
        said.append(words % arguments)
        is_said.set()

    monkeypatch.setattr("dataio.source.storage.retry._log.warning", warning)
    retry = FakeTime().retry()
    for _ in range(2):
        assert retry.call(lambda _: is_said.wait(60), doing="s3://b/a: opening it", watched=True)
    expected = "s3://b/a: opening it: no answer in 0.01 s; a request is given up after 60 s, and"
    assert [words[: len(expected)] for words in said] == [expected]


def test_a_kernel_that_does_not_return_is_given_up_and_the_process_ends(tmp_path: Path) -> None:
    # Opening a pipe that nobody writes hangs in the kernel, as a file of a server that is away.
    os.mkfifo(tmp_path / "a.tar")
    program = (
        "import sys\n"
        "from dataio.base.errors import SourceError\n"
        "from dataio.source import Retry, Storage\n"
        "try:\n"
        "    Storage(retry=Retry(read_timeout_s=0.05, retry_s=0), watch=True).open(sys.argv[1])\n"
        "except SourceError as error:\n"
        "    print(error)\n"
    )
    ended = subprocess.run(
        [sys.executable, "-c", program, str(tmp_path / "a.tar")],
        capture_output=True, text=True, timeout=60, cwd=Path(__file__).parents[2],
    )  # fmt: skip
    assert (ended.returncode, ended.stderr) == (0, "")
    assert "a.tar: opening it failed once" in ended.stdout
    assert "no answer in 0.05 s" in ended.stdout


def test_files_on_a_shared_filesystem_are_watched(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write_tar(tmp_path / "a.tar", numbered(3))
    threads: set[int] = set()
    pread = os.pread

    def spy(*arguments: int) -> bytes:
        threads.add(threading.get_ident())
        return pread(*arguments)

    monkeypatch.setattr("dataio.source.storage.local.os.pread", spy)
    source = open_source(str(path))
    threads.clear()  # shards are counted by several threads
    expected = read_all(source, FIELDS)
    assert threads == {threading.get_ident()}
    threads.clear()
    shared = Filesystem("lustre", True, tmp_path, "mds@tcp")
    monkeypatch.setattr("dataio.source.storage.files.filesystem_of", lambda _: shared)
    assert read_all(open_source(str(path)), FIELDS) == expected
    assert threads
    assert threading.get_ident() not in threads


def test_a_long_read_that_is_watched_is_many_requests() -> None:
    data = bytes(40 << 20)
    medium = FakeMedium(*[lambda o, n: data[o : o + n]] * 3, watched=True)
    medium.opened = medium.now = Status(len(data), 1)
    file, _ = opened(medium, FakeTime())
    assert file.read_at(5, len(data)) == data[5:]
    assert [length for _, length in medium.requests] == [16 << 20, 16 << 20, (8 << 20) - 5]


def test_threads_read_side_by_side_and_all_is_counted() -> None:
    lost = fails(ConnectionResetError("reset"))
    medium, time = FakeMedium(*[lost, whole, whole] * 20, watched=True), FakeTime()
    file, storage = opened(medium, time)
    with ThreadPoolExecutor(8) as threads:
        parts = list(threads.map(lambda i: file.read_at(10 * i, 10), range(1024)))
    assert b"".join(parts) == DATA
    assert (storage.bytes_read, storage.num_retries) == (len(DATA), 20)


def test_a_deadline_hands_on_what_the_call_says_and_its_threads_end(
    hang: Read, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("dataio.source.storage.deadline.IDLE_S", 0.2)
    deadline = CallDeadline()
    ran: set[threading.Thread] = set()

    def answer(value: int) -> int:
        ran.add(threading.current_thread())
        return value

    for i in range(100):
        assert deadline.call(partial(answer, i), timeout_s=60) == i
    with pytest.raises(ZeroDivisionError):
        deadline.call(lambda: 1 // 0, timeout_s=60)
    with pytest.raises(TimeoutError, match=r"no answer in 0\.01 s"):
        deadline.call(lambda: hang(0, 0), timeout_s=0.01)
    hanging = set(ran)
    assert deadline.call(lambda: answer(1), timeout_s=60) == 1
    assert len(ran) == 2, "idle threads are used again; only one that hangs is left behind"
    for thread in ran - hanging:
        thread.join(60)
        assert not thread.is_alive()


@pytest.mark.parametrize("keep_size", [False, True])
def test_a_file_that_changes_while_it_is_read_is_refused(tmp_path: Path, keep_size: bool) -> None:
    path = tmp_path / "a.tar"
    path.write_bytes(DATA)
    with Storage().open(str(path)) as file:
        assert file.read_at(0, 10) == DATA[:10]
        with path.open("r+b") as other:
            other.write(b"new" if keep_size else DATA + b"more")
        os.utime(path, ns=(1, 1))
        found = "was written to at 0.000" if keep_size else "is 10244 bytes long, was 10240"
        with pytest.raises(SourceError, match=f"{found}.* when opened; expected .*start again"):
            file.read_at(10, 10)


def test_a_file_that_is_replaced_is_read_to_its_end_as_it_was(tmp_path: Path) -> None:
    path = tmp_path / "a.tar"
    path.write_bytes(DATA)
    with Storage().open(str(path)) as file:
        (tmp_path / "new").write_bytes(b"x" * len(DATA))
        (tmp_path / "new").replace(path)
        assert file.read_at(0, len(DATA)) == DATA


def test_a_stale_handle_is_opened_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "a.tar"
    path.write_bytes(DATA)
    time, pread, stale = FakeTime(), os.pread, {"inode": path.stat().st_ino}

    def read(descriptor: int, length: int, offset: int) -> bytes:
        if os.fstat(descriptor).st_ino == stale["inode"]:
            raise OSError(errno.ESTALE, "Stale file handle")
        return pread(descriptor, length, offset)

    monkeypatch.setattr("dataio.source.storage.local.os.pread", read)
    with Storage(retry=time.retry()).open(str(path)) as file:
        copy = tmp_path / "copy"
        shutil.copy2(path, copy)
        copy.replace(path)
        assert file.read_at(3, 1000) == DATA[3:1003]


def test_a_shard_that_changes_after_the_survey_is_refused(tmp_path: Path) -> None:
    path = write_tar(tmp_path / "a.tar", numbered(5))
    source = open_source(str(path))
    os.utime(path, ns=(1, 1))
    with pytest.raises(SourceError, match=r"a\.tar: was written to at .* when surveyed; expected"):
        read_all(source, FIELDS)


def test_an_object_that_changes_while_it_is_read_is_refused() -> None:
    memory = fsspec.filesystem("memory")
    memory.pipe("/faults/a", DATA)
    try:
        file = Storage().open("memory://faults/a")
        assert file.read_at(0, 10) == DATA[:10]
        memory.pipe("/faults/a", DATA[:-1])
        with pytest.raises(SourceError, match=r"memory://faults/a: .*when opened"):
            file.__exit__(None, None, None)
    finally:
        memory.rm("/faults", recursive=True)


def test_one_ranks_failing_disk_is_every_ranks_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    paths = [write_tar(tmp_path / f"{i}.tar", numbered(3)) for i in range(3)]
    bad, pread = paths[1].stat().st_ino, os.pread

    def read(descriptor: int, length: int, offset: int) -> bytes:
        if os.fstat(descriptor).st_ino == bad:
            raise OSError(errno.EIO, "Input/output error")
        return pread(descriptor, length, offset)

    monkeypatch.setattr("dataio.source.storage.local.os.pread", read)

    def work(world: World) -> str:
        storage = Storage(retry=FakeTime().retry())
        with pytest.raises(SourceError, match=r"1\.tar: .*failed .* last: .*Input/output") as error:
            open_source(str(tmp_path), world=world, storage=storage)
        return str(error.value)

    assert len(set(run_threads(thread_worlds([2, 1]), work))) == 1


def test_a_disk_that_fails_now_and_then_gives_every_sample(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write_tar(tmp_path / "a.tar", numbered(50, num_bytes=200_000))
    expected = read_all(open_source(str(path)), FIELDS)
    time, pread, calls = FakeTime(), os.pread, itertools.count()

    def read(descriptor: int, length: int, offset: int) -> bytes:
        if next(calls) % 3 == 1:
            raise OSError(errno.EIO, "Input/output error")
        return pread(descriptor, length, offset)

    monkeypatch.setattr("dataio.source.storage.local.os.pread", read)
    storage = Storage(retry=time.retry())
    assert read_all(open_source(str(path), storage=storage), FIELDS) == expected
    assert storage.num_retries > 5


def test_limits_out_of_range_are_refused() -> None:
    with pytest.raises(ValueError, match=r"Retry: read_timeout_s is 0, expected a number > 0;"):
        Retry(read_timeout_s=0, retry_s=1)
    with pytest.raises(ValueError, match="Retry: retry_s is -1, expected a number >= 0;"):
        Retry(retry_s=-1)
