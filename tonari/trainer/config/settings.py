"""Settings in checked dataclasses: a table of a TOML file, each field within its range."""

import dataclasses
import difflib
import math
import operator
import types
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import (
    Annotated,
    ClassVar,
    Literal,
    TypeVar,
    Union,
    get_args,
    get_origin,
    get_type_hints,
)

from dataio.base import toml
from tonari.trainer.errors import ConfigError


@dataclass(frozen=True)
class Range:
    """Numbers from ``least`` to ``most``, ends included unless said."""

    least: float
    most: float | None = None
    ends: str = "[]"

    def holds(self, value: float) -> bool:
        above = operator.ge if self.ends[0] == "[" else operator.gt
        below = operator.le if self.ends[1] == "]" else operator.lt
        return above(value, self.least) and (self.most is None or below(value, self.most))

    def __str__(self) -> str:
        if self.most is None:
            return f"{'>=' if self.ends[0] == '[' else '>'} {self.least}"
        return f"in {self.ends[0]}{self.least}, {self.most}{self.ends[1]}"


Kind = TypeVar("Kind", bound="Section")

SHORT = ""
"""In a group's table the key of what was given in place of the whole: its first field."""

Count = Annotated[int, Range(1)]
Whole = Annotated[int, Range(0)]
Fraction = Annotated[float, Range(0, 1)]
Share = Annotated[float, Range(0, 1, "[)")]
Positive = Annotated[float, Range(0, ends="(]")]
NotNegative = Annotated[float, Range(0)]


@dataclass(frozen=True, kw_only=True)
class Section:
    """One table of the file; checks each field against its annotation."""

    REST: ClassVar[str] = ""
    """The field that takes the keys of the table that are no field; empty: there are none."""

    def __post_init__(self) -> None:
        hints = get_type_hints(type(self), include_extras=True)
        for its in dataclasses.fields(self):
            key = f"{section_name(type(self))}.{its.name}"
            check_setting(key, getattr(self, its.name), hints[its.name])


def section_name(section: type[Section]) -> str:
    """Name the table of a section."""
    return section.__name__.removesuffix("Config").lower()


def as_tables(section: object) -> dict[str, object]:
    """Make of settings the tables that they are made of."""
    assert dataclasses.is_dataclass(section)
    found: dict[str, object] = {}
    for its in dataclasses.fields(section):
        value = getattr(section, its.name)
        if isinstance(section, Section) and its.name == section.REST:
            found |= {name: as_plain(each) for name, each in value.items()}
        else:
            found[its.name] = as_plain(value)
    return found


def as_plain(value: object) -> object:
    """Make a table of a setting that is a group."""
    return as_tables(value) if dataclasses.is_dataclass(value) else value


def apply_override(tables: dict[str, object], override: str) -> None:
    """Set what ``section.key=value`` says in tables as TOML gives them.

    ``section.group.key=value`` sets a key of a group, such as ``data.cache.quota=200GB``.
    """
    key, equals, text = override.partition("=")
    *path, name = key.split(".")
    if not (equals and path and name):
        raise ConfigError(
            f"override {override!r}, expected section.key=value; write for example run.epochs=3"
        )
    try:
        value: object = toml.loads(f"value = {text}")["value"]
    except toml.TOMLDecodeError:
        value = text
    table = tables.setdefault(path[0], {})
    for part in path[1:]:
        if isinstance(table, dict):
            group = table.get(part, {})
            # A group in short, such as a path in place of a cache, may get further keys.
            table[part] = group if isinstance(group, dict) else {SHORT: group}
            table = table[part]
    if isinstance(table, dict):
        group = table.get(name)
        if isinstance(group, dict) and not isinstance(value, dict):
            group[SHORT] = value
        else:
            table[name] = value


def build_section(section: type[Kind], table: object) -> Kind:
    """Make one table's settings; unknown and missing keys are errors."""
    name = section_name(section)
    if not isinstance(table, dict):
        raise ConfigError(f"{name} is {table!r}, expected a table; write [{name}] above its keys")
    fields = {f.name: f for f in dataclasses.fields(section) if f.name != section.REST}
    rest = {key: value for key, value in table.items() if section.REST and key not in fields}
    for key in table:
        if key not in rest:
            check_known(f"{name}.{key}", {f"{name}.{field}": None for field in fields})
    for its in fields.values():
        missing = its.default is dataclasses.MISSING and its.default_factory is dataclasses.MISSING
        if missing and its.name not in table:
            raise missing_setting(f"{name}.{its.name}")
    hints = get_type_hints(section)
    made = {
        key: make_setting(f"{name}.{key}", value, hints[key])
        for key, value in table.items()
        if key not in rest
    }
    return section(**made, **({section.REST: rest} if rest else {}))


