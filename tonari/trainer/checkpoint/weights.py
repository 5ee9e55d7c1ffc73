"""Read weights in Hugging Face's layout: each rank takes its own part of each tensor.

A file is opened for one tensor at a time, and closed again: what was read of it does not stay in
memory beside the parameters.
"""

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import cast

from torch import Tensor, nn

from tonari.trainer.errors import ConfigError
from tonari.trainer.mesh.materialize import own_part
from tonari.trainer.models import HubFormat, StagedModel, Stored
from tonari.trainer.models.staged import aliases_of

ONE_FILE = "model.safetensors"
INDEX = "model.safetensors.index.json"
CONFIG = "config.json"
MOST_NAMES = 4
"""In a message."""


class WeightFiles:
    """The tensors of one file, or of a directory's files, by name.

    Args:
        path: A ``.safetensors`` file, or a directory with ``model.safetensors``, or with
            ``model.safetensors.index.json`` and the files that it names.

    Attributes:
        path: As given.
        config: What the directory's ``config.json`` says; empty if there is none.

    Raises:
        ConfigError: If there are no such files, or one cannot be read.
    """

    def __init__(self, path: Path) -> None:
        self.path, self.config = path, read_hub_config(path)
        self._files = _files_by_name(path)
        self._shapes: dict[str, tuple[int, ...]] = {}
        for file in sorted(set(self._files.values())):
            its = {name for name, where in self._files.items() if where == file}
            self._shapes |= {name: s for name, s in _shapes_in(file).items() if name in its}

    def check(self, model: StagedModel) -> None:
        """See that the files hold the whole model, and nothing else.

        Args:
            model: The whole one; may be on the meta device.

        Raises:
            ConfigError: Names tensors that are missing, or not expected, or of another shape.
        """
        form, kind = model.hub_format(), type(model).__name__
        expected = {
            form.stored(name).name: form.stored(name).shape_there(tuple(value.shape))
            for name, value in _kept(model, form)
        }
        ignored = [re.compile(pattern) for pattern in form.ignored]
        missing = [name for name in expected if name not in self._shapes]
        more = [
            name
            for name in self._shapes
            if name not in expected and not any(each.fullmatch(name) for each in ignored)
        ]
        if missing:
            others = f" and others, such as {more[0]}" if more else ""
            raise ConfigError(
                f"{self.path}: {_some(missing)} missing, found {len(expected) - len(missing)} of "
                f"the {len(expected)} tensors of this {kind}{others}; set [model] as the model "
                "that the files are of, or complete the files"
            )
        if more:
            raise ConfigError(
                f"{self.path}: {_some(more)} not expected, found the {len(expected)} tensors of "
                f"this {kind} and {len(more)} more; set [model] as the model that the files are "
                "of, or give other model.weights"
            )
        for name, shape in expected.items():
            if self._shapes[name] != shape:
                raise ConfigError(
                    f"{self.path}: {name} is {list(self._shapes[name])}, expected {list(shape)} as "
                    f"this {kind} has it; set [model] as the model that the files are of, or give "
                    "other model.weights"
                )

    def read_into(self, parts: Sequence[nn.Module]) -> None:
        """Fill parameters and buffers, this rank's part of each, after `check`.

        Args:
            parts: As ``parallelize`` returned them, on any mesh.
        """
        for part in parts:
            form = part.hub_format() if isinstance(part, StagedModel) else HubFormat()
            first_names = {**aliases_of(part), **getattr(part, "first_names", {})}
            held = part.state_dict(keep_vars=True)
            for name, value in held.items():
                # A tied weight may be here by a further name alone, its first on another stage.
                first = first_names.get(name, name)
                if first != name and first in held:
                    continue
                own, offsets = own_part(value.detach())
                if own.numel():
                    self._fill(own, form.stored(first), offsets)

    def _fill(self, own: Tensor, stored: Stored, offsets: tuple[int, ...]) -> None:
        """Copy a part of a tensor into its place here, given where that part begins here."""
        from safetensors import safe_open

        with safe_open(self._files[stored.name], framework="pt") as file:
            if not own.dim():
                own.copy_(file.get_tensor(stored.name).reshape(()))
                return
            lazy = file.get_slice(stored.name)
            ranges = [slice(a, a + n) for a, n in zip(offsets, own.shape, strict=True)]
            num_filled = 0
            for rows in _runs(ranges[0], stored.order):
                mine = [rows, *ranges[1:]]
                there = [slice(0, 1)] * stored.leading + (mine[::-1] if stored.transposed else mine)
                piece: Tensor = lazy[tuple(there)]
                piece = piece.reshape(piece.shape[stored.leading :])
                piece = piece.T if stored.transposed else piece
                # The file's own memory, read as it is copied.
                own[num_filled : num_filled + len(piece)].copy_(piece)
                num_filled += len(piece)


