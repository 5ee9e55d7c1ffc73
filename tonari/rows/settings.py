"""What a run of `tonari train` was made with, by the settings in its directory."""

from collections.abc import Mapping
from pathlib import Path

from dataio import Field, Source
from tonari.errors import CommandError
from trainer.config.config import Config
from trainer.config.saved import read_settings
from trainer.errors import ConfigError
from trainer.run.build import make_fields, training_source
from trainer.run.own import Own

SETTINGS = "config.json"


def find_settings(run: Path) -> Config | None:
    """Read the settings of a run, by its directory or a checkpoint in it; None: there are none."""
    for directory in (run, *run.absolute().parents[:2]):
        if (directory / SETTINGS).is_file():
            try:
                return read_settings(directory / SETTINGS)
            except ConfigError:
                return None
    return None


def open_dataset(config: Config) -> Source:
    """Open what a run trained on.

    Raises:
        ValueError: If the settings name none that is there.
        DataioError: If it cannot be read.
    """
    try:
        return training_source(config)
    except ConfigError as error:
        raise ValueError(str(error)) from error


def find_fields(config: Config | None, run: Path) -> Mapping[str, Field]:
    """Find the fields that a run reads of a sample.

    Raises:
        CommandError: If it is no run of `tonari train`.
    """
    if config is None:
        raise CommandError(
            f"--replay: {run} has no {SETTINGS} of tonari train, expected one, which names the "
            "fields; call tonari.rows.open(run).replay(fields=...), or Loader.replay, instead"
        )
    return make_fields(config, Own())
