"""The trainer refuses a torch that it was never tried on, in one message; the rest takes more."""

import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from dataio.base import toml
from dataio.base.errors import install_command
from tonari import checks, cli
from tonari.trainer.torch_range import RANGE, TorchVersionError, check_torch

PROJECT = toml.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())["project"]
NOTICE = (
    r"trainer: found torch 2.4.0\+cu121, expected torch>=2.11,<2.16, .*; "
    r"run `pip install .*\[trainer\]'`, or use dataio"
)


@pytest.fixture
def old_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    """A process with torch 2.4, which has not imported the trainer yet."""
    monkeypatch.setattr(torch, "__version__", "2.4.0+cu121")
    for name in [name for name in sys.modules if name.startswith("tonari.trainer")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.delattr("tonari.trainer", raising=False)


@pytest.mark.parametrize(
    "version",
    ["2.11.0+cu130", "2.12.1", "2.13.1+cpu", "2.14.0a0+gitfe42b", "2.15.0a0+50eac811a6.nv26.09"],
)
def test_any_build_within_the_range_is_taken(version: str) -> None:
    check_torch(version)


@pytest.mark.parametrize("version", ["2.4.0+cu121", "2.10.1", "2.16.0", "3.0.0", "1.13.1", "main"])
def test_any_other_is_refused(version: str) -> None:
    with pytest.raises(TorchVersionError, match=re.escape(f"found torch {version}, expected")):
        check_torch(version)


@pytest.mark.usefixtures("old_torch")
def test_importing_the_trainer_or_a_part_of_it_raises_that_one_message() -> None:
    with pytest.raises(ImportError, match=NOTICE):
        import tonari.trainer
    with pytest.raises(ImportError, match=NOTICE):
        import tonari.trainer.config.config  # noqa: F401


@pytest.mark.usefixtures("old_torch")
def test_a_command_that_trains_prints_it_and_nothing_else(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in [name for name in sys.modules if name.startswith("tonari.train")]:
        monkeypatch.delitem(sys.modules, name)
    assert cli.main(["train", "a.toml"]) == cli.FAILED
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 1
    assert re.match(f"tonari train: {NOTICE}", lines[0])


@pytest.mark.usefixtures("old_torch")
def test_the_doctor_names_the_range_and_the_cure() -> None:
    finding = checks.check_trainer()
    assert finding.verdict == "look"
    assert "expected torch>=2.11,<2.16" in finding.found
    assert finding.cure.startswith(f"run `{install_command('trainer')}`")


def test_the_doctor_is_content_with_this_torch() -> None:
    assert checks.check_trainer().verdict == "fine"


def test_the_extra_asks_for_what_the_trainer_takes() -> None:
    assert PROJECT["optional-dependencies"]["trainer"] == [f"torch{RANGE}"]
    assert "torch>=2.4" in PROJECT["dependencies"]


def test_the_oldest_python_is_the_doctors_too() -> None:
    assert PROJECT["requires-python"] == ">=" + ".".join(map(str, checks.OLDEST_PYTHON))


def test_the_data_layer_is_imported_without_the_trainer() -> None:
    program = (
        "import sys; sys.modules['tonari.trainer'] = None\n"
        "import dataio, shuffle, shuffle.models, importance, tonari.pack.command\n"
        "import tonari.cache.command, tonari.doctor, tonari.simulate.command\n"
    )
    subprocess.run([sys.executable, "-c", program], timeout=240, check=True)
