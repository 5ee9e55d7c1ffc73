import shutil
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.checkpoint import state_dict_saver

from tests.dataio.cache.planted import plant
from tests.trainer.deliver.fake_loader import NUM_CLASSES, FakeLoader, whole_weights
from tests.trainer.run.alone import one_stage, step_loss
from trainer.checkpoint import checkpoint
from trainer.checkpoint.agree import together
from trainer.checkpoint.checkpoint import (
    Checkpoints,
    Progress,
    find,
    latest,
    read_progress,
    restore,
    set_aside_later,
)
from trainer.checkpoint.sums import check_sums, write_sums
from trainer.errors import CheckpointError, ConfigError
from trainer.mesh.mesh import axis_sizes, make_mesh
from trainer.mesh.parallelize import parallelize
from trainer.models import SmallCNN, seeded
from trainer.watch.launch import join


class Start:
    """One start of a run: what a process holds."""

    def __init__(self, *, image_size: int = 8, adam: bool = False) -> None:
        mesh = make_mesh(axis_sizes(1), device_type="cpu")
        made = seeded(lambda: SmallCNN(NUM_CLASSES, 3, image_size), seed=0)
        (self.model,) = parallelize(made, mesh)
        self.pipeline = one_stage(self.model, mesh, batch_size=8)
        self.optimizer: torch.optim.Optimizer
        if adam:
            self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.01)
        else:
            self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1, momentum=0.9)
        self.loader = FakeLoader(replica=0, num_replicas=1, global_batch_size=8, steps=6)
        self.progress = Progress()

    def train(self, steps: int) -> list[Tensor]:
        """Take some steps; return their losses."""
        batches = iter(self.loader)
        losses = []
        for _ in range(steps):
            batch = next(batches)
            losses.append(step_loss(self.pipeline, self.optimizer, self.loader, batch))
        self.progress = Progress(0, self.progress.steps + steps)
        return losses

    def save(self, directory: Path, *, keep: int = 2) -> Path:
        with Checkpoints(directory, keep=keep) as checkpoints:
            return self.save_by(checkpoints)

    def save_by(self, checkpoints: Checkpoints) -> Path:
        return checkpoints.save([self.model], self.optimizer, self.loader, self.progress)

    def restore(self, path: Path) -> None:
        self.progress = restore(path, [self.model], self.optimizer, self.loader)


@pytest.fixture(autouse=True)
def _group() -> Iterator[None]:
    with join(device="cpu"):
        yield


@pytest.mark.parametrize("adam", [False, True])
@pytest.mark.parametrize("background", [False, True])
@pytest.mark.parametrize("steps", [1, 2, 5])
def test_prefix_and_resume_equal_the_uninterrupted_run(
    tmp_path: Path, steps: int, background: bool, adam: bool
) -> None:
    whole = Start(adam=adam)
    expected = whole.train(6)
    prefix, rest = Start(adam=adam), Start(adam=adam)
    losses = prefix.train(steps)
    with Checkpoints(tmp_path, keep=2, background=background) as checkpoints:
        path = prefix.save_by(checkpoints)
        # What comes after the call must not be in the checkpoint.
        prefix.train(6 - steps)
    assert find(tmp_path, "auto") == path
    rest.restore(path)
    assert rest.progress.steps == steps
    losses += rest.train(6 - steps)
    assert losses == expected
    assert all(map(torch.equal, whole_weights(rest.model), whole_weights(whole.model)))


def test_saving_changes_nothing(tmp_path: Path) -> None:
    plain, saving = Start(), Start()
    expected = plain.train(6)
    losses = []
    for _ in range(6):
        losses += saving.train(1)
        saving.save(tmp_path)
    assert losses == expected


def test_the_newest_checkpoints_are_kept(tmp_path: Path) -> None:
    start = Start()
    for _ in range(4):
        start.train(1)
        start.save(tmp_path, keep=2)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["step-00000003", "step-00000004"]
    assert latest(tmp_path) == tmp_path / "step-00000004"


def test_no_checkpoint_is_no_error(tmp_path: Path) -> None:
    assert latest(tmp_path / "absent") is None


class Killed(BaseException):
    """Stands for kill -9: nothing in the package catches it."""


KILLS = {
    "before the loader's files": (FakeLoader, "save"),
    "before torch's": (state_dict_saver, "save"),
    "before the sums": (checkpoint, "write_sums"),
    "before the renaming": (Path, "rename"),
    "before old ones are removed": (checkpoint, "_remove_old"),
    "while old ones are removed": (shutil, "rmtree"),
}


