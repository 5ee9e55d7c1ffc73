"""What `save` writes is known for what it is, or refused by name; and nothing else is touched."""

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import dataio.state.snapshot
from dataio import Loader, Reports, StateError
from dataio.base.atomic import write_record
from dataio.mixture import Mixture
from dataio.pool.moves import Moves
from dataio.world import World, run_threads, single_world, thread_worlds
from tests.dataio.cache.planted import plant
from tests.dataio.test_loader import POLICIES, loss_of, make
from tests.dataio.test_mixture import mixed

KAKURENBO = POLICIES["kakurenbo"]
SEED = 13


def train_to(loader: Loader, epoch: int, step: int) -> None:
    """Train from wherever the loader stands to a step of an epoch, as if there were one more."""
    for running in loader.epochs(epoch + 2):
        for batch in loader:
            loader.report(batch, *loss_of(batch["sample_id"], running))
            if (running, loader.step) == (epoch, step):
                return
        for batch in loader.refresh():
            loader.report(batch, *loss_of(batch["sample_id"], running + 0.5))


def standing(loader: Loader) -> object:
    """All that a restore decides of a rank."""
    plan = loader._run.running.plan
    return (
        json.dumps(loader.state_dict(), sort_keys=True), loader._parts.pool.scores.tobytes(),
        plan.selection.hidden.tobytes(), loader.order_hash(), loader.lr_factor,
    )  # fmt: skip


def files_of(directory: Path) -> list[Path]:
    return sorted(path for path in directory.rglob("*") if path.is_file())


def tree(directory: Path) -> dict[str, bytes | None]:
    """Every name below a directory, with a file's bytes."""
    found = sorted(directory.rglob("*"))
    return {str(p.relative_to(directory)): p.read_bytes() if p.is_file() else None for p in found}


def names_in(directory: Path) -> list[str]:
    return sorted(path.name for path in directory.iterdir())


def copied(saved: Path, place: Path, number: int) -> Path:
    return Path(shutil.copytree(saved, place / f"copy{number}"))


def save_on_two_nodes(tmp_path: Path, name: str = "saved", *, step: int = 3) -> Path:
    def run(world: World) -> None:
        with make(world, tmp_path / f"cache of {name}", importance=KAKURENBO) as loader:
            train_to(loader, 1, step)
            loader.save(tmp_path / name)

    run_threads(thread_worlds([1, 1]), run)
    return tmp_path / name


def restore_each(root: Path, saves: list[Path], layout: list[int]) -> list[list[object]]:
    """For each save and rank: where its loader stands after it, or the error's words."""

    def run(world: World) -> list[object]:
        ends: list[object] = []
        with make(world, root, importance=KAKURENBO) as loader:
            for saved in saves:
                try:
                    loader.restore(saved)
                except StateError as error:
                    ends.append(error)
                else:
                    ends.append(standing(loader))
        return ends

    return list(map(list, zip(*run_threads(thread_worlds(layout), run), strict=True)))


def refusal(mixture: Mixture, saved: Path) -> str:
    """Restore it; the words of the error, if there is one."""
    try:
        mixture.restore(saved)
    except StateError as error:
        return str(error)
    return ""


def check_ends(planted: list[tuple[str, str]], ends: list[list[object]], sound: object) -> int:
    """Each damage is an error that names the file and the cure, on all ranks, or has no effect."""
    num_refused = 0
    for (name, words), ranks in zip(planted, ends, strict=True):
        said = {str(end) for end in ranks if isinstance(end, StateError)}
        if said:
            assert all(isinstance(end, StateError) and end.on_all_ranks for end in ranks), words
            (message,) = said
            assert name in message, f"{name}, {words}: {message}"
            assert "restore an older" in message, message
            num_refused += 1
        else:
            assert ranks == sound, f"{name}, {words}: taken for what was saved"
    return num_refused


