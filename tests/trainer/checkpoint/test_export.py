"""A checkpoint becomes one plain file that the plain model takes."""

import importlib.util
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.state_dict import StateDictOptions, set_optimizer_state_dict

from dataio.job.launch import join
from tests.trainer.deliver.fake_loader import NUM_CLASSES, FakeLoader, whole_weights
from tests.trainer.run.alone import one_stage, step_loss
from tonari.cli import main
from tonari.trainer.checkpoint.checkpoint import Checkpoints
from tonari.trainer.checkpoint.directory import Progress
from tonari.trainer.mesh.mesh import axis_sizes, make_mesh
from tonari.trainer.mesh.parallelize import parallelize
from tonari.trainer.models import ResNet, seeded


def make_model(seed: int = 0) -> ResNet:
    return seeded(lambda: ResNet(NUM_CLASSES, depth=8, norm="batch"), seed=seed)


class TrainedSteps:
    """A model, what it holds, and a run directory with a checkpoint of it."""

    def __init__(self, directory: Path) -> None:
        mesh = make_mesh(axis_sizes(1), device_type="cpu")
        (self.model,) = parallelize(make_model(), mesh)
        optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.01)
        loader = FakeLoader(replica=0, num_replicas=1, global_batch_size=8, steps=3)
        pipeline = one_stage(self.model, mesh, batch_size=8)
        for batch in loader:
            step_loss(pipeline, optimizer, loader, batch)
        self.optimizer = optimizer
        self.run = directory
        with Checkpoints(directory / "checkpoints", keep=1) as checkpoints:
            self.path = checkpoints.save([self.model], optimizer, loader, Progress(0, 3))


@pytest.fixture
def trained(tmp_path: Path) -> Iterator[TrainedSteps]:
    with join(device="cpu"):
        made = TrainedSteps(tmp_path)
        made.weights = whole_weights(made.model)  # type: ignore[attr-defined]
        made.averages = [b.clone() for b in made.model.buffers()]  # type: ignore[attr-defined]
        yield made


def load(out: Path) -> Any:
    if out.suffix == ".pt":
        return torch.load(out, weights_only=True)
    from safetensors.torch import load_file

    return load_file(out)


@pytest.mark.parametrize("suffix", [".pt", ".safetensors"])
@pytest.mark.parametrize("given", ["path", "run"])
def test_the_plain_model_takes_the_file_and_holds_what_was_trained(
    trained: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str], suffix: str, given: str
) -> None:
    if suffix == ".safetensors" and importlib.util.find_spec("safetensors") is None:
        pytest.skip("safetensors is not installed: the extra tonari[export]")
    out = tmp_path / f"model{suffix}"
    assert main(["export", str(getattr(trained, given)), "--out", str(out)]) == 0
    (tmp_path / "other").touch()
    assert out.stat().st_mode == (tmp_path / "other").stat().st_mode, "others may read it too"
    plain = make_model(seed=1)
    plain.load_state_dict(load(out), strict=True)
    assert all(map(torch.equal, plain.parameters(), trained.weights))
    assert all(map(torch.equal, plain.buffers(), trained.averages))
    assert "step-00000003" in capsys.readouterr().out


def test_the_optimizer_goes_on_from_the_file(trained: Any, tmp_path: Path) -> None:
    out = tmp_path / "model.pt"
    assert main(["export", str(trained.path), "--out", str(out), "--optimizer"]) == 0
    plain = make_model()
    optimizer = torch.optim.AdamW(plain.parameters(), lr=1.0)
    set_optimizer_state_dict(
        plain, optimizer, load(out)["optimizer"],
        options=StateDictOptions(flatten_optimizer_state_dict=True),
    )  # fmt: skip
    assert optimizer.param_groups[0]["lr"] == 0.01
    for found, weight in zip(plain.parameters(), trained.model.parameters(), strict=True):
        expected = trained.optimizer.state[weight]
        assert torch.equal(optimizer.state[found]["exp_avg"], expected["exp_avg"])
        assert float(optimizer.state[found]["step"]) == 3


def test_what_cannot_be_exported_is_said(
    trained: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    def said(*argv: str) -> str:
        assert main(["export", *argv]) == 1
        return capsys.readouterr().err

    path, out = str(trained.path), str(tmp_path / "model.pt")
    assert "ends with .safetensors or .pt; name it so" in said(path, "--out", "model.bin")
    assert "give --out model.pt" in said(path, "--out", "model.safetensors", "--optimizer")
    assert "found no checkpoint, expected a step-NUMBER" in said(str(tmp_path / "x"), "--out", out)
    assert "cannot be written" in said(path, "--out", str(tmp_path / "absent/model.pt"))
    if importlib.util.find_spec("safetensors"):
        absent = str(tmp_path / "absent/model.safetensors")
        assert "cannot be written" in said(path, "--out", absent)

    read = FileSystemReader.read_metadata

    def without_a_chunk(reader: FileSystemReader) -> Any:
        metadata: Any = read(reader)
        metadata.state_dict_metadata["model.head.linear.weight"].chunks.clear()
        return metadata

    with monkeypatch.context() as patch:
        patch.setattr(FileSystemReader, "read_metadata", without_a_chunk)
        assert "model.head.linear.weight is [4, 64], 256 numbers, but" in said(path, "--out", out)
    next(trained.path.glob("torch/*.distcp")).write_bytes(b"damaged")
    assert ".distcp is damaged" in said(path, "--out", out)
    assert not Path(out).exists()
