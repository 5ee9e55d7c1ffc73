"""Arms that differ in some values: a grid of a study's file, written out. Pure."""

import string
from collections.abc import Collection, Mapping, Sequence
from itertools import product

from tonari.trainer.config.settings import check_known
from tonari.trainer.errors import ConfigError


def expand_grid(
    grid: str, table: Mapping[str, object], known: Sequence[str], *, lists: Collection[str]
) -> list[tuple[str, dict[str, object]]]:
    """Make an arm for each combination of a grid's values; the last key varies fastest.

    Args:
        grid: Its name, which begins the arms' names.
        table: Settings; those that are lists vary. ``name``, where it is there, is a template of
            the arms' names, such as ``"{importance} {fraction}"``; so is ``against``.
        known: Names of all settings.
        lists: Those whose value is a list: a grid over these is a list of lists.

    Returns:
        Name and settings of each arm.

    Raises:
        ConfigError: If a key is unknown, a list is empty, or the template asks for what the grid
            does not set.
    """
    where = f"grid.{grid}"
    for setting in table:
        check_known(f"{where}.{setting}", {f"{where}.{name}": None for name in ("name", *known)})
    choices = {
        name: _choices(f"{where}.{name}", value, is_list=name in lists)
        for name, value in table.items()
    }
    varying = [f"{{{name}}}" for name, values in choices.items() if len(values) > 1]
    template = table.get("name", ", ".join([_literal(grid), *varying]))
    if not isinstance(template, str):
        raise ConfigError(f"{where}.name is {template!r}, expected text such as '{{importance}}'")
    choices.pop("name", None)
    arms = [dict(zip(choices, values, strict=True)) for values in product(*choices.values())]
    for settings in arms:
        if isinstance(against := settings.get("against"), str):
            settings["against"] = _named(f"{where}.against", against, settings)
    return [(_named(f"{where}.name", template, settings), settings) for settings in arms]


def _choices(where: str, value: object, *, is_list: bool) -> list[object]:
    if not isinstance(value, list) or (is_list and value and not _is_nested(value)):
        return [value]
    if not value and not is_list:
        raise ConfigError(f"{where} is an empty list, expected values to try; add some, or drop it")
    return value or [value]


def _is_nested(value: list[object]) -> bool:
    return all(isinstance(part, list) for part in value)


def _literal(text: str) -> str:
    return text.replace("{", "{{").replace("}", "}}")


def _named(where: str, template: str, settings: Mapping[str, object]) -> str:
    try:
        wanted = [field for _, field, _, _ in string.Formatter().parse(template) if field]
        for field in wanted:
            check_known(field, settings)
        return template.format_map(settings)
    except (ConfigError, ValueError, KeyError, IndexError) as error:
        raise ConfigError(
            f"{where} is {template!r}: {error}; expected text with settings of the grid in "
            f"braces, such as '{{importance}} {{fraction}}'"
        ) from error
