"""The file of figures: a line of JSON an epoch, written by rank 0."""

import json
import logging
from collections.abc import Mapping
from pathlib import Path

log = logging.getLogger(__name__)


def check_metrics(path: Path) -> None:
    """Find out now, not at the end of the first epoch, that a file cannot be written.

    Raises:
        ValueError: If it cannot.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        _append(path, "")
    except OSError as error:
        raise ValueError(
            f"metrics: {path} cannot be written ({error}); give a file in a directory that can"
        ) from error


def add_figures(path: Path, figures: Mapping[str, object]) -> None:
    """Add an epoch's line; a file that can no longer be written costs a warning."""
    try:
        _append(path, json.dumps(figures) + "\n")
    except OSError as error:
        # Weeks of training are worth more than a line of figures.
        log.warning("[rank 0] %s: the epoch's figures are lost (%s)", path, error)


def _append(path: Path, text: str) -> None:
    with path.open("a") as file:
        file.write(text)
