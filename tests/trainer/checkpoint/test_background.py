"""A checkpoint that is written while training goes on."""

import threading
from pathlib import Path
from traceback import StackSummary
from typing import Any

import pytest
from torch.distributed.checkpoint.api import CheckpointException

from tests.trainer.checkpoint.start import Start
from tonari.trainer.checkpoint import checkpoint
from tonari.trainer.checkpoint.checkpoint import Checkpoints
from tonari.trainer.checkpoint.restore import find
from tonari.trainer.checkpoint.sums import write_sums
from tonari.trainer.errors import CheckpointError

pytestmark = pytest.mark.usefixtures("one_rank")

TORCHS = CheckpointException("", {0: (OSError("no space left"), StackSummary())})
"""What torch raises of a file that it could not write: no Exception."""


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


@pytest.mark.parametrize("failure", [OSError("no space left"), TORCHS], ids=["ours", "torch's"])
@pytest.mark.parametrize("later", ["save", "flush", "close"])
def test_a_failure_in_the_background_is_reported_by_the_next_call_and_the_run_may_go_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, later: str, failure: BaseException
) -> None:
    def fail(*args: object) -> None:
        raise failure

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
    assert raised.value.__cause__ is failure
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
    checkpoints.flush()
    assert written_after == [True]
