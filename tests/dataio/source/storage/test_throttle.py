"""The bucket is one for all processes: their bytes add up, and take the time they must."""

import multiprocessing
import os
import signal
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from dataio.source import Storage, Throttle
from dataio.source.storage.throttle import BURST_S


@dataclass
class StandingClock:
    """A clock that stands still: whoever would wait is noted."""

    now_s: float = 100.0
    waits_s: list[float] = field(default_factory=list)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> StandingClock:
    clock = StandingClock()
    monkeypatch.setattr("dataio.source.storage.throttle.time.monotonic", lambda: clock.now_s)
    monkeypatch.setattr("dataio.source.storage.throttle.time.sleep", clock.waits_s.append)
    return clock


def take_many(throttle: Throttle, num_bytes: int, times: int) -> None:
    for _ in range(times):
        throttle.take(num_bytes)


def hold(path: str, locked: "multiprocessing.synchronize.Event") -> None:
    with Throttle(path)._locked():
        locked.set()
        time.sleep(600)


def test_processes_share_the_bandwidth_and_the_count(tmp_path: Path) -> None:
    throttle = Throttle(str(tmp_path / "bucket"), bytes_per_s=1e6)
    # Spawned: the configuration travels, and nothing of it is lost on the way.
    context = multiprocessing.get_context("spawn")
    throttle.take(0)
    started = time.monotonic()
    processes = [context.Process(target=take_many, args=(throttle, 7919, 19)) for _ in range(2)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(60)
        assert process.exitcode == 0
    elapsed_s = time.monotonic() - started
    assert throttle.total_bytes == 2 * 19 * 7919
    assert elapsed_s >= 2 * 19 * 7919 / 1e6 - 0.02


def test_threads_share_it_too(tmp_path: Path, clock: StandingClock) -> None:
    throttle = Throttle(str(tmp_path / "bucket"), bytes_per_s=1e6)
    with ThreadPoolExecutor(4) as threads:
        list(threads.map(lambda _: throttle.take(10_000), range(20)))
    # What the burst gives at once takes no time.
    waits_s = [round(wait_s, 9) for wait_s in sorted(clock.waits_s) if wait_s > 1e-9]
    assert waits_s == [round(number / 100 - BURST_S, 9) for number in range(3, 21)]
    assert throttle.total_bytes == 200_000


def test_latency_is_paid_by_every_request_side_by_side(
    tmp_path: Path, clock: StandingClock
) -> None:
    throttle = Throttle(str(tmp_path / "bucket"), latency_s=0.05)
    with ThreadPoolExecutor(8) as threads:
        list(threads.map(lambda _: throttle.take(0), range(8)))
    assert clock.waits_s == pytest.approx([0.05] * 8)


def test_a_limit_keeps_the_rate_and_costs_a_slow_storage_nothing(
    tmp_path: Path, clock: StandingClock
) -> None:
    throttle = Throttle(str(tmp_path / "bucket"), bytes_per_s=4 << 20, spaces_only=True)
    # Sixteen threads of two ranks ask at once: one after the other, a second apart.
    for _ in range(16):
        throttle.take(4 << 20)
    assert clock.waits_s == pytest.approx([number - BURST_S for number in range(1, 16)])
    # A storage that takes as long as the limit is never waited for.
    clock.waits_s.clear()
    for second in range(200, 220):
        clock.now_s = second
        throttle.take(4 << 20)
    assert clock.waits_s == []


def test_zero_is_off_but_counts(tmp_path: Path, clock: StandingClock) -> None:
    throttle = Throttle(str(tmp_path / "bucket"))
    assert throttle.total_bytes == 0
    throttle.take(10**12)
    assert clock.waits_s == []
    assert throttle.total_bytes == 10**12


def test_storage_takes_what_it_reads(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(b"x" * 1000)
    throttle = Throttle(str(tmp_path / "bucket"))
    storage = Storage(throttle)
    with storage.open(str(tmp_path / "a")) as file:
        file.read_at(900, 500)
    assert throttle.total_bytes == storage.bytes_read == 100


def test_a_killed_owner_gives_the_bucket_back(tmp_path: Path) -> None:
    path = str(tmp_path / "bucket")
    context = multiprocessing.get_context("spawn")
    locked = context.Event()
    process = context.Process(target=hold, args=(path, locked))
    process.start()
    assert locked.wait(60)
    assert process.pid is not None
    os.kill(process.pid, signal.SIGKILL)
    process.join(60)
    Throttle(path).take(5)
    assert Throttle(path).total_bytes == 5


def test_negative_numbers_are_refused() -> None:
    with pytest.raises(ValueError, match="Throttle: bytes_per_s is -1, expected a number >= 0"):
        Throttle("x", bytes_per_s=-1)
    with pytest.raises(ValueError, match="latency_s"):
        Throttle("x", latency_s=float("nan"))