@pytest.mark.parametrize("kill", KILLS)
def test_a_killed_checkpoint_leaves_one_to_go_on_from(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kill: str
) -> None:
    place, name = KILLS[kill]
    original = getattr(place, name)

    def die(*args: object, **kwargs: object) -> object:
        # Torch renames a file of its own; a left-over of an earlier kill is removed first.
        if "ignore_errors" in kwargs or (name == "rename" and args[0].parent != tmp_path):  # type: ignore[attr-defined]
            return original(*args, **kwargs)
        if name == "rmtree":
            original(Path(str(args[0])) / "torch")
        raise Killed

    expected = Start().train(4)
    start = Start()
    losses = start.train(2)
    start.save(tmp_path, keep=1)
    losses += start.train(1)
    with monkeypatch.context() as patch:
        patch.setattr(place, name, die)
        with pytest.raises(Killed):
            start.save(tmp_path, keep=1)

    again = Start()
    for path in tmp_path.glob("step-????????"):
        Start().restore(path)
    found = latest(tmp_path)
    assert found is not None
    again.restore(found)
    assert again.progress.steps == (3 if "old ones" in kill else 2)
    losses = losses[: again.progress.steps] + again.train(4 - again.progress.steps)
    assert losses == expected
    again.save(tmp_path, keep=1)
    assert [p.name for p in tmp_path.iterdir()] == ["step-00000004"]


def test_an_old_checkpoint_that_cannot_be_removed_does_not_end_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    remove = shutil.rmtree

    def busy(path: Path, ignore_errors: bool = False) -> None:
        if not ignore_errors:
            raise OSError(39, "Directory not empty", str(path))
        remove(path, ignore_errors=True)

    start = Start()
    start.train(1)
    start.save(tmp_path, keep=1)
    with monkeypatch.context() as patch:
        patch.setattr(shutil, "rmtree", busy)
        start.train(1)
        assert start.save(tmp_path, keep=1) == latest(tmp_path)
    assert "could not be removed: [Errno 39] Directory not empty" in caplog.text
    start.train(1)
    start.save(tmp_path, keep=1)
    assert [path.name for path in tmp_path.iterdir()] == ["step-00000003"]


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


def test_training_goes_on_while_a_checkpoint_is_written_and_the_next_save_waits_for_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    let_go = threading.Event()

    def held(*args: Any) -> None:
        assert let_go.wait(60)
        write_sums(*args)

    monkeypatch.setattr(checkpoint, "write_sums", held)
    start = Start()
    with Checkpoints(tmp_path, keep=2, background=True) as checkpoints:
        start.train(1)
        first = start.save_by(checkpoints)
        start.train(2)
        assert not first.exists()
        let_go.set()
        second = start.save_by(checkpoints)
        assert first.exists()
    assert second.exists()


@pytest.mark.parametrize("later", ["save", "settle", "close"])
def test_a_failure_in_the_background_is_told_by_the_next_call_and_the_run_may_go_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, later: str
) -> None:
    def fail(*args: object) -> None:
        raise OSError("no space left")

    start = Start()
    start.train(1)
    checkpoints = Checkpoints(tmp_path, keep=2, background=True)
    with monkeypatch.context() as patch:
        patch.setattr(checkpoint, "write_sums", fail)
        start.save_by(checkpoints)
        with pytest.raises(
            CheckpointError, match=r"step-00000001.partial: was not written: no space left; .* room"
        ) as raised:
            start.save_by(checkpoints) if later == "save" else getattr(checkpoints, later)()
    assert isinstance(raised.value.__cause__, OSError)
    if later != "close":
        assert start.save_by(checkpoints) == tmp_path / "step-00000001"
        checkpoints.close()
        assert find(tmp_path, "auto") == tmp_path / "step-00000001"


