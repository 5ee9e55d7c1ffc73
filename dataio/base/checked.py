"""One validator: whether a value is what an annotation says, in words, and which name was meant.

Public classes and calls are checked against the annotations of their signatures, so an argument is
refused by name, before any effect, and what it may be is written down once. Settings of TOML files
are checked by the same function. Pure.
"""

import difflib
import functools
import inspect
import json
import operator
import types
import typing
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, is_dataclass
from itertools import chain
from typing import Annotated, Any, Literal, ParamSpec, TypeVar

import numpy as np

from dataio.base.location import shown

P = ParamSpec("P")
R = TypeVar("R")
C = TypeVar("C", bound=type)

FRACTIONS = "alphas budget debias delta exchange fraction least_fall second_guess tau".split()

CURES = {
    "source": "give shards by their names, a dataset that has __len__ and __getitem__, or a dict "
    "of arrays",
    "fields": 'give for example {"image": dataio.Image("jpg"), "label": dataio.Int("cls")}, or '
    'of arrays {"x": dataio.Array("x", (64, 64), "float32")}; a key '
    "that samples lack is answered with those they have",
    "shuffle": "leave it out, as each epoch is shuffled anyway; or give for example "
    "shuffle.Partial(0.1)",
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
    "warmup_epochs": "0 means no warm-up",
    "begins": "epoch 0 has no predictions to go by",
    "Learnable.begins": "a fall is seen only between two losses after a row's first epoch",
    "refresh_every": "1 means every epoch, None never",
    "SeTa.groups": "10 is the published number",
    "SeTa.window": "0.5 shows half of the groups",
    "StoppedLearning.below": "0.001 is the published one for CIFAR-10",
    "Weighted.num_samples": "None draws as many rows as the dataset has",
    "Weighted.weights": "give one number a sample in a list or an array, the name of a field, or a "
    "function of the epoch",
    **dict.fromkeys(FRACTIONS, "0.3 stands for 30 %"),
    # Arguments of a DataLoader
    "Loader.num_workers": "leave it out: threads decode; or give workers=dataio.Workers(threads=8)",
    "Loader.prefetch_factor": "give workers=dataio.Workers(prefetch=2)",
    "Loader.persistent_workers": "leave it out: they last as long as the loader",
    "Loader.worker_init_fn": "leave it out: a transform is given its generator",
    "Loader.multiprocessing_context": "leave it out: processes are started anew",
    "Loader.generator": "give seed=0",
    "Loader.collate_fn": "give collate=, and only where samples differ in shape",
    "Loader.pin_memory": 'give device="cuda": batches arrive there by way of pinned memory',
    "Loader.pin_memory_device": "give device=",
    "Loader.in_order": "leave it out: batches always come in order",
    "Loader.log": 'to log which rows are trained, give reports=dataio.Reports(rows="runs/a/rows")',
    "Kakurenbo.columns": "for losses of all epochs, have a subclass say columns = "
    '(*importance.Kakurenbo.columns, "history")',
    "Loader.timeout": "give dataio.Shards(names, retry=dataio.Retry(read_timeout_s=60))",
    **dict.fromkeys(
        ("Loader.sampler", "Loader.batch_sampler"),
        "leave it out: each rank gets its part, in an order of each epoch's own; give shuffle= for "
        "how far samples move, importance= or exclude= for fewer",
    ),
}
"""What to do, by the argument's name, or by that of the class too."""


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
    literal=lambda values: _either([json.dumps(value) for value in values]),
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


def checked(kind: C) -> C:
    """Check what a class is made with. Whole numbers of NumPy become Python's, lists tuples."""
    kind.__init__ = checked_call(kind.__init__, where=kind.__name__)  # type: ignore[misc]
    return kind


