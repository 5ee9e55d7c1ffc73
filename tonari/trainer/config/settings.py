"""Settings in checked dataclasses: a table of a TOML file, each field within its range."""

import dataclasses
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar, TypeVar, get_args, get_type_hints

from dataio.base import toml
from dataio.base.checked import TOML, describe, fits, nearest
from dataio.base.checked import Count as Count
from dataio.base.checked import Fraction as Fraction
from dataio.base.checked import NotNegative as NotNegative
from dataio.base.checked import Positive as Positive
from dataio.base.checked import Range as Range
from dataio.base.checked import Share as Share
from dataio.base.checked import Whole as Whole
from tonari.trainer.errors import ConfigError

Kind = TypeVar("Kind", bound="Section")

SHORT = ""
"""In a group's table the key of what was given in place of the whole: its first field."""

ELSEWHERE = {
    "optimizer.learning_rate": "optimizer.lr", "optimizer.grad_clip": "optimizer.clip",
    "optimizer.gradient_accumulation_steps": "optimizer.accumulate", "mesh.fsdp": "mesh.dp_shard",
    "mesh.ddp": "mesh.dp_replicate", "run.max_epochs": "run.epochs",
    "run.output_dir": "run.directory",
}  # fmt: skip
"""What other trainers call a key."""


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


def parse_override(override: str) -> tuple[list[str], object]:
    """Read ``section.key=value`` or ``section.group.key=value``: the keys, and the value in TOML.

    What is not TOML is taken as text.

    Raises:
        ConfigError: If it is neither.
    """
    key, equals, text = override.partition("=")
    path = key.split(".")
    if not (equals and len(path) > 1 and path[-1]):
        raise ConfigError(
            f"override {override!r}, expected section.key=value; write for example run.epochs=3"
        )
    try:
        return path, toml.loads(f"value = {text}")["value"]
    except toml.TOMLDecodeError:
        return path, text


def apply_override(tables: dict[str, object], path: Sequence[str], value: object) -> None:
    """Set a key of tables as TOML gives them.

    A path of three names a key of a group, such as ``data.cache.quota``.
    """
    *groups, name = path
    table = tables.setdefault(groups[0], {})
    for part in groups[1:]:
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
    """Make a setting of what TOML gives: of a table a group, such as `dataio.NodeCache`."""
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
    hints = get_type_hints(hint, include_extras=True)
    made = {name: checked_setting(f"{key}.{name}", its, hints[name]) for name, its in value.items()}
    try:
        return hint(**made)
    except (TypeError, ValueError) as error:
        raise ConfigError(f"[{key}]: {error}") from error


def checked_setting(key: str, value: object, hint: object) -> object:
    """Make a setting, and check it; see `make_setting` and `check_setting`."""
    made = make_setting(key, value, hint)
    check_setting(key, made, hint)
    return made


def check_known(key: str, known: Mapping[str, object]) -> None:
    """Refuse a key that is not among the known ones, and guess which was meant."""
    if key not in known:
        meant = ELSEWHERE.get(key)
        guess = meant if meant in known else nearest(key, known)
        raise ConfigError(f"{key} is unknown; did you mean {guess}? Known here: {', '.join(known)}")


def check_setting(key: str, value: object, hint: object) -> None:
    """Refuse a value that is not what an annotation says, or not finite.

    Raises:
        ConfigError: If it is not.
    """
    if not (fits(value, hint) and _is_finite(value)):
        raise ConfigError(
            f"{key} is {value!r}, expected {describe(hint, TOML)}; correct it in the file, or give "
            f"{key}=VALUE on the command line"
        )


def _is_finite(value: object) -> bool:
    if isinstance(value, tuple):
        return all(map(_is_finite, value))
    return not isinstance(value, float) or math.isfinite(value)
