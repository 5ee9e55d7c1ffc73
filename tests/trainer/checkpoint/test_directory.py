"""What kills and busy disks leave in the directory of checkpoints."""

import shutil
from pathlib import Path

import pytest
from torch.distributed.checkpoint import state_dict_saver

from tests.stand_ins import Killed
from tests.trainer.checkpoint.start import Start
from tests.trainer.deliver.fake_loader import FakeLoader
from tonari.trainer.checkpoint import checkpoint
from tonari.trainer.checkpoint.directory import latest

pytestmark = pytest.mark.usefixtures("one_rank")


KILLS = {
    "before the loader's files": (FakeLoader, "save"),
    "before torch's": (state_dict_saver, "save"),
    "before the sums": (checkpoint, "write_sums"),
    "before the renaming": (Path, "rename"),
    "before old ones are removed": (checkpoint, "remove_old"),
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