@pytest.mark.parametrize(
    ("layout", "flips", "cuts"), [([1, 1], 120, 48), ([3], 24, 12)], ids=["same", "other layout"]
)
def test_a_damaged_save_is_named_on_all_ranks_or_restores_the_same(tmp_path, layout, flips, cuts):
    saved = save_on_two_nodes(tmp_path)
    (tmp_path / "damaged").mkdir()
    planted, copies = [], [saved]
    for path, words in plant(files_of(saved), flips=flips, cuts=cuts, seed=SEED):
        planted.append((path.name, words))
        copies.append(copied(saved, tmp_path / "damaged", len(planted)))
    sound, *ends = restore_each(tmp_path / "cache", copies, layout)
    assert not any(isinstance(end, StateError) for end in sound)
    assert check_ends(planted, ends, sound) > 0.6 * len(planted)
    assert {name for name, _ in planted} >= {"state.json", "node-0.arrow", "node-1.arrow"}


@pytest.mark.parametrize("layout", [[1, 1], [3]])
@pytest.mark.parametrize("part", ["state.json", "node-1.arrow"])
def test_a_part_of_another_save_is_named(tmp_path, layout, part):
    saved, other = save_on_two_nodes(tmp_path), save_on_two_nodes(tmp_path, "other", step=4)
    shutil.copy(other / part, saved / part)
    (ends,) = restore_each(tmp_path / "cache", [saved], layout)
    assert len({str(end) for end in ends}) == 1
    for end in ends:
        assert isinstance(end, StateError)
        assert "is not the one that state.json was saved with" in str(end)


def test_after_a_damaged_save_an_older_one_is_restored(tmp_path):
    older, newer = save_on_two_nodes(tmp_path, "older"), save_on_two_nodes(tmp_path, "newer")
    (newer / "node-0.arrow").unlink()
    ends = restore_each(tmp_path / "cache", [older, newer, older], [1, 1])
    assert ends[0] == ends[2]
    assert isinstance(ends[1][0], StateError)


def test_a_state_with_another_number_is_refused(tmp_path):
    with make(single_world(), tmp_path) as loader:
        train_to(loader, 0, 6)
        state = json.loads(json.dumps(loader.state_dict()))
        assert len(json.dumps(state)) < 1024
        changed: list[dict[str, Any]] = [
            {**state, "epoch": 1}, {**state, "refresh_step": 1}, {**state, "checksum": "0"},
            {**state, "stretches": [{**state["stretches"][0], "steps": 7}]},
            {**state, "stretches": [{**state["stretches"][0], "batch_size": 4}]},
            {name: value for name, value in state.items() if name != "checksum"},
        ]  # fmt: skip
        for one in changed:
            with pytest.raises(StateError, match=r"checkpoint: .*checksum.*as state_dict gave it"):
                loader.load_state_dict(one)
        loader.load_state_dict(state)
        assert loader.state_dict() == state


def test_a_damaged_mixture_is_named_or_restores_the_same(tmp_path):
    def stands(mixture: Mixture) -> list[object]:
        return [(mixture.epoch, mixture.step), *map(standing, mixture.loaders.values())]

    saved = tmp_path / "saved"
    with mixed(single_world(), tmp_path) as mixture:
        batches = iter(mixture)
        for _ in range(9):
            next(batches)
        mixture.save(saved)
        sound = stands(mixture)
        num_refused = 0
        for path, words in plant(files_of(saved), flips=60, cuts=24, seed=SEED):
            said = refusal(mixture, saved)
            if said:
                assert path.name in said, words
                assert "restore an older" in said, words
                num_refused += 1
            else:
                assert stands(mixture) == sound, f"{path}, {words}"
        assert num_refused > 40
        mixture.save(tmp_path / "whole")
        next(batches)
        mixture.save(saved)
        shutil.rmtree(saved / "small")
        shutil.copytree(tmp_path / "whole" / "small", saved / "small")
        with pytest.raises(StateError, match=r"small.state.json: .*mixture.json.*restore an older"):
            mixture.restore(saved)
        state = mixture.state_dict()
        with pytest.raises(StateError, match=r"checksum.*as state_dict gave it"):
            mixture.load_state_dict({**state, "step": 3})


