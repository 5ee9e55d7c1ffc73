"""What a source knows of some samples: label, name, place, image."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from dataio import Field, FieldError, Float, Image, Int, Source, Text
from dataio.source import ImageFolderSource
from dataio.source.base import ShardedSource
from dataio.source.names import IMAGE_KEYS, LABEL_KEYS, fields_there
from tonari.errors import CommandError

LABEL_KINDS: tuple[type[Field], ...] = (Int, Float, Text)


def find_image(source: Source, given: str | None) -> Field | None:
    """Find the field of the image: the one named, which must be there, or a usual one.

    Raises:
        FieldError: If the one named is not there.
    """
    return _find(source, given, IMAGE_KEYS, (Image,))


def find_label(source: Source, given: str | None) -> Field | None:
    """Find the field of the label, likewise; a whole number, a number or text."""
    return _find(source, given, LABEL_KEYS, LABEL_KINDS)


def _find(
    source: Source, given: str | None, usual: Sequence[str], kinds: Sequence[type[Field]]
) -> Field | None:
    try:
        return next(fields_there(source, [given] if given else usual, kinds))
    except FieldError:
        if given:
            raise
        return None


def find_places(source: Source, sample_ids: NDArray[np.int64]) -> list[tuple[str, int | None]]:
    """Find in which shard each sample lies, and as which of its samples, from 0 (None: unknown)."""
    if isinstance(source, ShardedSource):
        firsts = np.array([shard.first for shard in source.shards])
        at = np.searchsorted(firsts, sample_ids, side="right") - 1
        positions = sample_ids - firsts[at]
        return [
            (source.shards[shard].path, position)
            for shard, position in zip(at.tolist(), positions.tolist(), strict=True)
        ]
    return [(source.name, None)] * len(sample_ids)


def name_classes(source: Source, given: str | None) -> Mapping[str, str]:
    """Name the labels.

    Args:
        source: An image folder has names of its own.
        given: Names with commas between them, or a file: ``.json`` with a list, else a name a line.

    Returns:
        Names, by the label as text.

    Raises:
        CommandError: If the file is not there, or holds something else.
    """
    names: object = []
    if given is None:
        names = source.classes if isinstance(source, ImageFolderSource) else []
    elif "," in given and not Path(given).exists():
        names = given.split(",")
    else:
        names = _read_names(Path(given))
    if not isinstance(names, list):
        raise CommandError(
            f"--classes {given}: found a {type(names).__name__}, expected a list of names, that of "
            "label 0 first; write it so"
        )
    return {str(label): str(name).strip() for label, name in enumerate(names)}


def _read_names(path: Path) -> object:
    try:
        text = path.read_text()
        return json.loads(text) if path.suffix == ".json" else text.splitlines()
    except (OSError, ValueError) as error:
        raise CommandError(
            f"--classes {path}: cannot be read ({error}), expected a file of names, or names with "
            "commas between them; correct it"
        ) from error
