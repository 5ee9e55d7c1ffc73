"""What a cell's result depends on, so that no other's is taken for it: data, settings and code."""

import ast
import hashlib
import inspect
import sys
from collections.abc import Mapping
from dataclasses import MISSING, Field, fields
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any

import xxhash

from dataio import SourceError
from dataio.base.location import bare
from dataio.source.expand import expand
from importance.named import is_policy

READ_BYTES = 1 << 22


def changed(section: Any, *, was: Mapping[str, object]) -> dict[str, object]:
    """List the settings of a dataclass that are not at their defaults.

    So a setting that is added later, at what was done before, makes no other cells.

    Args:
        section: The settings.
        was: Defaults that were others when the setting was added: no setting at these is listed.
    """
    values = {each.name: getattr(section, each.name) for each in fields(section)}
    left_out = {each.name: was.get(each.name, _default(each)) for each in fields(section)}
    return {name: value for name, value in values.items() if value not in (left_out[name], None)}


def _default(each: Field[Any]) -> object:
    return each.default if each.default_factory is MISSING else each.default_factory()


def content_key(pattern: str) -> list[str]:
    """Digest what the files hold that a pattern names, wherever they lie and whatever their names.

    A URL stands for itself, as does a pattern that matches nothing.
    """
    try:
        paths = expand(pattern)
    except SourceError:
        folder = Path(pattern).expanduser()
        paths = sorted(str(path) for path in folder.rglob("*") if path.is_file())
    return [_file_key(path) for path in paths] or [bare(pattern)]


def code_key(policy: object) -> str:
    """Digest the code of a policy's module, and of policies it hands on to, without comments."""
    module = sys.modules[type(policy).__module__]
    named = [value for _, value in sorted(vars(module).items()) if is_policy(value)]
    others = dict.fromkeys(each.__module__ for each in named if each.__module__ != module.__name__)
    codes = [_plain(module), *(_plain(sys.modules[name]) for name in others)]
    return hashlib.sha256("".join(codes).encode()).hexdigest()


def _plain(module: ModuleType) -> str:
    return ast.unparse(ast.parse(inspect.getsource(module)))


def _file_key(path: str) -> str:
    if "://" in path:
        return path
    status = Path(path).stat()
    return _digest(path, status.st_size, status.st_mtime_ns)


@cache
def _digest(path: str, size: int, mtime_ns: int) -> str:
    """Read a file, once as long as it does not change."""
    found = xxhash.xxh3_128()
    with open(path, "rb") as file:
        while part := file.read(READ_BYTES):
            found.update(part)
    return found.hexdigest()