# What is not of a save stays


def beside(path: Path) -> None:
    path.mkdir()
    (path / "model.pt").write_text("weights")


def in_an_own_save(path: Path) -> None:
    with make(single_world(), path.parent / "cache") as loader:
        loader.save(path)
    (path / "model.pt").write_text("weights")


def a_save_in_an_own_save(path: Path) -> None:
    with make(single_world(), path.parent / "cache") as loader:
        loader.save(path)
        loader.save(path / "best")


def other_state(path: Path) -> None:
    path.mkdir()
    (path / "state.json").write_text("{}")


def a_file(path: Path) -> None:
    path.write_text("weights")


def partial(path: Path) -> None:
    beside(path.with_name("saved.partial"))


def previous(path: Path) -> None:
    beside(path.with_name("saved.previous"))


PLACES: list[Callable[[Path], None]] = [
    beside, in_an_own_save, a_save_in_an_own_save, other_state, a_file, partial, previous,
]  # fmt: skip


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("kind", ["loader", "mixture"])
def test_a_save_that_would_remove_anything_else_is_refused_and_changes_nothing(
    tmp_path, place, kind
):
    (tmp_path / "work").mkdir()
    path = tmp_path / "work" / "saved"
    place(path)
    before = tree(tmp_path / "work")

    def run(world: World) -> str:
        if kind == "loader":
            opened: Loader | Mixture = make(world, tmp_path / "cache")
        else:
            opened = mixed(world, tmp_path / "cache")
        with opened as one, pytest.raises(StateError, match=r"saved.*give.*own") as refused:
            one.save(path)
        return str(refused.value)

    said = run_threads(thread_worlds([1, 1]), run)
    assert said[0] == said[1]
    assert tree(tmp_path / "work") == before


def test_a_save_takes_an_empty_directory_or_one_that_is_linked_to_and_replaces_an_older_one(
    tmp_path,
):
    (tmp_path / "empty").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "empty")
    with make(single_world(), tmp_path / "cache") as loader:
        for step, name in enumerate(["empty", "empty", "link", "new", "deep/new"]):
            loader.save(tmp_path / name)
            next(iter(loader))
            loader.restore(tmp_path / name)
            assert loader.step == step
            next(iter(loader))
    assert (tmp_path / "link").is_symlink()
    assert names_in(tmp_path) == ["cache", "deep", "empty", "link", "new"]


class Killed(BaseException):
    """Stands for a kill."""


