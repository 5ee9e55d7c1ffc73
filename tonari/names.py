"""`dataio` and `tonari.dataio` are the same modules, in a checkout and in an installed wheel.

In a checkout `dataio/` lies beside `tonari/`; a wheel has it below, and beside it a small
`dataio.py` that stands for it. One of the two names is real, the other is mapped to it here. This
module runs whenever Tonari starts, so it imports little and reads little. See ADR 0020.
"""

import importlib
import importlib.util
import sys
import warnings
from collections.abc import Sequence
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import CodeType, ModuleType
from typing import Any

PARTS = ("dataio", "importance", "shuffle", "trainer", "oracle", "benchmarks")
"""The packages that a checkout has beside `tonari`."""
PUBLIC = PARTS[:3]
"""Those that a wheel too lets be imported by their own names."""

HERE = Path(__file__).parent
INSTALLED = (HERE / "dataio").is_dir()
"""Whether this is a wheel's layout."""
EXAMPLES = (HERE if INSTALLED else HERE.parent) / "examples"
NAMES = PUBLIC if INSTALLED else PARTS


def link() -> None:
    """Let both names of each module lead to it, and report names that lead to something else.

    Raises:
        ImportError: If Tonari's own code, which in a checkout uses the short names, would import
            what is not Tonari's.
    """
    sys.meta_path.insert(0, Aliases())
    messages = ["; ".join(describe(name, path)) for name, path in taken().items()]
    if messages and not INSTALLED:
        raise ImportError("\n".join(messages))
    for message in messages:
        warnings.warn(message, stacklevel=3)


def taken() -> dict[str, str]:
    """Find the names that lead elsewhere, and the file that each leads to."""
    found = {name: origin(name) for name in NAMES}
    return {name: path for name, path in found.items() if path and not _is_ours(name, path)}


def origin(name: str) -> str | None:
    """Find the file that ``import name`` runs, or has run; None if there is none."""
    if name in sys.modules:
        return getattr(sys.modules[name], "__file__", None)
    spec = importlib.util.find_spec(name)
    return spec.origin if spec else None


def expected(name: str) -> Path:
    """Say which file ``import name`` ought to run."""
    return HERE.parent / (f"{name}.py" if INSTALLED else f"{name}/__init__.py")


def describe(name: str, path: str) -> tuple[str, str]:
    """Word what a name that is taken leads to, and what to do."""
    ours = expected(name)
    found = f"`import {name}` finds {path}, expected {ours}"
    if path == str(ours):
        found = f"`import {name}` finds {path}, which another package wrote over Tonari's"
    if INSTALLED:
        return found, (
            f"write `from tonari import {name}`, which is always Tonari's, or rename that file, or "
            f"uninstall its package and install tonari again"
        )
    return found, (
        f"Tonari's own code would import the wrong one: rename that file, put {HERE.parent} before "
        f"it on PYTHONPATH, or `pip install {HERE.parent}` without -e, which needs no such name"
    )


def _is_ours(name: str, path: str) -> bool:
    if not INSTALLED:
        ours = expected(name)
        return path == str(ours) or (ours.exists() and ours.samefile(path))
    if Path(path) == HERE / name / "__init__.py":
        return True
    with open(path, "rb") as file:
        return f"from tonari import {name} as".encode() in file.read(400)


def _real(name: str) -> str | None:
    """Name what a module's other name stands for; None if it is not another name of ours."""
    first, _, rest = name.partition(".")
    if not INSTALLED:
        is_ours = first == "tonari" and rest.partition(".")[0] in PARTS
        return rest if is_ours else None
    # `dataio` itself is a file; it may be another package's, with modules of its own below.
    if not rest or first not in PUBLIC or first not in sys.modules:
        return None
    return f"tonari.{name}" if sys.modules[first] is sys.modules.get(f"tonari.{first}") else None


class Aliases:
    """Finds a module by its other name."""

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        real_name = _real(name)
        real = importlib.util.find_spec(real_name) if real_name else None
        if real is None:
            return None
        is_package = real.submodule_search_locations is not None
        # Not derived from importlib's Loader: its module takes as long to import as all else here.
        alias: Any = Alias(real)
        return ModuleSpec(name, alias, origin=real.origin, is_package=is_package)


class Alias:
    """Loads a module by its real name, so that both names have one module."""

    def __init__(self, real: ModuleSpec) -> None:
        self._real = real

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        module = importlib.import_module(self._real.name)
        self._spec = module.__spec__
        return module

    def exec_module(self, module: ModuleType) -> None:
        # The import system has put the alias's there.
        module.__spec__ = self._spec

    def get_code(self, name: str) -> CodeType | None:
        """Give what `python -m` runs."""
        code: CodeType | None = self._real.loader.get_code(self._real.name)  # type: ignore[union-attr]
        return code
