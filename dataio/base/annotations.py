"""What an annotation allows: whether a value fits it, how it is put in words, which name was meant.

One validator for all: arguments of public classes, whose annotations are those of Python
(`dataio.base.checked`), and settings of TOML files. Pure.
"""

import difflib
import functools
import operator
import types
import typing
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, is_dataclass
from typing import Annotated, Any, Literal


@dataclass(frozen=True, repr=False)
class Range:
    """Numbers from ``least`` to ``most``, ends included unless said; in `typing.Annotated`."""

    least: float
    most: float | None = None
    ends: str = "[]"

    def holds(self, value: float) -> bool:
        above = operator.ge if self.ends[0] == "[" else operator.gt
        below = operator.le if self.ends[1] == "]" else operator.lt
        return above(value, self.least) and (self.most is None or below(value, self.most))

    def __repr__(self) -> str:
        if self.most is None:
            return f"{'>=' if self.ends[0] == '[' else '>'} {self.least}"
        return f"in {self.ends[0]}{self.least}, {self.most}{self.ends[1]}"


Count = Annotated[int, Range(1)]
Whole = Annotated[int, Range(0)]
Fraction = Annotated[float, Range(0, 1)]
Share = Annotated[float, Range(0, 1, "[)")]
Positive = Annotated[float, Range(0, ends="(]")]
NotNegative = Annotated[float, Range(0)]


@dataclass(frozen=True)
class Language:
    """How annotations are put to whoever gives the values.

    Attributes:
        words: By type; ``{}`` stands for what its arguments are.
        literal: Lists the values of a `typing.Literal`.
        other: Describes a type that has no words; empty: it cannot be given here.
    """

    words: Mapping[Any, str]
    literal: Callable[[Sequence[object]], str]
    other: Callable[[type], str]


NUMBERS = {int: "a whole number", float: "a number"}

PYTHON = Language(
    {
        **NUMBERS, bool: "True or False", str: "a str", types.NoneType: "None",
        tuple: "a tuple of {}", Sequence: "a list of {}", Callable: "a function",
        dict: "a mapping of {} to {}", Mapping: "a mapping of {} to {}",
    },
    literal=lambda values: _either([f'"{value}"' for value in values]),
    other=lambda kind: {"PathLike": "a path", "ndarray": "an array"}.get(
        kind.__name__, f"a {kind.__module__.split('.')[0]}.{kind.__name__}"
    ),
)  # fmt: skip
"""For those who call a function."""

TOML = Language(
    {
        **NUMBERS, bool: "true or false", str: "text", types.NoneType: "leaving it out",
        tuple: "a list, each {}", Sequence: "a list, each {}", dict: "a table", Mapping: "a table",
    },
    literal=lambda values: "one of " + ", ".join(map(repr, values)),
    other=lambda kind: "a table" if is_dataclass(kind) else "",
)  # fmt: skip
"""For those who write a file."""


def fits(value: Any, hint: Any, *, roughly: bool = False) -> bool:
    """Whether a value is what an annotation says.

    Args:
        value: The value.
        hint: The annotation.
        roughly: Words that are not listed and numbers out of range fit too.
    """
    if type(value) is hint or hint is Any:
        return True
    its = functools.partial(fits, roughly=roughly)
    origin, args = parts(hint)
    if origin is Annotated:
        ranges = [] if roughly else _ranges(args)
        return its(value, args[0]) and all(each.holds(value) for each in ranges)
    if origin in (typing.Union, types.UnionType):
        return any(its(value, arg) for arg in args)
    if origin is Literal:
        # True equals 1.
        is_listed = any(its(value, type(arg)) and value == arg for arg in args)
        return is_listed or (roughly and isinstance(value, str))
    if origin is tuple:
        if not isinstance(value, tuple):
            return False
        args = args[:1] * len(value) if args[-1:] == (...,) else args
        return len(value) == len(args) and all(map(its, value, args))
    if origin is Mapping or origin is dict:
        return isinstance(value, origin) and all(
            its(k, args[0]) and its(v, args[1]) for k, v in value.items()
        )
    if origin is Sequence:
        is_one = isinstance(value, Sequence) and not isinstance(value, (str, bytes))
        return is_one and all(its(part, args[0]) for part in value)
    if origin is Callable:
        return callable(value)
    if hint in (int, float):
        is_number = isinstance(value, int if hint is int else (int, float))
        return is_number and not isinstance(value, bool)
    if getattr(hint, "_is_protocol", False) and origin is None:
        return not isinstance(value, type) and not lacking(value, hint)
    kind = origin if origin is not None else hint
    return not isinstance(kind, type) or isinstance(value, kind) or _stands_for(value, kind)


