"""The settings of a run, as it left them in its directory."""

from pathlib import Path
from typing import Any

from dataio.base.atomic import read_record
from dataio.base.errors import DamagedFileError
from tonari.trainer.config.config import Config, build_config
from tonari.trainer.errors import ConfigError

SETTINGS = "config.json"
"""In a run's directory: the settings of its last start."""


def read_settings(path: Path) -> Config:
    """Read the ``config.json`` that a run leaves in its directory.

    Raises:
        ConfigError: If it cannot be read, or is not of this version.
    """
    try:
        return build_config(_given(read_record(path)))
    except (OSError, DamagedFileError, ValueError, AttributeError) as error:
        raise ConfigError(
            f"{path}: cannot be read as a run's settings: {error}; give a run.directory as `tonari "
            "train` left it"
        ) from error


def find_settings(run: Path) -> Config | None:
    """Read the settings of a run, by its directory or a checkpoint in it; None: there are none."""
    for directory in (run, *run.absolute().parents[:2]):
        if (directory / SETTINGS).is_file():
            try:
                return read_settings(directory / SETTINGS)
            except ConfigError:
                return None
    return None


def _given(tables: dict[str, Any]) -> dict[str, Any]:
    """Leave out what has no value, as TOML does."""
    return {
        name: _given(value) if isinstance(value, dict) else value
        for name, value in tables.items()
        if value is not None
    }
