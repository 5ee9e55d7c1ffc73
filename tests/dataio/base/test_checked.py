"""One validator: what fits an annotation, within its ranges, and how it is put in words."""

import inspect
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Annotated, Any, Literal

import pytest
import torch

import dataio
from dataio.base.checked import (
    ALIKE,
    TOML,
    Count,
    Fraction,
    Positive,
    Range,
    Share,
    describe,
    fits,
    nearest,
)
from importance import Kakurenbo

MIDDLE = Annotated[float, Range(0, 1, "()")]


@pytest.mark.parametrize(
    ("hint", "fitting", "others"),
    [
        (int, [0, -1], [True, 1.0, "1", None]),
        (float, [0, 0.5, math.inf], [True, "0", None]),
        (Count, [1, 2], [0, True, 1.0]),
        (Fraction, [0, 0.5, 1], [-0.1, 1.1, math.nan, True]),
        (Share, [0, 0.99], [1]),
        (Positive, [1e-9], [0, 0.0]),
        (MIDDLE, [0.5], [0, 1]),
        (Count | None, [None, 1], [0, ""]),
        (tuple[Share, ...], [(), (0, 0.5)], [[0], (1,), (0, 1)]),
        (tuple[int, str], [(1, "a")], [(1,), (1, 2), (1, "a", "b")]),
        (Sequence[Count], [[1], (1,), []], ["1", [0]]),
        (Mapping[str, Count], [{}, {"a": 1}], [{"a": 0}, {1: 1}, [("a", 1)]]),
        (dict[str, Any], [{"a": object()}], [[]]),
        (Literal["a", "b"], ["a"], ["c", ("a",), 1]),
        (Literal[1, 3], [1, 3], [True, 1.0, 2, "1"]),
        (Callable[[int], int], [print, int], [1]),
    ],
)
def test_what_fits_is_what_the_annotation_says(
    hint: object, fitting: list[object], others: list[object]
) -> None:
    assert all(fits(value, hint) for value in fitting)
    assert not any(fits(value, hint) for value in others)


def test_roughly_is_the_type_without_words_and_ranges() -> None:
    assert fits((0, "c"), tuple[Count, Literal["a"]], roughly=True)
    assert not fits((0.5, "c"), tuple[Count, Literal["a"]], roughly=True)


@pytest.mark.parametrize(
    ("hint", "python", "toml"),
    [
        (Count, "a whole number >= 1", "a whole number >= 1"),
        (MIDDLE, "a number in (0, 1)", "a number in (0, 1)"),
        (Positive | None, "a number > 0 or None", "a number > 0 or leaving it out"),
        (Literal["a", "b", "c"], '"a", "b" or "c"', "one of 'a', 'b', 'c'"),
        (str | tuple[str, ...] | None, "a str, a tuple of a str or None",
         "text or a list, each text or leaving it out"),
        (bool | Callable[[int], int], "True or False or a function", "true or false"),
        (Mapping[str, int], "a mapping of a str to a whole number", "a table"),
    ],
)  # fmt: skip
def test_an_annotation_in_words(hint: object, python: str, toml: str) -> None:
    assert describe(hint) == python
    assert describe(hint, TOML) == toml


def test_the_name_that_was_meant() -> None:
    assert nearest("epocs", ["seed", "epochs"]) == "epochs"
    assert nearest("xyz", ["seed", "epochs"]) is not None, "a guess at least"
    assert nearest("xyz", ["seed", "epochs"], likeness=ALIKE) is None
    assert nearest("epocs", []) is None


def test_each_argument_of_a_dataloader_is_taken_or_has_advice() -> None:
    theirs = inspect.signature(torch.utils.data.DataLoader).parameters.keys()
    ours = inspect.signature(dataio.Loader).parameters.keys()
    for name in {"log"} | theirs - ours - {"dataset"}:
        with pytest.raises(TypeError, match=f"^Loader: {name} is unknown, expected .*; ") as error:
            dataio.Loader("none", batch_size=4, fields={}, **{name: 1})  # type: ignore[arg-type]
        assert not str(error.value).endswith("; leave it out"), f"{name}: and why?"


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: dataio.Loader("none", 16), r"^Loader: 16 has no name; .* batch_size=16$"),  # type: ignore[call-arg]
        (lambda: dataio.Workers(thread=1), r"thread is unknown, .*; did you mean threads\?"),  # type: ignore[call-arg]
        (lambda: dataio.Workers(0, 1), r"^Workers: 0 has no name; .* threads=0$"),  # type: ignore[call-arg]
        (lambda: dataio.Loader("none", batch_size=1), r"^Loader: missing .* 'fields'; give .*Ima"),  # type: ignore[call-arg]
        (lambda: Kakurenbo(0.3, columns=("history",)), r"columns is unknown, .*subclass say"),  # type: ignore[call-arg]
        (dataio.Int, r"^Int: missing a required argument: 'key'; see help\(Int\)$"),
    ],
)
def test_arguments_too_many_or_too_few_are_named(call: Callable[[], object], message: str) -> None:
    with pytest.raises(TypeError, match=message):
        call()
