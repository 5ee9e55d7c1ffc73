"""Pictures that threads deliver without Python's lock are as any, and what is left is seen to."""

import ctypes
import gc
import io
import signal
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Callable
from concurrent.futures import TimeoutError as FutureTimeoutError
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image as Pillow

from dataio import FieldError, Image, Loader, RandomCrop, Reports, Resize, Staging, Workers
from dataio.base.errors import StateError
from dataio.base.seeding import key
from dataio.batch.unlocked import PendingPictures, UnlockedThreads
from dataio.rows import at_once
from dataio.rows.at_once import LEFT, SKIPPED, PicturesAtOnce, PicturesCall
from tests.dataio.source.shards import write_tar

pytestmark = pytest.mark.skipif(
    not PicturesAtOnce(Image("jpg"), (1, 1)).is_there,
    reason="the compiled part is not there: pip install -e '.[images]' where a compiler is",
)
KIND = Image("jpg", resize=Resize(40), crop=RandomCrop(32, padding=4), flip=0.5)
WHERE = PicturesAtOnce(KIND, (32, 32))


def compressed(number: int, form: str = "JPEG") -> bytes:
    rng = np.random.default_rng(number)
    pixels = rng.integers(0, 256, (*rng.integers(20, 90, 2).tolist(), 3), np.uint8)
    file = io.BytesIO()
    Pillow.fromarray(pixels).save(file, form)
    return file.getvalue()


def call_of(number: int) -> PicturesCall:
    """Pictures: some JPEGs, and some that are left to others, or are to be skipped."""
    rng = np.random.default_rng(number)
    num = int(rng.integers(1, 60))
    forms = ["PNG" if rng.random() < 0.1 else "JPEG" for _ in range(num)]
    made = (compressed(100 * number + n, form) for n, form in enumerate(forms))
    data = [np.frombuffer(one, np.uint8) for one in made]
    states = np.where(rng.random(num) < 0.05, SKIPPED, 0).astype(np.uint8)
    call = WHERE.call(
        np.array([one.ctypes.data for one in data], np.uint64), np.array([*map(len, data)]),
        (key(number, "pictures"), np.arange(num)), np.zeros((num, 32, 32, 3), np.uint8), states,
    )  # fmt: skip
    call.data = data
    return call


def pixels_of(call: PicturesCall) -> np.ndarray:
    return call._arrays[3]  # type: ignore[return-value]


@pytest.fixture
def threads():
    them = UnlockedThreads(3)
    yield them
    them.close()


def ignored(number: int, rows: list[int]) -> None:
    pass


def test_many_calls_by_threads_give_what_one_call_gives(threads) -> None:
    found, expected = [call_of(n) for n in range(24)], [call_of(n) for n in range(24)]
    left: list[tuple[int, int]] = []

    def put(first: int) -> Any:
        def note(number: int, rows: list[int]) -> None:
            left.extend((first + number, row) for row in rows)

        return threads.put(found[first : first + 2], note, lambda *seconds: (first, seconds))

    deliveries = [put(first) for first in range(0, 24, 2)]
    for first, delivery in zip(range(0, 24, 2), deliveries, strict=True):
        number, seconds = delivery.result(60.0)
        assert number == first
        assert delivery.done()
        assert seconds[0] > 0
        assert seconds[1] > 0
    for call in expected:
        WHERE.deliver(call)
    for one, other in zip(found, expected, strict=True):
        assert one.states.tolist() == other.states.tolist()
        assert np.array_equal(pixels_of(one), pixels_of(other))
    rows_left = [
        (number, row)
        for number, call in enumerate(expected)
        for row in np.flatnonzero(call.states == LEFT).tolist()
    ]
    assert sorted(left) == rows_left
    assert len(rows_left) > 20
    assert not threads._under_way


def test_what_is_raised_for_a_picture_that_was_left_is_raised_once_all_are_done(threads) -> None:
    def fails(number: int, rows: list[int]) -> None:
        raise FieldError(f"row {rows[0]}")

    delivery = threads.put([call_of(1), call_of(2)], fails, lambda *_: "made")
    with pytest.raises(FieldError, match="row"):
        delivery.result(60.0)
    assert delivery.done()
    assert threads.put([call_of(3)], ignored, lambda *_: "made").result(60.0) == "made"


def test_a_wait_ends_in_time_and_what_was_waited_for_stays(threads) -> None:
    go, began = threading.Event(), threading.Event()

    def hangs(number: int, rows: list[int]) -> None:
        began.set()
        assert go.wait(60.0)

    delivery = threads.put([call_of(1)], hangs, lambda *_: "made")
    assert began.wait(60.0)
    for wait in (delivery.result, delivery.exception):
        with pytest.raises(FutureTimeoutError):
            wait(0.01)
    assert not delivery.done()
    assert len(threads._under_way) == 1
    go.set()
    assert delivery.result(60.0) == "made"


def test_threads_end_with_their_owner(threads) -> None:
    def count() -> int:
        return sum(thread.name.startswith("tonari-decode-") for thread in threading.enumerate())

    assert count() == 3
    others = UnlockedThreads(2)
    others.put([call_of(1)], ignored, lambda *_: None)
    assert count() == 5
    del others
    gc.collect()
    assert count() == 3


def test_what_nobody_waits_for_does_not_stay(threads) -> None:
    call = call_of(1)
    threads.put([call], ignored, lambda *_: None)
    while call.undone:
        threads._library.tonari_wait(threads._queue, ctypes.addressof(call), 1.0)
    threads.put([call_of(2)], ignored, lambda *_: None).result(60.0)
    assert not threads._under_way


