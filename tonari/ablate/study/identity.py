"""What a cell's result depends on, so that no other's is taken for it: data, settings and code."""

import ast
import hashlib
import inspect
import sys
from dataclasses import MISSING, Field, fields
from functools import cache
from pathlib import Path
from typing import Any

import xxhash

from dataio import SourceError
from dataio.source.expand import expand

READ_BYTES = 1 << 22


def changed(section: Any) -> dict[str, object]:
    """List the settings of a dataclass that are not at their defaults.

    So a setting that is added later, at what was done before, makes no other cells.
    """
    return {
        each.name: getattr(section, each.name)
        for each in fields(section)
        if getattr(section, each.name) != _default(each)
    }


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
    return [_file_key(path) for path in paths] or [pattern]


def code_key(policy: object) -> str:
    """Digest the code of the module that a policy's class is in, without comments."""
    tree = ast.parse(inspect.getsource(sys.modules[type(policy).__module__]))
    return hashlib.sha256(ast.unparse(tree).encode()).hexdigest()


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