def read_hub_config(path: Path) -> Mapping[str, object]:
    """Read the ``config.json`` of a directory; empty if there is none.

    Raises:
        ConfigError: If it cannot be read, or there is no such directory.
    """
    if not path.exists():
        raise _no_files(path)
    file = path / CONFIG
    return _read_object(file) if file.is_file() else {}


def _files_by_name(path: Path) -> dict[str, Path]:
    if path.is_file():
        return dict.fromkeys(_shapes_in(path), path)
    if (path / INDEX).is_file():
        names = _read_object(path / INDEX).get("weight_map")
        if not isinstance(names, dict) or not all(isinstance(f, str) for f in names.values()):
            raise ConfigError(
                f"{path / INDEX}: found no weight_map of names and files, expected one; bring the "
                "file back from where the weights came from"
            )
        # A name in an index leads nowhere but beside it.
        return {name: path / Path(file).name for name, file in names.items()}
    if (path / ONE_FILE).is_file():
        return dict.fromkeys(_shapes_in(path / ONE_FILE), path / ONE_FILE)
    raise _no_files(path)


def _no_files(path: Path) -> ConfigError:
    found = ", ".join(sorted(p.name for p in path.iterdir())[:MOST_NAMES]) if path.is_dir() else ""
    return ConfigError(
        f"model.weights is {path}, found {found or 'nothing'}, expected a .safetensors file, or a "
        f"directory with {ONE_FILE} or {INDEX}; give the path of one, or leave it out to begin "
        "with random weights"
    )


def _read_object(path: Path) -> dict[str, object]:
    try:
        found = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"{path}: cannot be read as JSON: {error}; bring it back from where the weights came "
            "from"
        ) from error
    if not isinstance(found, dict):
        raise ConfigError(
            f"{path}: found a JSON {type(found).__name__}, expected an object; bring it back from "
            "where the weights came from"
        )
    return found


def _shapes_in(file: Path) -> dict[str, tuple[int, ...]]:
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(file, framework="pt") as opened:
            names: list[str] = opened.keys()
            return {name: tuple(opened.get_slice(name).get_shape()) for name in names}
    except (SafetensorError, OSError) as error:
        raise ConfigError(
            f"{file}: cannot be read as safetensors: {error}; bring it back from where the weights "
            "came from"
        ) from error


def _kept(model: nn.Module, form: HubFormat) -> Iterator[tuple[str, Tensor]]:
    """List parameters and buffers that files hold, each once."""
    for name, value in model.state_dict(keep_vars=True).items():
        if name not in form.aliases:
            yield name, cast(Tensor, value)


def _runs(rows: slice, order: Tensor | None) -> list[slice]:
    """Find the ranges of rows there that are these rows here, in order."""
    if order is None:
        return [rows]
    there = order[rows].tolist()
    breaks = [i for i in range(1, len(there)) if there[i] != there[i - 1] + 1]
    begins, ends = [0, *breaks], [*breaks, len(there)]
    return [slice(there[a], there[b - 1] + 1) for a, b in zip(begins, ends, strict=True)]


def _some(names: Sequence[str]) -> str:
    shown = ", ".join(names[:MOST_NAMES])
    more = len(names) - MOST_NAMES
    return f"{shown}{f' and {more} more' if more > 0 else ''} {'is' if len(names) == 1 else 'are'}"
