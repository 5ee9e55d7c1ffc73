"""A checkpoint that would run code when it is read is refused, unless it is trusted."""

import io
import pickle  # noqa: TID251 (what is refused is made)
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from dataio.base.atomic import read_record, write_record
from tests.trainer.digits import write_config
from tests.trainer.run.runs import run
from tonari import cli
from tonari.trainer.checkpoint import sums
from tonari.trainer.checkpoint.directory import whole_checkpoints
from tonari.trainer.checkpoint.export import read_checkpoint
from tonari.trainer.errors import CheckpointError, ConfigError

MARK: list[str] = []


def mark() -> None:
    MARK.append("ran")


class EvilMark:
    """Runs when it is unpickled."""

    def __reduce__(self) -> tuple[Callable[[], None], tuple[()]]:
        return mark, ()


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    run(write_config(tmp_path), "run", "run.epochs=1", "optimizer.momentum=0.9")
    return whole_checkpoints(tmp_path / "run/checkpoints")[-1]


def resum(checkpoint: Path) -> None:
    """Bring the sums in line, as whoever changes a checkpoint can."""
    files = read_record(checkpoint / sums.MANIFEST)["files"]
    for name in files:
        num_bytes, digest = sums._measure(checkpoint / name)
        files[name] = {"bytes": num_bytes, "xxh3_64": digest}
    write_record(checkpoint / sums.MANIFEST, {"files": files})


def in_the_list(checkpoint: Path) -> None:
    path = checkpoint / "torch" / ".metadata"
    found = pickle.loads(path.read_bytes())
    found.planner_data["evil"] = EvilMark()
    path.write_bytes(pickle.dumps(found))


def in_a_value(checkpoint: Path) -> None:
    path = checkpoint / "torch" / ".metadata"
    found = pickle.loads(path.read_bytes())
    (index,) = [one for one in found.storage_data if one.fqn.endswith("head.linear.bias.lr")]
    place = found.storage_data[index]
    data = bytearray((checkpoint / "torch" / place.relative_path).read_bytes())
    buffer = io.BytesIO()
    torch.save(EvilMark(), buffer)
    place.offset, place.length = len(data), len(buffer.getvalue())
    (checkpoint / "torch" / place.relative_path).write_bytes(data + buffer.getvalue())
    path.write_bytes(pickle.dumps(found))


@pytest.mark.parametrize("plant", [in_the_list, in_a_value])
def test_code_in_a_checkpoint_is_refused_by_name_and_does_not_run(
    checkpoint: Path, capsys: pytest.CaptureFixture[str], plant: Callable[[Path], None]
) -> None:
    assert read_checkpoint(checkpoint, optimizer=True)["model"]
    plant(checkpoint)
    resum(checkpoint)
    MARK.clear()
    refused = r"may run code; if you trust whoever wrote it.*run\.trust_checkpoints=true"
    with pytest.raises(CheckpointError, match=refused):
        read_checkpoint(checkpoint, optimizer=True)
    out = checkpoint.parents[2] / "w.pt"
    export = ["export", str(checkpoint), "--out", str(out), "--optimizer"]
    assert cli.main(export) == 1
    assert "--trust" in capsys.readouterr().err
    config = checkpoint.parents[2] / "run.toml"
    with pytest.raises((CheckpointError, ConfigError), match="may run code"):
        run(config, "run", "run.epochs=2")
    assert MARK == []
    assert cli.main([*export, "--trust"]) == 0
    assert "ran" in MARK
    run(config, "run", "run.epochs=2", "run.trust_checkpoints=true")
