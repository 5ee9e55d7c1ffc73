"""What the tests of whole runs share."""

from pathlib import Path

import pytest

from tests.trainer.digits import write_config


@pytest.fixture
def config(tmp_path: Path) -> Path:
    """A small run's configuration, and its data."""
    return write_config(tmp_path)
