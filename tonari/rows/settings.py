"""What a run of `tonari train` was made with, by the settings in its directory."""

from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path

from dataio import Field, Source, open_source
from tonari.errors import CommandError
from tonari.rows.run import RunRows, open
from tonari.trainer.config.config import Config
from tonari.trainer.config.saved import SETTINGS, find_settings
from tonari.trainer.errors import ConfigError
from tonari.trainer.run.build import make_fields, training_source
from tonari.trainer.run.own import own_of
from tonari.trainer.run.tiled import uncut


def open_run(path: Path, sources: Sequence[str], *, log: Path | None) -> RunRows:
    """Open a run as commands do: on the dataset that is named, or else on the one it trained on.

    Shards are opened by the run's own settings, where it has some.

    Args:
        path: The run, as of `tonari.rows.run.open`.
        sources: The dataset's names; none: that of the run's own settings, where it has some.
        log: Likewise.

    Raises:
        StateError: If there is no log, or it is damaged.
        ValueError: If the shuffle is not the run's.
    """
    given = sources[0] if len(sources) == 1 else [*sources] or None
    run, config = open(path, source=given, log=log), find_settings(path)
    if given is None and config is not None:
        run.given = partial(open_trained_on, config)
    elif given is not None and config is not None and config.data.joined:
        run.given = partial(open_source, given, joined=True)
    return run


def open_trained_on(config: Config) -> Source:
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
    """Find the fields that a run reads of a sample, whole where its ranks have tiles.

    Raises:
        CommandError: If it is no run of `tonari train`.
    """
    if config is None:
        raise CommandError(
            f"--replay: {run} has no {SETTINGS} of tonari train, expected one, which names the "
            "fields; call tonari.rows.open(run).replay(fields=...), or Loader.replay, instead"
        )
    return uncut(make_fields(config, own_of(config)))
