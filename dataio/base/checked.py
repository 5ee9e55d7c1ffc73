"""What a public class or call is given, checked against the annotations of its signature.

So an argument is refused by name, before any effect, and what it may be is written down once.
Ranges are left to whoever takes it. Pure.
"""

import functools
import inspect
import typing
from collections.abc import Callable
from itertools import chain
from typing import Any, ParamSpec, TypeVar

import numpy as np

from dataio.base.annotations import ALIKE, describe, fits, lacking, listed, members, nearest
from dataio.base.location import shown

P = ParamSpec("P")
R = TypeVar("R")
C = TypeVar("C", bound=type)

FRACTIONS = """alphas budget debias delta exchange fraction least_fall second_guess tau""".split()

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
}
"""What to do, by the argument's name, or by that of the class too."""


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
        if all(name not in hints or fits(value, hints[name]) for name, value in pairs):
            return function(*args, **kwargs)
        try:
            given = signature.bind(*args, **kwargs)
        except TypeError:
            return function(*args, **kwargs)  # which says what is missing, or too much
        for name, value in given.arguments.items():
            if name in hints:
                value = given.arguments[name] = _plain(value, hints[name])
                if not fits(value, hints[name]):
                    raise _refusal(name_of_it, name, value, hints[name])
        return function(*given.args, **given.kwargs)

    return call


@functools.cache
def _hints(function: Callable[..., object]) -> dict[str, Any]:
    return typing.get_type_hints(function, include_extras=True)


def _plain(value: object, hint: object) -> object:
    if isinstance(value, np.generic):
        return value.item()
    is_tuple = tuple in (typing.get_origin(part) for part in (hint, *typing.get_args(hint)))
    return tuple(value) if isinstance(value, list) and is_tuple else value


def _refusal(where: str, name: str, value: object, hint: object) -> Exception:
    found = f"the class {value.__name__}" if isinstance(value, type) else shown(repr(value))[:100]
    cure = CURES.get(f"{where}.{name}") or CURES.get(name, f"see help({where})")
    if isinstance(value, type) and name not in ("dtype", "transform"):
        cure = f"make one: {value.__name__}(...)"
    elif near := _meant(value, listed(hint)):
        cure = f"did you mean {near!r}?"
    elif missing := _missing(value, hint):
        cure = f"add {', '.join(missing)} to it"
    kind = ValueError if fits(value, hint, roughly=True) else TypeError
    return kind(f"{where}: {name} is {found}, expected {describe(hint)}; {cure}")


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