def lacking(value: object, kind: type) -> list[str]:
    """Name the members of a class or Protocol that an object lacks."""
    return [name for name in members(kind) if not _has(value, name)]


def listed(hint: object) -> list[str]:
    """The words that an annotation lists."""
    args = typing.get_args(hint)
    if typing.get_origin(hint) is Literal:
        return [str(word) for word in args]
    return [word for arg in args if arg is not ... for word in listed(arg)]


def describe(hint: Any, language: Language = PYTHON) -> str:
    """Put an annotation in words; empty: nothing that can be given in this language."""
    origin, args = parts(hint)
    its = functools.partial(describe, language=language)
    if origin is Annotated:
        return " ".join([its(args[0]), *map(str, _ranges(args))])
    if origin in (typing.Union, types.UnionType):
        return _either(list(filter(None, map(its, args))))
    if origin is Literal:
        return language.literal(args)
    kind = origin if origin is not None else hint
    if kind not in language.words:
        return language.other(kind)
    words = language.words[kind]
    if kind is tuple:
        return words.format(" and ".join(its(arg) for arg in args if arg is not ...))
    return words.format(*map(its, args)) if "{}" in words else words


def nearest(name: str, known: Iterable[str], *, likeness: float = 0.0) -> str | None:
    """Find which known name was meant.

    Args:
        name: What was given.
        known: What there is.
        likeness: What it must have at least of 1.0, which are the same names.
    """
    return next(iter(difflib.get_close_matches(name, list(known), n=1, cutoff=likeness)), None)


ALIKE = 0.6
"""Likeness of names of which one may be the other, misspelt."""


@functools.cache
def parts(hint: Any) -> tuple[Any, tuple[Any, ...]]:
    """Take an annotation apart: its origin, and what it is made with."""
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if hasattr(origin, "__value__"):  # NDArray is a named alias from NumPy 2.5 on
        return parts(origin.__value__[args])
    return origin, args


@functools.cache
def members(kind: type) -> tuple[str, ...]:
    """Name the methods and properties of a class that others may use."""
    kinds, made = (types.FunctionType, property), ("__init__", "__subclasshook__")
    found = [n for n, v in vars(kind).items() if isinstance(v, kinds) and n not in made]
    return tuple(name for name in found if not name.startswith("_") or name.endswith("__"))


def _ranges(args: Sequence[object]) -> list[Range]:
    return [part for part in args if isinstance(part, Range)]


def _stands_for(value: object, kind: type) -> bool:
    """Whether it hands on what it is asked to an object of that kind."""
    hands_on = hasattr(type(value), "__getattr__") and members(kind) != ()
    return hands_on and not lacking(value, kind)


def _has(value: object, name: str) -> bool:
    # Of the class first: a property may cost something.
    kind = type(value)
    dynamic = hasattr(kind, "__getattr__") and hasattr(value, name)
    return hasattr(kind, name) or name in getattr(value, "__dict__", ()) or dynamic


def _either(words: Sequence[str]) -> str:
    words = list(dict.fromkeys(words))
    if len(words) < 2 or any(", each " in word for word in words):
        return " or ".join(words)
    return f"{', '.join(words[:-1])} or {words[-1]}"
