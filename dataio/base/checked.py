"""What a public class or call is given, checked against the annotations of its signature.

So an argument is refused by name, before any effect, and what it may be is written down once.
Ranges are left to whoever takes it. Pure.
"""

import difflib
import functools
import inspect
import types
import typing
from collections.abc import Callable, Mapping, Sequence
from itertools import chain
from typing import Any, ParamSpec, TypeVar

import numpy as np

from dataio.base.location import shown

P = ParamSpec("P")
R = TypeVar("R")
C = TypeVar("C", bound=type)

CURES = {
    "source": "give shards by their names, a dataset that has __len__ and __getitem__, or a dict "
    "of arrays",
    "fields": 'give for example {"image": dataio.Image("jpg"), "label": dataio.Int("cls")}',
    "shuffle": "give for example shuffle.Partial(0.1)",
    "importance": "give for example importance.Kakurenbo(0.3)",
    "exclude": "give sample ids, keys, or the path of a list of them",
    "world": "give what dataio.discover_world() returns",
    "dtype": 'give its name, such as "float32"',
    "shape": "give a tuple, such as (3,)",
    "transform": "give a function of a sample and a generator",
    "dataset": "an iterable-style one has no numbers: write its samples with "
    "pyarrow.parquet.write_table, or wrap list(dataset) where they fit in memory",
    "arrays": "convert each with np.asarray, or give the path of its .npy",
    "loaders": 'give for example {"web": loader}',
    "weights": 'give for example {"web": 2, "code": 1}',
    "ByStep.weights": 'give for example [(0, {"web": 1}), (1000, {"web": 3})]',
    "Weighted.weights": "give one number a sample in a list or an array, the name of a field, or a "
    "function of the epoch",
}
"""What to do, by the argument's name, or by that of the class too."""

_WORDS: Mapping[Any, str] = {
    int: "a whole number", float: "a number", bool: "True or False", str: "a str",
    types.NoneType: "None",
}  # fmt: skip


def checked(kind: C) -> C:
    """Check what a class is made with. Whole numbers of NumPy become Python's, lists tuples."""
    kind.__init__ = checked_call(kind.__init__, where=kind.__name__)  # type: ignore[misc]
    return kind


def checked_call(function: Callable[P, R], *, where: str | None = None) -> Callable[P, R]:
    """Check what a function or method is called with."""
    signature = inspect.signature(function)
    names = tuple(signature.parameters)
    name_of_it = where if where is not None else function.__qualname__

    @functools.wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        hints = _hints(function)
        pairs = chain(zip(names, args, strict=False), kwargs.items())
        # The usual case, ten times as fast: fields are made for every sample of a transform.
        if all(name not in hints or _fits(value, hints[name]) for name, value in pairs):
            return function(*args, **kwargs)
        try:
            given = signature.bind(*args, **kwargs)
        except TypeError:
            return function(*args, **kwargs)  # which says what is missing, or too much
        for name, value in given.arguments.items():
            if name in hints:
                value = given.arguments[name] = _plain(value, hints[name])
                if not _fits(value, hints[name]):
                    raise _refusal(name_of_it, name, value, hints[name])
        return function(*given.args, **given.kwargs)

    return call


@functools.cache
def _hints(function: Callable[..., object]) -> dict[str, Any]:
    return typing.get_type_hints(function)


def _plain(value: object, hint: object) -> object:
    if isinstance(value, np.generic):
        return value.item()
    is_tuple = tuple in (typing.get_origin(part) for part in (hint, *typing.get_args(hint)))
    return tuple(value) if isinstance(value, list) and is_tuple else value


def _fits(value: Any, hint: Any, *, any_word: bool = False) -> bool:
    """Whether a value is what an annotation says; ``any_word``: words that are not listed too."""
    if type(value) is hint:
        return True
    origin, args = _parts(hint)
    fits = functools.partial(_fits, any_word=any_word)
    if origin in (typing.Union, types.UnionType):
        return any(fits(value, arg) for arg in args)
    if origin is typing.Literal:
        return isinstance(value, str) if any_word else isinstance(value, str) and value in args
    if origin is tuple:
        parts = args[:1] * len(value) if args[-1:] == (...,) and isinstance(value, tuple) else args
        return (
            isinstance(value, tuple) and len(value) == len(parts) and all(map(fits, value, parts))
        )
    if origin is Mapping or origin is dict:
        return isinstance(value, origin) and all(
            fits(k, args[0]) and fits(v, args[1]) for k, v in value.items()
        )
    if origin is Sequence:
        is_one = isinstance(value, Sequence) and not isinstance(value, (str, bytes))
        return is_one and all(fits(part, args[0]) for part in value)
    if origin is Callable:
        return callable(value)
    if hint in (int, float):
        is_number = isinstance(value, int if hint is int else (int, float))
        return is_number and not isinstance(value, bool)
    if getattr(hint, "_is_protocol", False) and origin is None:
        return not isinstance(value, type) and all(_has(value, name) for name in _members(hint))
    kind = origin if origin is not None else hint
    return not isinstance(kind, type) or isinstance(value, kind) or _stands_for(value, kind)


