"""Which checkpoint a run goes on from: damaged, missing and foreign ones."""

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.dataio.store.planted import plant
from tests.trainer.checkpoint.start import Start
from tonari.trainer.checkpoint import agree
from tonari.trainer.checkpoint import restore as restoring
from tonari.trainer.checkpoint.agree import together
from tonari.trainer.checkpoint.checkpoint import Checkpoints
from tonari.trainer.checkpoint.directory import latest, read_progress, set_aside_later
from tonari.trainer.checkpoint.restore import find, restore
from tonari.trainer.checkpoint.sums import check_sums
from tonari.trainer.errors import CheckpointError, ConfigError

pytestmark = pytest.mark.usefixtures("one_rank")


def damage(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


def refusal(path: Path) -> str:
    """Compare all files with their sums; the words of the error, if there is one."""
    try:
        check_sums(path)
    except CheckpointError as error:
        return str(error)
    return ""


def test_no_checkpoint_is_no_error(tmp_path: Path) -> None:
    assert latest(tmp_path / "absent") is None


def test_what_is_no_checkpoint_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"not a whole checkpoint: .* give a step-NUMBER"):
        Start().restore(tmp_path)


def test_another_model_s_checkpoint_is_refused(tmp_path: Path) -> None:
    start = Start()
    start.train(1)
    path = start.save(tmp_path)
    with pytest.raises(
        ConfigError, match=r"does not fit the model and .*Missing key.*; set \[model\]"
    ):
        Start(image_size=16).restore(path)


@pytest.mark.parametrize("adam", [False, True])
def test_a_run_goes_on_with_a_parameter_that_no_step_has_used(tmp_path: Path, adam: bool) -> None:
    first, second = Start(adam=adam), Start(adam=adam)
    layers = [torch.nn.Linear(2, 2) for _ in range(2)]
    for start, unused in zip((first, second), layers, strict=True):
        start.model.add_module("unused", unused)
        start.optimizer.add_param_group({"params": unused.parameters()})
    first.train(2)
    second.restore(first.save(tmp_path))
    assert layers[1].weight not in second.optimizer.state
    assert len(second.optimizer.state) == len(first.optimizer.state) > 0
    assert all(map(torch.equal, first.train(2), second.train(2)))


class Slowing(torch.optim.Optimizer):
    """Steps that become shorter, by a count that it keeps in its groups, as Prodigy keeps ``d``."""

    def __init__(self, parameters: Any, lr: float) -> None:
        super().__init__(parameters, {"lr": lr, "count": 0})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            group["count"] += 1
            for each in group["params"]:
                self.state[each]["steps"] = torch.tensor(group["count"])
                each.add_(each.grad, alpha=-group["lr"] / group["count"])


def test_what_an_optimizer_keeps_in_its_groups_goes_on_and_what_was_given_is_as_given(
    tmp_path: Path,
) -> None:
    first, second = Start(), Start()
    first.optimizer = Slowing(first.model.parameters(), lr=0.1)
    second.optimizer = Slowing(second.model.parameters(), lr=0.1)
    first.train(2)
    path = first.save(tmp_path)
    second.restore(path)
    assert [group["count"] for group in second.optimizer.param_groups] == [2]
    assert all(map(torch.equal, first.train(2), second.train(2)))
    third = Start()
    third.optimizer = Slowing(third.model.parameters(), lr=0.2)
    third.restore(path)
    assert [(group["lr"], group["count"]) for group in third.optimizer.param_groups] == [(0.2, 2)]


@pytest.mark.parametrize("adam", [False, True])
def test_a_group_without_weights_on_this_stage_goes_on(tmp_path: Path, adam: bool) -> None:
    first, second = Start(adam=adam), Start(adam=adam)
    for start in (first, second):
        start.optimizer.param_groups.insert(0, {**start.optimizer.param_groups[0], "params": []})
    first.train(2)
    second.restore(first.save(tmp_path))
    assert [len(group["params"]) == 0 for group in second.optimizer.param_groups] == [True, False]
    assert all(map(torch.equal, first.train(2), second.train(2)))


def test_averaged_weights_are_restored_into_the_tensors_of_this_start(tmp_path: Path) -> None:
    first, second = Start(), Start()
    first.train(2)
    # Named as in a list of parts.
    named = [(f"0.{name}", weight.detach()) for name, weight in first.model.named_parameters()]
    saved = {name: weight + 1 for name, weight in named}
    average = {name: torch.zeros_like(weight) for name, weight in named}
    with Checkpoints(tmp_path, keep=1) as checkpoints:
        path = checkpoints.save(
            [first.model], first.optimizer, first.loader, first.progress, average=saved
        )
    restore(path, [second.model], second.optimizer, second.loader, average=average)
    assert all(torch.equal(average[name], weight) for name, weight in saved.items())


