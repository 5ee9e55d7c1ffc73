"""Turn dataclasses into JSON and back, and describe that JSON by a schema, from their types."""

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import MISSING, fields, is_dataclass
from inspect import getdoc
from types import NoneType, UnionType
from typing import Literal, TypeVar, Union, cast, get_args, get_origin, get_type_hints

import numpy as np

from benchmarks.errors import BenchError

T = TypeVar("T")

NOT_NEGATIVE = re.compile(r"(_bytes|_s|^seconds|^count|^clients|^threads|^nodes)$")
"""Names of figures below 0 that nothing could have measured."""

SIMPLE: dict[object, tuple[str, str, tuple[type, ...]]] = {
    str: ("string", "a text", (str,)),
    bool: ("boolean", "true or false", (bool,)),
    int: ("integer", "a whole number", (int,)),
    float: ("number", "a number", (int, float)),
    NoneType: ("null", "null", (NoneType,)),
}
"""By type: what a schema calls it, what a message does, and what JSON reads it as."""


def encode(value: object, where: str = "results") -> object:
    """Make a value of dataclasses, mappings, sequences, arrays and numbers ready for JSON.

    Raises:
        ValueError: If a number is infinite or not one: JSON has no such, None is "not measured".
    """
    if is_dataclass(value):
        return {
            field.name: encode(getattr(value, field.name), f"{where}.{field.name}")
            for field in fields(value)
        }
    if isinstance(value, np.ndarray | np.generic):
        return encode(value.tolist(), where)
    if isinstance(value, Mapping):
        return {str(key): encode(one, f"{where}.{key}") for key, one in value.items()}
    if isinstance(value, Sequence) and not isinstance(value, str):
        return [encode(one, f"{where}[{place}]") for place, one in enumerate(value)]
    if isinstance(value, float) and not math.isfinite(value):
        raise ValueError(f"{where} is {value}; expected a finite number, or None")
    return value if value is None or isinstance(value, bool | int | float | str) else str(value)


def decode(kind: type[T], value: object, where: str) -> T:
    """Make a dataclass of what was read from JSON.

    Args:
        kind: The dataclass.
        value: What was read.
        where: Its name in messages.

    Raises:
        BenchError: With the place, if something is missing, unknown or of another type.
    """
    return cast(T, _decode(kind, value, where))


def _decode(kind: object, value: object, where: str) -> object:
    origin, arguments = get_origin(kind), get_args(kind)
    if kind is object:
        return value
    if origin in (Union, UnionType):
        return _decode_union(arguments, value, where)
    if origin is Literal:
        return _expect(value, value in arguments, where, f"one of {', '.join(map(str, arguments))}")
    if origin is not None and issubclass(origin, Mapping):
        _expect(value, isinstance(value, dict), where, "an object")
        found = cast(dict[str, object], value)
        return {name: _decode(arguments[1], one, f"{where}.{name}") for name, one in found.items()}
    if origin is not None:
        return _decode_sequence(arguments, value, where)
    if isinstance(kind, type) and is_dataclass(kind):
        return _decode_fields(kind, value, where)
    _, words, types = SIMPLE[kind]
    is_right = isinstance(value, types) and (kind is bool or not isinstance(value, bool))
    _expect(value, is_right, where, words)
    name = where.rpartition(".")[2]
    if isinstance(value, int | float) and NOT_NEGATIVE.search(name):
        _expect(value, value >= 0, where, f"{words}, 0 or more")
    return value


def _decode_union(kinds: tuple[object, ...], value: object, where: str) -> object:
    if value is None and NoneType in kinds:
        return None
    # Only ever "this or None".
    return _decode(next(kind for kind in kinds if kind is not NoneType), value, where)


def _decode_sequence(arguments: tuple[object, ...], value: object, where: str) -> object:
    _expect(value, isinstance(value, list), where, "a list")
    found = cast(list[object], value)
    if len(arguments) == 2 and arguments[1] is not Ellipsis:
        _expect(found, len(found) == 2, where, "a list of two")
    return tuple(_decode(arguments[0], one, f"{where}[{place}]") for place, one in enumerate(found))


