"""What `save` wrote is known for what it is, or refused by name."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from dataio import StateError
from dataio.mixture import Mixture
from dataio.world import World, run_threads, single_world, thread_worlds
from tests.dataio.loaders import make
from tests.dataio.state.saved import KAKURENBO, standing, train_to
from tests.dataio.store.planted import plant
from tests.dataio.test_mixture import mixed

SEED = 13


def files_of(directory: Path) -> list[Path]:
    return sorted(path for path in directory.rglob("*") if path.is_file())


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
        next(iter(mixture))
        mixture.save(saved)
        shutil.rmtree(saved / "small")
        shutil.copytree(tmp_path / "whole" / "small", saved / "small")
        with pytest.raises(StateError, match=r"small.state.json: .*mixture.json.*restore an older"):
            mixture.restore(saved)
        state = mixture.state_dict()
        with pytest.raises(StateError, match=r"checksum.*as state_dict gave it"):
            mixture.load_state_dict({**state, "step": 3})