def test_a_checkpoint_of_an_optimizer_that_remembers_nothing_is_another_s(tmp_path: Path) -> None:
    first = Start()
    first.optimizer = torch.optim.SGD(first.model.parameters(), lr=0.1)
    first.train(1)
    with pytest.raises(ConfigError, match=r"does not fit the model and .*Missing key.*"):
        Start(adam=True).restore(first.save(tmp_path))


@pytest.mark.parametrize("kind", ["weights", "loader", "missing", "manifest"])
def test_a_damaged_checkpoint_is_named_and_the_one_before_it_is_taken(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, kind: str
) -> None:
    start = Start()
    for _ in range(2):
        start.train(1)
        newest = start.save(tmp_path)
    if kind == "weights":
        damage(next(newest.glob("torch/*.distcp")))
    elif kind == "loader":
        damage(newest / "loader")
    elif kind == "missing":
        (newest / "progress.json").unlink()
    else:
        (newest / "manifest.json").write_text('{"files"')
    name = {"weights": ".distcp", "missing": "progress.json"}.get(kind, kind)
    with pytest.raises(CheckpointError, match=rf"step-00000002: .*{name}.*--resume auto for the"):
        find(tmp_path, str(newest))
    assert find(tmp_path, "auto") == tmp_path / "step-00000001"
    assert name in caplog.text
    assert "going on from step-00000001" in caplog.text
    # The run comes by the same step again, and keeps it.
    assert start.save(tmp_path) == newest
    assert find(tmp_path, "auto") == newest


def test_no_damage_to_a_checkpoint_goes_unseen(tmp_path: Path) -> None:
    """Any one bit of any file, its own sums and what is around them included."""
    start = Start()
    start.train(1)
    saved = start.save(tmp_path)
    files = sorted(path for path in saved.rglob("*") if path.is_file())
    assert {path.name for path in files} >= {"manifest.json", "progress.json", ".metadata"}
    sound, num_refused = read_progress(saved), 0
    for path, words in plant(files, flips=120, cuts=48, seed=4):
        said = refusal(saved)
        if said:
            num_refused += 1
            assert path.name in said, words
            assert "--resume auto for the newest that is sound" in said, words
        else:
            # White space between the sums.
            assert path.name == "manifest.json", words
            assert read_progress(saved) == sound
    assert num_refused > 120
    # By itself too, where nobody has looked at the sums.
    progress = saved / "progress.json"
    progress.write_text(progress.read_text().replace('"steps": 1', '"steps": 2'))
    with pytest.raises(ConfigError, match=r"progress.json: damaged.*give a step-NUMBER"):
        read_progress(saved)


def test_if_no_checkpoint_is_sound_nothing_is_started_anew(tmp_path: Path) -> None:
    start = Start()
    start.train(1)
    damage(start.save(tmp_path) / "loader")
    with pytest.raises(CheckpointError, match=r"none of 1 checkpoints is sound, .*loader is dam"):
        find(tmp_path, "auto")
    assert latest(tmp_path) == tmp_path / "step-00000001"


def test_what_comes_after_the_checkpoint_that_a_run_went_back_to_is_set_aside(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    start = Start()
    for _ in range(4):
        start.train(1)
        start.save(tmp_path, keep=4)
    older = tmp_path / "step-00000002"
    set_aside_later(tmp_path, older)
    assert find(tmp_path, "auto") == older
    assert "step-00000004: renamed to step-00000004.later: the run goes on from" in caplog.text
    again = Start()
    again.restore(older)
    again.train(1)
    # Neither taken for an old one nor left out for one that was there before.
    assert again.save(tmp_path, keep=1) == tmp_path / "step-00000003"
    assert sorted(p.name for p in tmp_path.iterdir()) == [
        "step-00000003", "step-00000003.later", "step-00000004.later",
    ]  # fmt: skip


def test_ranks_wait_for_the_slowest_disk_longer_than_for_a_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    start = Start()
    start.train(1)
    start.save(tmp_path)
    groups: list[object] = []

    def noted(act: Any, group: object = None) -> object:
        groups.append(group)
        return together(act, group)  # type: ignore[arg-type]

    def loaded(*args: Any, process_group: object = None, **kwargs: Any) -> None:
        groups.append(process_group)

    monkeypatch.setattr(restoring, "together", noted)
    monkeypatch.setattr("tonari.trainer.checkpoint.restore.state_dict_loader.load", loaded)
    path = find(tmp_path, "auto")
    assert path is not None
    Start().restore(path)
    limits = [group._get_backend(torch.device("cpu")).options._timeout for group in groups]  # type: ignore[attr-defined]
    assert limits == 2 * [agree.DISK]
