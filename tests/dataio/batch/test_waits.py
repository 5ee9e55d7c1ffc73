"""What batches are waited for is said by its cause."""

import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from dataio import Image, Int, Loader, Reports, Staging, Workers
from dataio.batch.figures import CAUSES, NOT_WORTH_S, WaitCauses
from dataio.batch.shape import Shaper
from dataio.rows.decode import decode_image
from dataio.store.pool import Pool
from dataio.world import single_world
from tests.dataio import test_pictures as pictures

LABELS = {"label": Int("cls")}


def causes(**seconds: float) -> dict[str, float]:
    return seconds


def test_a_wait_is_divided_by_what_was_spent_since_the_one_before() -> None:
    waits = WaitCauses()
    waits.add(1.0, causes(decode=3.0, transform=1.0))
    waits.add(1.0, causes(decode=3.0, transform=9.0))
    waits.add(2.0, causes(decode=3.0, transform=9.0, source=0.5, disk=0.25))
    stats = waits.to_stats(batches=3)
    assert stats["wait_decode_s"] == pytest.approx(0.75)
    assert stats["wait_transform_s"] == pytest.approx(1.25)
    assert (stats["wait_source_s"], stats["wait_disk_s"]) == (0.5, 0.25)
    assert stats["wait_copy_s"] == pytest.approx(1.25)
    assert sum(stats.get(f"wait_{cause}_s", 0.0) for cause in CAUSES) == pytest.approx(4.0)


def test_what_blocks_is_never_more_than_the_wait() -> None:
    waits = WaitCauses()
    waits.add(1.0, causes(source=0.7, disk=0.7, decode=5.0))
    stats = waits.to_stats(batches=1)
    assert stats["wait_source_s"] == 0.7
    assert stats["wait_disk_s"] == pytest.approx(0.3)
    assert "wait_decode_s" not in stats


def test_percentiles_are_of_all_batches() -> None:
    waits = WaitCauses()
    for number in range(10):
        waits.add(1.0, causes(transform=number + 1.0))
    stats = waits.to_stats(batches=100)
    assert stats["wait_transform_p50_s"] == 0.0
    assert stats["wait_transform_p95_s"] == pytest.approx(1.0, rel=0.1)


class Clock:
    """Stands still, but for what is slow."""

    def __init__(self) -> None:
        self._now, self._lock = 1.0, threading.Lock()

    def __call__(self) -> float:
        return self._now

    def advance(self, seconds: float) -> None:
        with self._lock:
            self._now += seconds


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(time, "perf_counter", clock)
    return clock


def waits_of(directory: Path, fields: Mapping[str, Any] = LABELS, **options: Any) -> list[str]:
    """The causes that a loader waits for."""
    with Loader(
        pictures.Pictures(pictures.NUM_SAMPLES), cache=directory, world=single_world(),
        batch_size=4, reports=Reports(progress=False), seed=5, fields=fields, **options,
    ) as loader:  # fmt: skip
        for _ in loader.epochs(1):
            for _ in loader:
                pass
        stats = loader.stats()
    found = {cause: stats.get(f"wait_{cause}_s", 0.0) for cause in CAUSES}
    # Short waits are in the total alone.
    short_s = NOT_WORTH_S * stats["batches"]
    assert sum(found.values()) == pytest.approx(stats["wait_s"], abs=short_s)
    return [cause for cause, seconds in found.items() if seconds > 0]


@pytest.mark.parametrize("threads", [0, 2])
def test_the_cause_of_waits_is_found(tmp_path, monkeypatch, clock, threads) -> None:
    workers = Workers(threads=threads)

    def slow(value: Any, rng: object) -> Any:
        clock.advance(1.0)
        return value

    def decode(*args: Any, **options: Any) -> object:
        clock.advance(1.0)
        return decode_image(*args, **options)

    assert waits_of(tmp_path / "a", transform=slow, workers=workers) == ["transform"]
    assert waits_of(tmp_path / "b", batch_transform=slow, workers=workers) == ["transform"]
    monkeypatch.setattr("dataio.rows.at_once.library", lambda: None)
    monkeypatch.setattr("dataio.batch.fill.decode_image", decode)
    image = {"image": Image("jpg", crop=pictures.CROP)}
    assert waits_of(tmp_path / "c", image, workers=workers) == ["decode"]


@pytest.mark.parametrize("threads", [0, 2])
def test_a_loader_without_a_transform_waits_for_none(tmp_path, monkeypatch, clock, threads) -> None:
    batch = Shaper.batch

    def slow(*args: Any, **options: Any) -> Any:
        clock.advance(1.0)
        return batch(*args, **options)

    monkeypatch.setattr(Shaper, "batch", slow)
    fields = {"image": Image("jpg", crop=pictures.CROP)}
    assert waits_of(tmp_path, fields, workers=Workers(threads=threads)) == ["decode"]


def test_rows_that_are_not_staged_yet_are_waited_for(tmp_path, monkeypatch, clock) -> None:
    await_rows = Pool.await_rows

    def awaited(self: Any, slots: Any) -> None:
        clock.advance(1.0)
        await_rows(self, slots)

    monkeypatch.setattr(Pool, "await_rows", awaited)
    # However soon they are there.
    monkeypatch.setattr(Pool, "is_staging", True)
    overlap, threads = Staging(when="overlap"), Workers(threads=2)
    assert waits_of(tmp_path, staging=overlap, workers=threads) == ["source"]


def test_processes_say_that_it_is_they(tmp_path) -> None:
    assert waits_of(tmp_path, transform=unchanged, workers=Workers(processes=1)) == ["processes"]


def unchanged(sample: Any, rng: object) -> Any:
    return sample
