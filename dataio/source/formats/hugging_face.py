"""A dataset that Hugging Face's ``save_to_disk`` wrote: which files, in which order."""

import json
from collections.abc import Mapping
from pathlib import Path

from dataio.base.errors import SourceError

STATE, INFO, DICT = "state.json", "dataset_info.json", "dataset_dict.json"
INDICES = ("_indices_data_files", "_indices_files")


def dataset_shards(directory: Path) -> list[str] | None:
    """List the Arrow files of a dataset in their order; None if the directory holds none.

    Raises:
        SourceError: If it holds several splits, or rows chosen from files by their number.
    """
    if (directory / DICT).is_file():
        splits = _load(directory / DICT).get("splits")
        shown = ", ".join(map(str, splits)) if isinstance(splits, list) else "some"
        raise SourceError(
            f"{directory}: holds a dataset of the splits {shown}, expected one of them; name it: "
            f"{directory}/<split>"
        )
    if not ((directory / STATE).is_file() and (directory / INFO).is_file()):
        return None
    state = _load(directory / STATE)
    if any(state.get(key) for key in INDICES):
        raise SourceError(
            f"{directory}: {STATE} chooses rows by an indices file, expected rows as they lie; "
            "write it again: dataset.flatten_indices().save_to_disk(...)"
        )
    files = state.get("_data_files")
    try:
        names = [str(file["filename"]) for file in files] if isinstance(files, list) else []
    except (TypeError, KeyError):
        names = []
    if not names:
        raise SourceError(
            f"{directory / STATE}: names no data files, expected their names in '_data_files'; "
            "write the dataset again with save_to_disk"
        )
    return [str(directory / name) for name in names]


def class_names(metadata: Mapping[bytes, bytes] | None, key: str) -> list[str] | None:
    """Name the classes of a column, from what Hugging Face wrote into the schema of its files.

    Args:
        metadata: Of the schema.
        key: The column.
    """
    try:
        document = json.loads((metadata or {}).get(b"huggingface", b"{}"))
        names = document["info"]["features"][key]["names"]
    except (ValueError, TypeError, KeyError):
        return None
    return [str(name) for name in names] if isinstance(names, list) else None


def _load(path: Path) -> dict[str, object]:
    try:
        document = json.loads(path.read_bytes())
    except (OSError, ValueError) as error:
        raise SourceError(
            f"{path}: does not read as JSON ({error}), expected what save_to_disk writes; copy or "
            "write the dataset again"
        ) from error
    return document if isinstance(document, dict) else {}