def checked_call(function: Callable[P, R], *, where: str | None = None) -> Callable[P, R]:
    """Check what a function or method is called with."""
    signature = inspect.signature(function)
    parameters = signature.parameters
    placed = [name for name, its in parameters.items() if its.kind is not its.KEYWORD_ONLY]
    one = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    needed = [n for n, its in parameters.items() if its.default is its.empty and its.kind in one]
    name_of_it = where if where is not None else function.__qualname__

    @functools.wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        hints = _hints(function)
        # The usual case, ten times as fast: fields are made for every sample of a transform.
        missing = [n for n in needed if n not in kwargs and n not in placed[: len(args)]]
        if not missing and len(args) <= len(placed) and kwargs.keys() <= parameters.keys():
            pairs = chain(zip(placed, args, strict=False), kwargs.items())
            if all(name not in hints or fits(value, hints[name]) for name, value in pairs):
                return function(*args, **kwargs)
        try:
            given = signature.bind(*args, **kwargs)
        except TypeError as error:
            cure = f"; {_cure(name_of_it, missing[0])}" if missing else ""
            words = _misfit(name_of_it, signature, args, kwargs) or f"{error}{cure}"
            raise TypeError(f"{name_of_it}: {words}") from None
        for name, value in given.arguments.items():
            if name in hints:
                value = given.arguments[name] = _plain(value, hints[name])
                if not fits(value, hints[name]):
                    raise _refusal(name_of_it, name, value, hints[name])
        return function(*given.args, **given.kwargs)

    return call


def _misfit(
    where: str, signature: inspect.Signature, args: Sequence[object], kwargs: Collection[str]
) -> str | None:
    """Say which argument is one too many, and what to give in its place; None: none is."""
    parameters = signature.parameters.values()
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters):
        return None
    known = [name for name in signature.parameters if name != "self"]
    if unknown := next((name for name in kwargs if name not in known), None):
        near = nearest(unknown, known, likeness=ALIKE)
        cure = CURES.get(f"{where}.{unknown}") or (near and f"did you mean {near}?")
        return f"{unknown} is unknown, expected {_either(known)}; {cure or 'leave it out'}"
    placed = sum(p.kind is not p.KEYWORD_ONLY for p in parameters)
    if len(args) > placed:
        named = [p.name for p in parameters if p.kind is p.KEYWORD_ONLY and p.name not in kwargs]
        extra = shown(repr(args[placed]))[:100]
        cure = f"give it by its name, such as {named[0]}={extra}" if named else "leave it out"
        return f"{extra} has no name; {cure}"
    return None


@functools.cache
def _hints(function: Callable[..., object]) -> dict[str, Any]:
    hints = typing.get_type_hints(function, include_extras=True)
    for name, its in inspect.signature(function).parameters.items():
        if its.kind is its.VAR_POSITIONAL and name in hints:
            hints[name] = types.GenericAlias(tuple, (hints[name], ...))
    return hints


def _plain(value: object, hint: object) -> object:
    if isinstance(value, np.generic):
        return value.item()
    is_tuple = tuple in (typing.get_origin(part) for part in (hint, *typing.get_args(hint)))
    return tuple(value) if isinstance(value, list) and is_tuple else value


def _refusal(where: str, name: str, value: object, hint: object) -> Exception:
    found = f"the class {value.__name__}" if isinstance(value, type) else shown(repr(value))[:100]
    cure = _cure(where, name)
    if isinstance(value, type) and name not in ("dtype", "transform"):
        cure = f"make one: {value.__name__}(...)"
    elif near := _meant(value, listed(hint)):
        cure = f"did you mean {near!r}?"
    elif missing := _missing(value, hint):
        cure = f"add {', '.join(missing)} to it"
    kind = ValueError if fits(value, hint, roughly=True) else TypeError
    return kind(f"{where}: {name} is {found}, expected {describe(hint)}; {cure}")


def _cure(where: str, name: str) -> str:
    return CURES.get(f"{where}.{name}") or CURES.get(name, f"see help({where})")


def _meant(value: object, words: list[str]) -> str | None:
    """Find which of the listed words was meant by a value, or by the first wrong one in it."""
    given = value if isinstance(value, tuple) else (value,)
    wrong = (word for word in given if isinstance(word, str) and word not in words)
    return next(filter(None, (nearest(word, words, likeness=ALIKE) for word in wrong)), None)


def _missing(value: object, hint: object) -> list[str]:
    """Name the members that an object lacks of a Protocol of which it has most."""
    for kind in (hint, *typing.get_args(hint)):
        if getattr(kind, "_is_protocol", False):
            missing = lacking(value, typing.cast(type, kind))
            if 2 * len(missing) < len(members(typing.cast(type, kind))):
                return missing
    return []
