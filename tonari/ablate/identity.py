"""What a cell's result depends on, so that no other's is taken for it: data, settings and code."""

import ast
import hashlib
import inspect
import json
import sys
from collections.abc import Iterator, Sequence
from dataclasses import MISSING, Field, fields, is_dataclass
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any

import xxhash

from dataio import SourceError
from dataio.base.location import bare
from dataio.base.named import import_named
from dataio.source.expand import expand
from importance import find_policy
from importance.named import is_policy
from tonari.trainer.config.config import SECTIONS, Config
from tonari.trainer.config.settings import as_plain
from tonari.trainer.errors import ConfigError

RESULTS_VERSION = 2
"""Raised when the same settings give other results than before."""

NO_RESULT = {
    "data": ("train", "test", "cache", "workers"),
    "staging": ("readers", "bandwidth"),
    "run": (
        "seed", "directory", "checkpoint_epochs", "checkpoint_steps", "checkpoint_tokens",
        "checkpoint_async", "keep_checkpoints", "trust_checkpoints", "log_steps", "tensorboard",
        "prometheus", "otel", "wandb", "mlflow", "profile_steps", "peak_tflops", "timeout_s",
        "verify",
    ),
}  # fmt: skip
"""Settings by section or table that change no result, or are counted in by what they name."""

READ_BYTES = 1 << 22
MOST_READ_BYTES = 1 << 28
"""Of a file whose content is looked at; a larger one is known by its name, size and time."""


def digest(config: Config, *, seed: int, launch: Sequence[str] = ()) -> str:
    """Name what a run depends on. Reads small files of data, once as long as they do not change.

    Args:
        config: The run's settings. Those at their defaults are not counted, so that a setting that
            is added later, at what was done before, makes no other cells.
        seed: The run's.
        launch: What starts its ranks.

    Raises:
        ConfigError: If code of the user's that the settings name is not found.
    """
    settings = {
        section: changed(getattr(config, section), but=NO_RESULT.get(section, ()))
        for section in SECTIONS
    }
    data = {name: _content(getattr(config.data, name)) for name in ("train", "test")}
    found = [RESULTS_VERSION, settings, data, seed, list(launch), list(_codes(config))]
    text = json.dumps(found, sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()[:12]


def changed(section: Any, *, but: Sequence[str] = ()) -> dict[str, object]:
    """List the settings of a dataclass that are not at their defaults."""
    values = {its.name: (getattr(section, its.name), _default(its)) for its in fields(section)}
    found = {
        name: changed(value, but=NO_RESULT.get(name, ()))
        if is_dataclass(value)
        else as_plain(value)
        for name, (value, default) in values.items()
        if name not in but and value not in (default, None)
    }
    return {name: value for name, value in found.items() if value != {}}


def _default(its: Field[Any]) -> object:
    return its.default if its.default_factory is MISSING else its.default_factory()


def _content(patterns: str | Sequence[str]) -> list[str]:
    """Digest what files hold, wherever they lie and whatever their names.

    A URL stands for itself, as does a pattern that matches nothing.
    """
    found = []
    for pattern in [patterns] if isinstance(patterns, str) else patterns:
        try:
            paths = expand(pattern) if pattern else []
        except SourceError:
            folder = Path(pattern).expanduser()
            paths = sorted(str(path) for path in folder.rglob("*") if path.is_file())
        # Where Megatron's sequences begin
        beside = [f"{path[:-4]}.idx" for path in paths if path.endswith(".bin")]
        paths += [path for path in beside if Path(path).is_file()]
        found += [_file_key(path) for path in paths] or [bare(pattern)]
    return found


def _codes(config: Config) -> Iterator[str]:
    """Digest code of the user's that a run's settings name, and that of its importance policy."""
    if config.importance.kind != "full":
        try:
            yield code_key(find_policy(config.importance.kind))
        except ValueError as error:
            raise ConfigError(f"importance.kind: {error}") from error
    for key in ("model", "recipe", "optimizer"):
        kind = getattr(config, key).kind
        if ":" in kind:
            try:
                import_named(kind)
            except ImportError as error:
                raise ConfigError(
                    f'{key}.kind is "{kind}", which cannot be imported: {error}'
                ) from error
            yield _hashed(_plain(sys.modules[kind.partition(":")[0]]))


def code_key(policy: type) -> str:
    """Digest the code of a policy's module, and of policies it hands on to, without comments."""
    module = sys.modules[policy.__module__]
    named = [value for _, value in sorted(vars(module).items()) if is_policy(value)]
    others = dict.fromkeys(its.__module__ for its in named if its.__module__ != module.__name__)
    return _hashed("".join([_plain(module), *(_plain(sys.modules[name]) for name in others)]))


def _hashed(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def _plain(module: ModuleType) -> str:
    try:
        return ast.unparse(ast.parse(inspect.getsource(module)))
    except (OSError, TypeError):
        # Compiled, or made in memory.
        return module.__name__


def _file_key(path: str) -> str:
    if "://" in path:
        return bare(path)
    status = Path(path).stat()
    if status.st_size > MOST_READ_BYTES:
        return f"{Path(path).name}, {status.st_size}, {status.st_mtime_ns}"
    return _digest(path, status.st_size, status.st_mtime_ns)


@cache
def _digest(path: str, size: int, mtime_ns: int) -> str:
    """Read a file, once as long as it does not change."""
    found = xxhash.xxh3_128()
    with open(path, "rb") as file:
        while part := file.read(READ_BYTES):
            found.update(part)
    return found.hexdigest()