def _stands_for(value: object, kind: type) -> bool:
    """Whether it hands on what it is asked to an object of that kind."""
    members = _members(kind)
    return (
        hasattr(type(value), "__getattr__")
        and members != ()
        and all(_has(value, name) for name in members)
    )


@functools.cache
def _parts(hint: Any) -> tuple[Any, tuple[Any, ...]]:
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if hasattr(origin, "__value__"):  # NDArray is a named alias from NumPy 2.5 on
        return _parts(origin.__value__[args])
    return origin, args


@functools.cache
def _members(kind: type) -> tuple[str, ...]:
    kinds, made = (types.FunctionType, property), ("__init__", "__subclasshook__")
    members = [n for n, v in vars(kind).items() if isinstance(v, kinds) and n not in made]
    return tuple(name for name in members if not name.startswith("_") or name.endswith("__"))


def _has(value: object, name: str) -> bool:
    # Of the class first: a property may cost something.
    kind = type(value)
    dynamic = hasattr(kind, "__getattr__") and hasattr(value, name)
    return hasattr(kind, name) or name in getattr(value, "__dict__", ()) or dynamic


def _refusal(where: str, name: str, value: object, hint: object) -> Exception:
    words = _listed(hint)
    found = f"the class {value.__name__}" if isinstance(value, type) else shown(repr(value))[:100]
    cure = CURES.get(f"{where}.{name}") or CURES.get(name, f"see help({where})")
    near = [
        near
        for word in (value if isinstance(value, tuple) else (value,))
        if isinstance(word, str) and word not in words
        for near in difflib.get_close_matches(word, words, n=1)
    ]
    if isinstance(value, type) and name not in ("dtype", "transform"):
        cure = f"make one: {value.__name__}(...)"
    elif near:
        cure = f"did you mean {near[0]!r}?"
    elif lacking := _lacking(value, hint):
        cure = f"add {', '.join(lacking)} to it"
    kind = ValueError if words and _fits(value, hint, any_word=True) else TypeError
    return kind(f"{where}: {name} is {found}, expected {_describe(hint)}; {cure}")


def _lacking(value: object, hint: object) -> list[str]:
    """Name the members that an object lacks of a Protocol of which it has most."""
    for kind in (hint, *typing.get_args(hint)):
        if getattr(kind, "_is_protocol", False):
            members = _members(typing.cast(type, kind))
            lacking = [name for name in members if not _has(value, name)]
            if 2 * len(lacking) < len(members):
                return lacking
    return []


def _listed(hint: object) -> list[str]:
    """The words that an annotation lists."""
    args = typing.get_args(hint)
    if typing.get_origin(hint) is typing.Literal:
        return [str(word) for word in args]
    return [word for arg in args if arg is not ... for word in _listed(arg)]


def _describe(hint: Any) -> str:
    origin, args = _parts(hint)
    if hint in _WORDS:
        return _WORDS[hint]
    if origin is Callable:
        return "a function"
    if origin in (typing.Union, types.UnionType):
        return _either([_describe(arg) for arg in args])
    if origin is typing.Literal:
        return _either([f'"{word}"' for word in args])
    if origin is tuple:
        parts = args[:1] if args[-1:] == (...,) else args
        return f"a tuple of {' and '.join(map(_describe, parts))}"
    if origin in (Mapping, dict):
        return f"a mapping of {_describe(args[0])} to {_describe(args[1])}"
    if origin is Sequence:
        return f"a list of {_describe(args[0])}"
    kind = origin if origin is not None else hint
    return {"PathLike": "a path", "ndarray": "an array"}.get(
        kind.__name__, f"a {kind.__module__.split('.')[0]}.{kind.__name__}"
    )


def _either(words: list[str]) -> str:
    words = list(dict.fromkeys(words))
    return " or ".join([", ".join(words[:-1]), words[-1]] if len(words) > 1 else words)
