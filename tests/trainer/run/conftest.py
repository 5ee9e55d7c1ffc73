"""What the tests of whole runs share."""

from pathlib import Path

import pytest

from dataio import Loader
from tests.trainer.digits import write_config


@pytest.fixture(autouse=True)
def _elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A run that is given no directory of its own leaves nothing in the tree."""
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def config(tmp_path: Path) -> Path:
    """A small run's configuration, and its data."""
    return write_config(tmp_path)


@pytest.fixture
def unstaged(monkeypatch: pytest.MonkeyPatch) -> None:
    """No data is staged: what is refused is refused before."""

    def stage(*args: object, **kwargs: object) -> None:
        raise AssertionError("staged")

    monkeypatch.setattr(Loader, "__init__", stage)