def test_what_was_put_is_delivered_also_after_a_close(threads) -> None:
    deliveries = [threads.put([call_of(n)], ignored, lambda *_: 1) for n in range(8)]
    threads.close()
    assert [delivery.result(60.0) for delivery in deliveries] == [1] * 8
    with pytest.raises(RuntimeError, match="have ended"):
        threads.put([call_of(1)], ignored, lambda *_: None)


def test_threads_may_be_collected_on_one_of_them() -> None:
    cycle: dict[str, Any] = {"threads": UnlockedThreads(2)}
    cycle["itself"], serving = cycle, threading.enumerate()[-2:]
    go = threading.Event()

    def collects(number: int, rows: list[int]) -> None:
        assert go.wait(60.0)
        gc.collect()

    cycle["threads"].put([call_of(1)], collects, lambda *_: None)
    gc.disable()
    del cycle
    go.set()
    for thread in serving:
        thread.join(60.0)
    gc.enable()
    assert not any(thread.is_alive() for thread in serving)


@pytest.fixture
def shard(tmp_path: Path) -> Callable[..., Path]:
    def write(num: int, forms: dict[int, bytes] | None = None) -> Path:
        forms = forms or {}
        path = tmp_path / f"{num}-{len(forms)}.tar"
        return write_tar(path, ((f"{n:04}.jpg", forms.get(n, compressed(n))) for n in range(num)))

    return write


def open_loader(path: Path, tmp_path: Path, **options: Any) -> Loader:
    return Loader(
        str(path), batch_size=16, fields={"image": KIND}, cache=tmp_path / f"cache-{path.stem}",
        reports=Reports(progress=False), **options,
    )  # fmt: skip


def test_threads_of_a_loader_run_no_python_for_usual_pictures(shard, tmp_path) -> None:
    calls: Counter[str] = Counter()

    def count(frame: Any, event: str, argument: object) -> None:
        calls[threading.current_thread().name.rsplit("-", 1)[0]] += 1

    threading.setprofile(count)
    found, path = [], shard(160)
    try:
        for num_epochs in (1, 4):
            with open_loader(path, tmp_path, workers=Workers(threads=2)) as loader:
                calls.clear()
                num = sum(1 for _ in loader.epochs(num_epochs) for _ in loader)
                found.append(calls["tonari-decode"])
            assert num == 10 * num_epochs
    finally:
        threading.setprofile(None)
    assert found[0] == found[1] > 0


def test_pictures_that_are_left_are_as_without_threads(shard, tmp_path, monkeypatch) -> None:
    png, broken = compressed(7, "PNG"), compressed(9)[:200]
    path = shard(64, {7: png, 40: png, 50: broken})
    options = {"on_error": "skip"}

    def batches(**more: Any) -> list[dict[str, np.ndarray]]:
        with open_loader(path, tmp_path, **options, **more) as loader:
            return [
                {name: np.asarray(value).copy() for name, value in batch.items()}
                for _ in loader.epochs(2)
                for batch in loader
            ]

    here, there = (batches(workers=Workers(threads=threads)) for threads in (0, 3))
    monkeypatch.setattr(at_once, "library", lambda: None)
    for each in (there, batches(workers=Workers(threads=3))):
        for one, other in zip(here, each, strict=True):
            for name in one:
                assert np.array_equal(one[name], other[name]), name


def test_a_picture_that_does_not_decode_is_named(shard, tmp_path) -> None:
    path = shard(64, {50: compressed(9)[:200]})
    options = {"workers": Workers(threads=2), "staging": Staging(check="none")}
    with open_loader(path, tmp_path, **options) as loader:
        batches = (batch for _ in loader.epochs(1) for batch in loader)
        with pytest.raises(FieldError, match="sample 50, field 'image'"):
            list(batches)


def test_a_loader_that_is_closed_while_a_batch_is_awaited_says_so(
    shard, tmp_path, monkeypatch
) -> None:
    with open_loader(shard(64), tmp_path, workers=Workers(threads=2)) as loader:
        wait = PendingPictures.exception

        def interrupted(self: PendingPictures[Any], timeout: float) -> BaseException | None:
            monkeypatch.setattr(PendingPictures, "exception", wait)
            loader.close()  # as a signal's handler may
            return wait(self, timeout)

        monkeypatch.setattr(PendingPictures, "exception", interrupted)
        with pytest.raises(StateError, match="closed while its loop waited"):
            list(batch for _ in loader.epochs(1) for batch in loader)


LEFT_OPEN = """
import sys
from tests.dataio.batch.test_unlocked import open_loader
from pathlib import Path
from dataio import Workers
loader = open_loader(Path(sys.argv[1]), Path(sys.argv[2]), workers=Workers(threads=2, prefetch=8))
epochs = loader.epochs(1)
next(iter(epochs))
batches = iter(loader)
batch = next(batches)
print(tuple(batch["image"].shape), flush=True)
{end}
"""


@pytest.mark.parametrize("end", ["", "raise KeyboardInterrupt"])
def test_a_process_ends_with_batches_under_way(shard, tmp_path, end) -> None:
    script = [sys.executable, "-c", LEFT_OPEN.format(end=end), str(shard(320)), str(tmp_path)]
    ended = subprocess.run(script, capture_output=True, text=True, timeout=120, check=False)
    assert ended.stdout.strip() == "(16, 3, 32, 32)", ended.stderr
    assert ended.returncode == (-signal.SIGINT if end else 0), ended.stderr