def test_an_error_does_not_wait_for_what_is_under_way(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    left = threading.Event()
    written_after: list[bool] = []

    def held(*args: Any) -> None:
        written_after.append(left.wait(5))
        write_sums(*args)

    def fail(checkpoints: Checkpoints) -> None:
        with checkpoints:
            start.save_by(checkpoints)
            raise ValueError("of a step")

    monkeypatch.setattr(checkpoint, "write_sums", held)
    start = Start()
    start.train(1)
    checkpoints = Checkpoints(tmp_path, keep=2, background=True)
    with pytest.raises(ValueError, match="of a step"):
        fail(checkpoints)
    left.set()
    checkpoints.settle()
    assert written_after == [True]


def test_a_checkpoint_gets_its_name_when_its_files_are_on_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    synced: list[tuple[str, list[str]]] = []

    def noted(directory: Path) -> None:
        synced.append((directory.name, sorted(path.name for path in tmp_path.iterdir())))

    monkeypatch.setattr(checkpoint, "sync_directory", noted)
    start = Start()
    start.train(1)
    start.save(tmp_path)
    assert synced == [
        ("step-00000001.partial", ["step-00000001.partial"]),
        (tmp_path.name, ["step-00000001"]),
    ]


def damage(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


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


def refusal(path: Path) -> str:
    """Compare all files with their sums; the words of the error, if there is one."""
    try:
        check_sums(path)
    except CheckpointError as error:
        return str(error)
    return ""


def test_what_the_run_did_not_write_is_not_removed(tmp_path: Path) -> None:
    for name in ("step-best.partial", "step-00000000", "step-1.partial"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "model.pt").write_text("theirs")
    start = Start()
    for _ in range(3):
        start.train(1)
        start.save(tmp_path, keep=1)
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "step-00000000", "step-00000003", "step-1.partial", "step-best.partial",
    ]  # fmt: skip


def test_if_no_checkpoint_is_sound_nothing_is_started_anew(tmp_path: Path) -> None:
    start = Start()
    start.train(1)
    damage(start.save(tmp_path) / "loader")
    with pytest.raises(CheckpointError, match=r"none of 1 checkpoints is sound, .*loader is dam"):
        find(tmp_path, "auto")
    assert latest(tmp_path) == tmp_path / "step-00000001"


class Blocks(nn.Module):
    """Some blocks of a model, under the names they have in the whole of it."""

    def __init__(self, *numbers: int) -> None:
        super().__init__()
        made = {str(number): nn.Linear(3, 3) for number in numbers}
        self.blocks = nn.ModuleDict(made)
        self.register_buffer("scale", torch.ones(2))


def stepped(*parts: Blocks) -> torch.optim.Optimizer:
    """Make an Adam of all parts, with a state."""
    optimizer = torch.optim.AdamW([w for part in parts for w in part.parameters()], lr=0.1)
    for part in parts:
        for weight in part.parameters():
            weight.grad = torch.rand_like(weight)
    optimizer.step()
    return optimizer


@pytest.mark.parametrize("saved", [((0, 3), (1, 2)), ((0, 1, 2, 3),)])
@pytest.mark.parametrize("restored", [((0, 1, 2, 3),), ((2,), (0, 1), (3,)), ((1, 2),)])
def test_a_rank_s_stages_are_saved_and_restored_by_the_names_of_the_whole_model(
    tmp_path: Path, saved: tuple[tuple[int, ...], ...], restored: tuple[tuple[int, ...], ...]
) -> None:
    loader = FakeLoader(replica=0, num_replicas=1, global_batch_size=8, steps=6)
    parts = [Blocks(*numbers) for numbers in saved]
    optimizer = stepped(*parts)
    with Checkpoints(tmp_path, keep=1) as checkpoints:
        path = checkpoints.save(parts, optimizer, loader, Progress(0, 1))
    others = [Blocks(*numbers) for numbers in restored]
    other = stepped(*others)
    restore(path, others, other, loader)
    weights = {name: w for part in parts for name, w in part.named_parameters()}
    for part in others:
        for name, found in part.named_parameters():
            assert torch.equal(found, weights[name])
            for kind, value in optimizer.state[weights[name]].items():
                assert torch.equal(other.state[found][kind], value)


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


def test_the_optimizer_s_settings_are_those_of_this_start(tmp_path: Path) -> None:
    start = Start(adam=True)
    start.train(1)
    path = start.save(tmp_path)
    again = Start(adam=True)
    again.optimizer.param_groups[0] |= {"weight_decay": 0.5, "betas": (0.5, 0.6), "lr": 0.25}
    again.restore(path)
    (group,) = again.optimizer.param_groups
    assert (group["weight_decay"], group["betas"], group["lr"]) == (0.5, (0.5, 0.6), 0.25)
    assert all(state["step"] == 1 for state in again.optimizer.state.values())


def test_weights_that_are_not_finite_push_out_no_checkpoint(tmp_path: Path) -> None:
    start = Start()
    start.train(1)
    sound = start.save(tmp_path, keep=1)
    start.train(1)
    with torch.no_grad():
        next(start.model.blocks.parameters()).view(-1)[3] = float("nan")
    with pytest.raises(
        CheckpointError, match=r"step 2: blocks\.0\.\S+ is not finite, .* smaller optimizer.lr"
    ):
        start.save(tmp_path, keep=1)
    assert [path for path in tmp_path.iterdir()] == [sound]


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

    monkeypatch.setattr(checkpoint, "together", noted)
    monkeypatch.setattr("trainer.checkpoint.checkpoint.state_dict_loader.load", loaded)
    path = find(tmp_path, "auto")
    assert path is not None
    Start().restore(path)
    limits = [group._get_backend(torch.device("cpu")).options._timeout for group in groups]  # type: ignore[attr-defined]
    assert limits == 2 * [checkpoint.DISK]
