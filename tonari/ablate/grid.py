"""Arms that differ in some values: a grid of a study's file, written out. Pure."""

import re
from collections.abc import Collection, Iterator, Mapping
from itertools import product

from tonari.trainer.config.settings import apply_override, check_known
from tonari.trainer.errors import ConfigError

TEMPLATES = ("name", "against")
"""Keys of a grid whose text names settings in braces."""

_IN_BRACES = re.compile(r"\{\{|\}\}|\{([^{}]*)\}")


def expand_grid(
    grid: str, table: Mapping[str, object], known: Collection[str]
) -> list[tuple[str, dict[str, object]]]:
    """Make an arm for each combination of a grid's values; the last key varies fastest.

    Args:
        grid: Its name, which begins the arms' names.
        table: An arm's, in which a list is of values to try: a setting that is a list itself is a
            list of lists. ``name``, where it is there, is a template of the arms' names, such as
            ``"{importance.kind} {importance.fraction}"``; so is ``against``.
        known: Keys of an arm.

    Returns:
        Name and table of each arm.

    Raises:
        ConfigError: If a key is unknown, a list is empty, or the template asks for what the grid
            does not set.
    """
    where = f"grid.{grid}"
    for key in table:
        check_known(f"{where}.{key}", {f"{where}.{name}": None for name in ("name", *known)})
    choices = {
        path: _choices(f"{where}.{'.'.join(path)}", value)
        for path, value in leaves({k: v for k, v in table.items() if k not in TEMPLATES})
    }
    varying = [f"{{{'.'.join(path)}}}" for path, values in choices.items() if len(values) > 1]
    names = {"name": ", ".join([grid.replace("{", "{{").replace("}", "}}"), *varying])} | {
        key: table[key] for key in TEMPLATES if key in table
    }
    arms = []
    for values in product(*choices.values()):
        arm: dict[str, object] = {}
        for path, value in zip(choices, values, strict=True):
            if len(path) == 1:
                arm[path[0]] = value
            else:
                apply_override(arm, path, value)
        chosen = {".".join(path): v for path, v in zip(choices, values, strict=True)}
        filled = {key: _fill(f"{where}.{key}", text, chosen) for key, text in names.items()}
        arms.append((filled.pop("name"), {**arm, **filled}))
    return arms


def leaves(table: Mapping[str, object], *path: str) -> Iterator[tuple[tuple[str, ...], object]]:
    """List the settings in tables, by their keys; an empty table is none."""
    for name, value in table.items():
        if isinstance(value, Mapping):
            yield from leaves(value, *path, name)
        else:
            yield (*path, name), value


def _choices(where: str, value: object) -> list[object]:
    if not isinstance(value, list):
        return [value]
    if not value:
        raise ConfigError(f"{where} is an empty list, expected values to try; add some, or drop it")
    return value


def _fill(where: str, template: object, chosen: Mapping[str, object]) -> str:
    if not isinstance(template, str):
        raise ConfigError(f"{where} is {template!r}, expected text such as '{{importance.kind}}'")

    def value(match: re.Match[str]) -> str:
        if match[1] is None:
            return match[0][0]
        if match[1] not in chosen:
            raise ConfigError(
                f"{where} is {template!r}, expected in braces what the grid sets: "
                f"{', '.join(chosen)}"
            )
        return str(chosen[match[1]])

    return _IN_BRACES.sub(value, template)
