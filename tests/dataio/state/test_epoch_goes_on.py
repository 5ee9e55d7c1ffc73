"""An epoch that a restored run goes on with: its line of metrics, and its exchange."""

import json
from pathlib import Path
from typing import Any

import pytest

from dataio import Reports
from dataio.store.moves import PoolMoves
from dataio.world import World, run_threads, single_world, thread_worlds
from tests.dataio.loaders import make
from tests.dataio.state.saved import train_to, tree


def told(path: Path) -> list[dict[str, Any]]:
    return list(map(json.loads, path.read_text().splitlines()))


@pytest.mark.parametrize("layout", [[1, 1], [1]])
def test_an_epoch_that_was_gone_on_with_is_told_whole(tmp_path, layout):
    """Its rows, bytes and waits are those of all starts, whatever the ranks."""

    def first(world: World) -> dict[str, float]:
        with make(
            world, tmp_path / "cache", reports=Reports(metrics=tmp_path / "a.jsonl")
        ) as loader:
            list(zip(range(2), loader, strict=False))
            loader.save(tmp_path / "early")
            loader.restore(tmp_path / "early")
            list(zip(range(2), loader, strict=False))
            loader.save(tmp_path / "saved")
            return dict(loader.stats())

    def rest(world: World) -> None:
        with make(
            world, tmp_path / "cache", reports=Reports(metrics=tmp_path / "b.jsonl")
        ) as loader:
            loader.restore(tmp_path / "saved")
            for _ in loader.epochs(2):
                list(loader)

    before = run_threads(thread_worlds([1, 1]), first)
    run_threads(thread_worlds(layout), rest)
    lines = told(tmp_path / "b.jsonl")
    assert [line["samples"] for line in lines] == [61, 61]
    assert [line["first_step"] for line in lines] == [0, 0]
    assert lines[0]["source_bytes"] >= sum(one["source_bytes"] for one in before) > 0
    assert lines[0]["wait_max_s"] >= max(one["wait_s"] for one in before)
    assert lines[0]["samples_per_s"] == pytest.approx(61 / lines[0]["duration_s"])


def test_an_epoch_whose_start_is_not_known_says_which_part_its_line_tells(tmp_path):
    with make(single_world(), tmp_path / "cache") as loader:
        train_to(loader, 0, 4)
        state = loader.state_dict()
    with make(
        single_world(), tmp_path / "cache", reports=Reports(metrics=tmp_path / "m.jsonl")
    ) as loader:
        loader.load_state_dict(state)
        for _ in loader.epochs(2):
            list(loader)
    lines = told(tmp_path / "m.jsonl")
    assert [(line["samples"], line["first_step"]) for line in lines] == [(41, 4), (61, 0)]


@pytest.mark.parametrize("epoch", [0, 1])
def test_no_exchange_begins_in_the_last_epoch_and_one_does_in_others(tmp_path, monkeypatch, epoch):
    begun: list[int] = []
    begin = PoolMoves.begin

    def noted(moves: PoolMoves, position: Any, steps: range) -> None:
        begun.append(position.epoch)
        begin(moves, position, steps)

    monkeypatch.setattr(PoolMoves, "begin", noted)

    def first(world: World) -> None:
        with make(world, tmp_path / "cache") as loader:
            train_to(loader, epoch, 3)
            loader.save(tmp_path / "saved")

    def rest(world: World) -> list[int]:
        with make(world, tmp_path / "cache") as loader:
            loader.restore(tmp_path / "saved")
            return [i for _ in loader.epochs(2) for b in loader for i in b["sample_id"].tolist()]

    run_threads(thread_worlds([1, 1]), first)
    begun.clear()
    before = {path for path in tree(tmp_path / "cache") if "delta" in path}
    run_threads(thread_worlds([1, 1]), rest)
    after = {path for path in tree(tmp_path / "cache") if "delta" in path}
    assert begun == ([0, 0] if epoch == 0 else [])
    if epoch == 1:
        assert after <= before


@pytest.mark.parametrize("by", ["iterating", "set_epoch"])
def test_without_a_number_of_epochs_the_exchange_begins_with_the_first_batch(
    tmp_path, monkeypatch, by
):
    """A restore begins none, and each epoch has the rows it has when nothing is interrupted."""

    def whole(world: World) -> list[str]:
        with make(world, tmp_path / "whole") as loader:
            return [loader.order_hash() for _ in loader.epochs(3) for _batch in loader]

    def rest(world: World) -> list[str]:
        with make(world, tmp_path / "cache") as loader:
            train_to(loader, 0, 3)
            loader.save(tmp_path / "saved")
        with make(world, tmp_path / "cache") as loader:
            loader.restore(tmp_path / "saved")
            assert loader._session.moves._exchange is None
            if by == "iterating":
                next(iter(loader))
                assert loader._session.moves._exchange is not None
            loader.set_epoch(1)
            assert loader._session.moves._exchange is not None
            return [loader.order_hash()]

    expected = run_threads(thread_worlds([1, 1]), whole)
    found = run_threads(thread_worlds([1, 1]), rest)
    for rank in range(2):
        assert found[rank][0] in expected[rank]
        assert found[rank][0] != expected[rank][0]
