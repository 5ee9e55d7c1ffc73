"""Make a policy by its name, as settings files do."""

import functools
import inspect
import sys
from typing import TypeGuard

from dataio.base.checked import nearest
from dataio.base.named import import_named
from dataio.plan.policies import Importance

ASKED = ("columns", "select", "due")
"""What the loader asks of every policy."""


def is_policy(value: object) -> TypeGuard[type[Importance]]:
    """Whether a value is the class of a policy."""
    is_class = inspect.isclass(value) and not getattr(value, "_is_protocol", False)
    return is_class and all(hasattr(value, asked) for asked in ASKED)


@functools.cache
def policies() -> dict[str, type[Importance]]:
    """List the policies that this package exports, each by the name of its module, as in files."""
    found = vars(sys.modules[__name__.rpartition(".")[0]])
    return {
        value.__module__.rpartition(".")[2]: value for value in found.values() if is_policy(value)
    }


def find_policy(name: str) -> type[Importance]:
    """Find the class of a policy.

    Args:
        name: One of `policies`, or ``"package.module:Class"`` of one's own.

    Raises:
        ValueError: If there is no such policy, or the class is not one.
    """
    if ":" not in name:
        _check_known("importance", name, list(policies()), ", or package.module:Class of your own")
        return policies()[name]
    try:
        found = import_named(name)
    except ImportError as error:
        raise ValueError(f"importance {name!r} cannot be imported: {error}") from error
    if not is_policy(found):
        missing = [asked for asked in ASKED if not hasattr(found, asked)]
        kind = "a class" if isinstance(found, type) else f"a {type(found).__name__}"
        raise ValueError(
            f"importance {name!r} is {kind} without {', '.join(missing) or 'a class of its own'}, "
            f"expected a class with {', '.join(ASKED)}, as dataio.Importance says; "
            "give it these"
        )
    return found


def make_policy(name: str, **settings: object) -> Importance:
    """Make a policy.

    Args:
        name: One of `policies`, or ``"package.module:Class"`` of one's own.
        settings: Its arguments.

    Raises:
        ValueError: If there is no such policy, it takes no such setting, or a value is out of
            range.
    """
    made_by = find_policy(name)
    known = settings_of(made_by)
    for setting in settings:
        _check_known(f"importance {name!r}: setting", setting, known)
    try:
        return made_by(**settings)
    except TypeError as error:
        raise ValueError(f"importance {name!r}: {error}; it takes {', '.join(known)}") from error


def settings_of(policy: type[Importance]) -> list[str]:
    """List the settings that a policy takes."""
    return list(inspect.signature(policy).parameters)


def _check_known(what: str, name: str, known: list[str], besides: str = "") -> None:
    if name not in known:
        near = nearest(name, known)
        hint = f"; did you mean {near!r}?" if near else ""
        listed = ", ".join(known) or "none"
        raise ValueError(f"{what} {name!r} is unknown, expected one of {listed}{besides}{hint}")
