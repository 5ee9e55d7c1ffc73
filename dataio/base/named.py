"""Import what a settings file names as ``package.module:Name``."""

import importlib
import sys
from pathlib import Path


def import_named(path: str) -> object:
    """Import a class or function; the working directory is looked in last.

    Args:
        path: ``"package.module:Name"``.

    Raises:
        ImportError: If there is none, whatever the reason.
    """
    module, _, name = path.partition(":")
    here = str(Path.cwd())
    if here not in sys.path and "" not in sys.path:
        # As `python -m` has it; an installed command has its own directory there.
        sys.path.append(here)
    try:
        found: object = getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError, ValueError) as error:
        raise ImportError(
            f"{error}; give a name that `python -c "
            f'"from {module or "package"} import {name or "Name"}"` finds, from the directory '
            "that the command runs in or PYTHONPATH"
        ) from error
    return found
