"""What ends a run before its first step, and what must not."""

import contextlib
import os
import signal
import sys
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
import torch

from dataio.base.claim import NoLocksError, claim
from dataio.base.errors import FieldError
from dataio.loader import Loader
from tests.claims import held_elsewhere
from tests.trainer.digits import write_config
from tests.trainer.run.runs import run
from tonari.trainer.checkpoint.checkpoint import Checkpoints
from tonari.trainer.config.config import load_config
from tonari.trainer.config.saved import read_settings
from tonari.trainer.errors import ConfigError
from tonari.trainer.run import outputs


def test_what_a_run_cannot_write_is_said_before_staging(
    config: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def stage(*args: object, **kwargs: object) -> None:
        raise AssertionError("staged")

    monkeypatch.setattr(Loader, "__init__", stage)
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard.writer", None)
    with pytest.raises(ConfigError, match=r"run.tensorboard is true, but tensorboard cannot be"):
        run(config, "run", "run.tensorboard=true")


def test_never_resuming_refuses_another_run_s_directory(config: Path) -> None:
    run(config, "run", "run.epochs=1")
    with pytest.raises(
        ConfigError, match=r"holds step-00000007 of an earlier run, .* give another"
    ):
        run(config, "run", resume="never")


def test_a_mesh_that_does_not_fit_is_refused_before_staging(config: Path) -> None:
    with pytest.raises(ConfigError, match=r"mesh: .* is 2 ranks, but the job has 1"):
        run(config, "run", "mesh.dp_replicate=2")
    assert not (config.parent / "run").exists()


@pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU is here")
def test_blocks_that_swap_are_refused_where_the_host_computes(config: Path) -> None:
    with pytest.raises(
        ConfigError, match=r"swap_blocks is 1, but the run is on the CPU, .*; leave"
    ):
        run(config, "run", "mesh.swap_blocks=1", "run.device=auto")
    assert not (config.parent / "run" / "metrics.jsonl").exists()


def test_a_run_directory_that_cannot_be_made_is_named(tmp_path: Path) -> None:
    config = write_config(tmp_path)
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(ConfigError, match=r"run\.directory is .*file/run, which cannot be made"):
        run(config, "file/run")


@pytest.mark.parametrize("moment", ["staging", "the last write"])
def test_a_signal_outside_of_the_steps_does_not_end_the_process(
    config: Path, monkeypatch: pytest.MonkeyPatch, moment: str
) -> None:
    place, name = (Loader, "__init__") if moment == "staging" else (Checkpoints, "close")
    original = getattr(place, name)

    def signalled(*args: Any, **kwargs: Any) -> None:
        os.kill(os.getpid(), signal.SIGTERM)
        original(*args, **kwargs)

    def kill(*_: object) -> None:
        raise AssertionError("nobody noted the signal")

    before = signal.signal(signal.SIGTERM, kill)
    try:
        with monkeypatch.context() as patch:
            patch.setattr(place, name, signalled)
            summary = run(config, "run", "run.checkpoint_async=true", "run.epochs=1")
    finally:
        signal.signal(signal.SIGTERM, before)
    assert summary.finished == (moment != "staging")
    assert (summary.stopped_by, summary.progress.steps) == (
        ("SIGTERM", 0) if moment == "staging" else ("", 7)
    )
    assert run(config, "run", "run.epochs=1").finished


def test_a_second_run_in_one_directory_is_refused_before_it_stages(
    config: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where both begin in a directory that neither has made yet."""
    refused = r"run\.directory is .*run, into which process \d+ on .* writes a run; wait for it"
    with contextlib.ExitStack() as stack, monkeypatch.context() as patch:

        def take(path: Path) -> contextlib.AbstractContextManager[bool]:
            stack.enter_context(held_elsewhere(path))
            return claim(path)

        patch.setattr(outputs, "claim", take)
        patch.setattr(Loader, "__init__", None)  # nothing is staged
        with pytest.raises(ConfigError, match=refused):
            run(config, "run", "run.epochs=1")
    # Its owner was killed: nothing is left to clean up.
    run(config, "run", "run.epochs=1")


def test_a_filesystem_without_locks_is_warned_of(
    config: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(*_: object) -> None:
        raise NoLocksError(37, "No locks available")

    monkeypatch.setattr(outputs, "claim", refuse)
    run(config, "run", "run.epochs=1")
    assert "has no locks (No locks available), so that a second run in this" in caplog.text


def test_going_on_with_data_of_another_name_is_warned_of(
    config: Path, caplog: pytest.LogCaptureFixture
) -> None:
    run(config, "run", "run.epochs=1")
    run(config, "run", "run.epochs=2")
    assert "the run goes on" not in caplog.text
    assert "run.epochs was 1 when this run was started last, and is 2 now; the sch" in caplog.text
    train = Path(str(load_config(config).data.train))
    moved = train.rename(train.with_name(f"moved-{train.name}"))
    run(config, "run", "run.epochs=3", "run.max_steps=21", f"data.train={moved}")
    assert f"data.train was {train} when this run was started last, and is {moved}" in caplog.text
    assert "run.max_steps was 0 when this run was started last, and is 21" in caplog.text
    assert caplog.text.count("its curve") == 2


def test_the_keys_of_pictures_and_classes_are_found_or_named(tmp_path: Path) -> None:
    given = ("data.image=", "data.label=", "data.test=", "run.epochs=1")
    config = write_config(tmp_path)
    table = pq.read_table(tmp_path / "train.parquet")
    for number, picture in enumerate(table["png"].to_pylist()):
        place = tmp_path / "folder" / str(table["cls"][number].as_py())
        place.mkdir(parents=True, exist_ok=True)
        (place / f"{number}.png").write_bytes(picture)
    run(config, "run", *given, f"data.train={tmp_path}/folder")
    saved = read_settings(tmp_path / "run" / "config.json").data
    assert (saved.image, saved.label) == ("image", "label"), "and tonari rows reads the same"
    pq.write_table(table.append_column("img", table["png"]), tmp_path / "two.parquet")
    with pytest.raises(FieldError, match=r'hold png and img, .* choose .* \[data\] image = "png"'):
        run(config, "two", *given, f"data.train={tmp_path}/two.parquet")
    pq.write_table(table.rename_columns(["photo", "cls"]), tmp_path / "none.parquet")
    with pytest.raises(FieldError, match=r"columns photo, cls, .* as \[data\] image = KEY"):
        run(config, "none", *given, f"data.train={tmp_path}/none.parquet")