def _decode_fields(kind: type, value: object, where: str) -> object:
    _expect(value, isinstance(value, dict), where, "an object")
    found = cast(dict[str, object], value)
    types = get_type_hints(kind)
    needed = [field.name for field in fields(kind) if not _has_default(field)]
    missing = [name for name in needed if name not in found]
    unknown = [name for name in found if name not in types]
    if missing or unknown:
        what = f"no {missing[0]!r}" if missing else f"{unknown[0]!r}, which is not known"
        raise BenchError(
            f"{where}: found {what}; expected {', '.join(types)}: name a file that "
            "`tonari bench io --json-file` wrote"
        )
    values = {name: _decode(types[name], one, f"{where}.{name}") for name, one in found.items()}
    return kind(**values)


def _has_default(field: object) -> bool:
    default = getattr(field, "default", MISSING)
    return default is not MISSING or getattr(field, "default_factory", MISSING) is not MISSING


def _expect(value: object, is_right: bool, where: str, words: str) -> object:
    if not is_right:
        shown = repr(value) if len(repr(value)) < 60 else f"{repr(value)[:57]}..."
        raise BenchError(
            f"{where}: found {shown}; expected {words}: name a file that "
            "`tonari bench io --json-file` wrote"
        )
    return value


def schema(kind: type) -> dict[str, object]:
    """Describe a dataclass's JSON by JSON Schema 2020-12; descriptions are those of docstrings."""
    definitions: dict[str, object] = {}
    top = _schema(kind, "", definitions)
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        **cast(dict[str, object], definitions.pop(str(top["$ref"]).rpartition("/")[2])),
        "$defs": dict(sorted(definitions.items())),
    }


def _schema(kind: object, name: str, definitions: dict[str, object]) -> dict[str, object]:
    origin, arguments = get_origin(kind), get_args(kind)
    if kind is object:
        return {}
    if origin in (Union, UnionType):
        return {"anyOf": [_schema(one, name, definitions) for one in arguments]}
    if origin is Literal:
        return {"enum": list(arguments)}
    if origin is not None and issubclass(origin, Mapping):
        return {
            "type": "object",
            "additionalProperties": _schema(arguments[1], "", definitions),
        }
    if origin is not None:
        pair = len(arguments) == 2 and arguments[1] is not Ellipsis
        size = {"minItems": 2, "maxItems": 2} if pair else {}
        return {"type": "array", "items": _schema(arguments[0], "", definitions), **size}
    if isinstance(kind, type) and is_dataclass(kind):
        if kind.__name__ not in definitions:
            definitions[kind.__name__] = {}
            definitions[kind.__name__] = _schema_of_fields(kind, definitions)
        return {"$ref": f"#/$defs/{kind.__name__}"}
    found: dict[str, object] = {"type": SIMPLE[kind][0]}
    if kind in (int, float) and NOT_NEGATIVE.search(name):
        found["minimum"] = 0
    return found


def _schema_of_fields(kind: type, definitions: dict[str, object]) -> dict[str, object]:
    said = _descriptions(kind)
    types = get_type_hints(kind)
    properties = {}
    for field in fields(kind):
        described = {"description": said[field.name]} if field.name in said else {}
        properties[field.name] = {**_schema(types[field.name], field.name, definitions)} | described
    return {
        "type": "object",
        "description": (getdoc(kind) or "").partition("\n")[0],
        "properties": properties,
        "required": [field.name for field in fields(kind) if not _has_default(field)],
        "additionalProperties": False,
    }


def _descriptions(kind: type) -> dict[str, str]:
    text = (getdoc(kind) or "").partition("Attributes:\n")[2]
    entries = re.findall(r"^    (\w+): (.*(?:\n {8,}.*)*)", text, flags=re.MULTILINE)
    return {name: " ".join(words.replace("``", "").split()) for name, words in entries}
