"""Whose code `import dataio` runs, and where the examples lie. See ADR 0028.

This module runs whenever Tonari starts, so it imports little and reads little.
"""

import importlib.util
import sys
from pathlib import Path

NAMES = ("dataio", "importance", "shuffle")
"""The packages beside `tonari`, in a checkout and where a wheel was installed."""

HERE = Path(__file__).parent
EXAMPLES = next(
    (path for path in (HERE / "examples", HERE.parent / "examples") if path.is_dir()),
    HERE.parent / "examples",
)
"""Below `tonari` where a wheel was installed, beside it in a checkout."""


def require_names() -> None:
    """Find that each name leads to the package beside `tonari`.

    Raises:
        ImportError: If one leads to another's file, which Tonari's own code would import.
    """
    messages = ["; ".join(describe(name, path)) for name, path in taken().items()]
    if messages:
        raise ImportError("\n".join(messages))


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
    return HERE.parent / name / "__init__.py"


def describe(name: str, path: str) -> tuple[str, str]:
    """Word what a name that is taken leads to, and what to do."""
    return f"`import {name}` finds {path}, expected {expected(name)}", (
        f"Tonari's own code would import the wrong one: rename that file, or put {HERE.parent} "
        "before it on PYTHONPATH"
    )


def _is_ours(name: str, path: str) -> bool:
    ours = expected(name)
    return path == str(ours) or (ours.exists() and ours.samefile(path))
