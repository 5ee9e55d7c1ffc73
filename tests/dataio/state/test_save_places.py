"""A save replaces saves alone: whatever else lies there stays, after kills too."""

import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import dataio.state.snapshot
from dataio import Loader, StateError
from dataio.base.atomic import read_record, write_record
from dataio.mixture import Mixture
from dataio.state import saves
from dataio.world import World, run_threads, single_world, thread_worlds
from tests.dataio.loaders import make
from tests.dataio.state.saved import names_in, tree
from tests.dataio.test_mixture import mixed
from tests.rehearsal.disks import Disks
from tests.rehearsal.scheduler import Scheduler
from tests.stand_ins import Killed


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


def test_an_empty_directory_of_a_save_killed_before_its_mark_goes_when_it_is_old(tmp_path):
    work = tmp_path / "work"
    for name in ("killed.partial", "fresh.partial", "empty"):
        (work / name).mkdir(parents=True)
    for name in ("killed.partial", "empty"):
        os.utime(work / name, (0, 0))
    with make(single_world(), tmp_path / "cache") as loader:
        loader.save(work / "saved")
    assert names_in(work) == ["empty", "fresh.partial", "saved"]


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


@pytest.mark.skipif(sys.version_info < (3, 11), reason="pathlib of 3.10 keeps os.unlink itself")
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


def test_after_a_power_cut_while_a_save_is_replaced_the_next_one_is_taken(tmp_path, monkeypatch):
    disks, remove = Disks(tmp_path / "disk", Scheduler(0)), saves._remove
    disks.root.mkdir()

    def save(step: int) -> None:
        with saves.replacing(disks.root / "saved", single_world()) as directory:
            write_record(directory / "state.json", {"step": step})

    def cut_before(directory: Path) -> None:
        if directory.name == "saved.previous" and directory.exists():
            raise Killed
        remove(directory)

    with disks.recording():
        save(1)
        with monkeypatch.context() as patch:
            patch.setattr(saves, "_remove", cut_before)
            with pytest.raises(Killed):
                save(2)
        disks.crash("cut")
        assert read_record(disks.root / "saved" / "state.json") == {"step": 2}
        save(3)
    assert names_in(disks.root) == ["saved"]


@pytest.mark.parametrize("seed", range(8))
def test_after_a_power_cut_the_parts_of_a_replaced_save_are_not_left_without_its_mark(
    tmp_path, seed
):
    disks = Disks(tmp_path / "disk", Scheduler(seed))
    disks.root.mkdir()

    def save() -> None:
        with saves.replacing(disks.root / "saved", single_world(), parts=["part"]) as directory:
            with saves.replacing(directory / "part", single_world()) as part:
                write_record(part / "state.json", {})
            write_record(directory / "mixture.json", {})

    with disks.recording():
        save()
        save()
        disks.crash("torn")
        save()
    assert names_in(disks.root) == ["saved"]