def save_and_be_killed(loader: Loader, path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def die(*args: object, **kwargs: object) -> None:
        raise Killed

    with monkeypatch.context() as patch:
        patch.setattr(dataio.state.snapshot, "write_record", die)
        with pytest.raises(Killed):
            loader.save(path)


@pytest.mark.parametrize("then", ["save", "restore"])
def test_what_an_interrupted_save_left_goes_with_the_next(tmp_path, monkeypatch, then):
    work = tmp_path / "work"
    with make(single_world(), tmp_path / "cache") as loader:
        loader.save(work / "first")
        save_and_be_killed(loader, work / "second", monkeypatch)
        assert names_in(work) == ["first", "second.partial"]
        beside(work / "theirs.partial")
        (work / "empty.partial").mkdir()
        theirs = tree(work / "theirs.partial")
        if then == "save":
            loader.save(work / "third")
        else:
            loader.restore(work / "first")
    assert not (work / "second.partial").exists()
    assert (work / "empty.partial").exists(), "who made it is not known"
    assert tree(work / "theirs.partial") == theirs


def test_what_a_save_under_way_writes_is_left_to_it(tmp_path):
    """Two jobs may save side by side."""
    work = tmp_path / "work"
    with make(single_world(), tmp_path / "a") as one, make(single_world(), tmp_path / "b") as other:

        def between(path: Path, record: dict[str, object]) -> None:
            if path.parent.name == "one.partial":
                other.save(work / "other")
            write_record(path, record)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(dataio.state.snapshot, "write_record", between)
            one.save(work / "one")
        one.restore(work / "one")
        other.restore(work / "other")
    assert names_in(work) == ["one", "other"]


def test_a_kill_while_an_older_save_is_removed_leaves_what_the_next_one_takes_away(
    tmp_path, monkeypatch
):
    """After each single removal: what is left must still be known for ours."""
    work, saved = tmp_path / "work", tmp_path / "work" / "saved"
    removals = {"unlink": os.unlink, "rmdir": os.rmdir}
    with make(single_world(), tmp_path / "cache") as loader:
        loader.save(saved)
        for survive in range(9):
            left = survive

            def counted(name: str) -> Callable[..., None]:
                def remove(path: Any, *args: Any, **kwargs: Any) -> None:
                    nonlocal left
                    if str(path).startswith(str(work)) or "dir_fd" in kwargs:
                        left -= 1
                        if left < 0:
                            raise Killed
                    removals[name](path, *args, **kwargs)

                return remove

            next(iter(loader))
            step = loader.step
            with monkeypatch.context() as patch:
                for name in removals:
                    patch.setattr(os, name, counted(name))
                try:
                    loader.save(saved)
                except Killed:
                    pass
                else:
                    assert survive >= 3, "state, node, what says whose it is, directory"
            loader.restore(saved)
            assert loader.step == step
            loader.save(saved)
            assert names_in(work) == ["saved"]


# The rest of an epoch


def told(path: Path) -> list[dict[str, Any]]:
    return list(map(json.loads, path.read_text().splitlines()))


@pytest.mark.parametrize("layout", [[1, 1], [1]])
def test_an_epoch_that_was_gone_on_with_is_told_whole(tmp_path, layout):
    """Its rows, bytes and waits are those of all starts, whatever the ranks."""

    def first(world: World) -> dict[str, float]:
        with make(
            world, tmp_path / "cache", reports=Reports(metrics=tmp_path / "a.jsonl")
        ) as loader:
            for _, _batch in zip(range(2), loader, strict=False):
                pass
            loader.save(tmp_path / "early")
            loader.restore(tmp_path / "early")
            for _, _batch in zip(range(2), loader, strict=False):
                pass
            loader.save(tmp_path / "saved")
            return dict(loader.stats())

    def rest(world: World) -> None:
        with make(
            world, tmp_path / "cache", reports=Reports(metrics=tmp_path / "b.jsonl")
        ) as loader:
            loader.restore(tmp_path / "saved")
            for _ in loader.epochs(2):
                for _batch in loader:
                    pass

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
            for _batch in loader:
                pass
    lines = told(tmp_path / "m.jsonl")
    assert [(line["samples"], line["first_step"]) for line in lines] == [(41, 4), (61, 0)]


@pytest.mark.parametrize("epoch", [0, 1])
def test_no_exchange_begins_in_the_last_epoch_and_one_does_in_others(tmp_path, monkeypatch, epoch):
    begun: list[int] = []
    begin = Moves.begin

    def noted(moves: Moves, position: Any, steps: range) -> None:
        begun.append(position.epoch)
        begin(moves, position, steps)

    monkeypatch.setattr(Moves, "begin", noted)

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
            assert loader._parts.moves._exchange is None
            if by == "iterating":
                next(iter(loader))
                assert loader._parts.moves._exchange is not None
            loader.set_epoch(1)
            assert loader._parts.moves._exchange is not None
            return [loader.order_hash()]

    expected = run_threads(thread_worlds([1, 1]), whole)
    found = run_threads(thread_worlds([1, 1]), rest)
    for rank in range(2):
        assert found[rank][0] in expected[rank]
        assert found[rank][0] != expected[rank][0]