def missing_setting(key: str) -> ConfigError:
    """Make the error of a setting that has no default, and is not given."""
    return ConfigError(f"{key} is missing; set it in the file or give {key}=VALUE")


def make_setting(key: str, value: object, hint: object) -> object:
    """Make a setting of what TOML gives; a group, such as `dataio.NodeCache`, checks its own."""
    hint = next((part for part in get_args(hint) if dataclasses.is_dataclass(part)), hint)
    if dataclasses.is_dataclass(value):
        return value
    if not isinstance(hint, type) or not dataclasses.is_dataclass(hint):
        return tuple(value) if isinstance(value, list) else value
    fields = dataclasses.fields(hint)
    if isinstance(value, str) and not fields[0].kw_only:
        value = {SHORT: value}
    if isinstance(value, dict) and SHORT in value and not fields[0].kw_only:
        value = {fields[0].name if name == SHORT else name: its for name, its in value.items()}
    if not isinstance(value, dict):
        raise ConfigError(f"{key} is {value!r}, expected a table; write [{key}] above its keys")
    for name in value:
        check_known(f"{key}.{name}", {f"{key}.{field.name}": field for field in fields})
    try:
        return hint(**value)
    except (TypeError, ValueError) as error:
        raise ConfigError(f"[{key}]: {error}") from error


def check_known(key: str, known: Mapping[str, object]) -> None:
    """Refuse a key that is not among the known ones, and guess which was meant."""
    if key not in known:
        nearest = difflib.get_close_matches(key, known, n=1, cutoff=0)
        raise ConfigError(
            f"{key} is unknown; did you mean {nearest[0]}? Known here: {', '.join(known)}"
        )


def check_setting(key: str, value: object, hint: object) -> None:
    """Refuse a value that is not what an annotation says.

    Raises:
        ConfigError: If it is not.
    """
    if not _fits(value, hint):
        raise ConfigError(
            f"{key} is {value!r}, expected {_words(hint)}; correct it in the file, or give "
            f"{key}=VALUE on the command line"
        )


def _fits(value: object, hint: object) -> bool:
    if get_origin(hint) is Annotated:
        base, bounds = get_args(hint)
        assert isinstance(bounds, Range), "only ranges annotate a setting"
        return _fits(value, base) and isinstance(value, int | float) and bounds.holds(value)
    if get_origin(hint) in (Union, types.UnionType):
        return any(_fits(value, option) for option in get_args(hint))
    if get_origin(hint) is Literal:
        # True equals 1.
        return any(type(value) is type(option) and value == option for option in get_args(hint))
    if get_origin(hint) is dict:
        return isinstance(value, dict)
    if get_origin(hint) in (tuple, Sequence):
        return isinstance(value, tuple) and all(_fits(v, get_args(hint)[0]) for v in value)
    if hint in (int, float):
        numbers = int if hint is int else int | float
        return isinstance(value, numbers) and type(value) is not bool and math.isfinite(value)
    return isinstance(value, hint) if isinstance(hint, type) else False


def _words(hint: object) -> str:
    plain = {int: "a whole number", float: "a number", str: "text", bool: "true or false"}
    plain |= {type(None): "leaving it out"}
    if get_origin(hint) is Annotated:
        base, bounds = get_args(hint)
        return f"{_words(base)} {bounds}"
    if get_origin(hint) in (Union, types.UnionType):
        # What a file cannot hold, such as a function, has no words
        return " or ".join(filter(None, map(_words, get_args(hint))))
    if get_origin(hint) is Literal:
        return "one of " + ", ".join(repr(option) for option in get_args(hint))
    if get_origin(hint) is dict:
        return "a table"
    if get_origin(hint) in (tuple, Sequence):
        return f"a list, each {_words(get_args(hint)[0])}"
    if dataclasses.is_dataclass(hint):
        return "a table"
    return next((words for kind, words in plain.items() if hint is kind), "")
