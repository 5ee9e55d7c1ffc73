"""A function -> what changes when its code does."""

import functools
from collections.abc import Mapping
from types import CodeType, FunctionType

import xxhash


def describe_function(function: object) -> str:
    """Name a function and hash its code; of an object that is called, the code of its class.

    Defaults and what it closes over count as far as they are plain values; functions that it calls
    and what an object holds do not. The same in every process.
    """
    if isinstance(function, functools.partial):
        settings = describe_value([function.args, function.keywords])
        return f"{describe_function(function.func)} {settings}"
    named = function if hasattr(function, "__qualname__") else type(function)
    runs = function if named is function else type(function).__call__
    runs = getattr(runs, "__func__", runs)
    marks = [str(getattr(named, "__module__", "")), str(getattr(named, "__qualname__", ""))]
    if isinstance(runs, FunctionType):
        held = [cell.cell_contents for cell in runs.__closure__ or ()]
        text = describe_value([runs.__code__, runs.__defaults__, runs.__kwdefaults__, held])
        marks.append(xxhash.xxh3_64_hexdigest(text.encode(errors="surrogatepass")))
    return " ".join(marks)


def describe_value(value: object) -> str:
    """Write a value down without addresses, nor an order that another process would not have."""
    if isinstance(value, CodeType):
        parts = [value.co_code.hex(), value.co_names, value.co_varnames, value.co_consts]
        return describe_value(parts)
    if isinstance(value, (list, tuple)):
        return f"{type(value).__name__}({','.join(map(describe_value, value))})"
    if isinstance(value, (set, frozenset)):
        return f"set({','.join(sorted(map(describe_value, value)))})"
    if isinstance(value, Mapping):
        pairs = (f"{describe_value(key)}:{describe_value(its)}" for key, its in value.items())
        return f"map({','.join(sorted(pairs))})"
    if isinstance(value, FunctionType):
        return describe_function(value)
    plain = isinstance(value, (bool, int, float, complex, str, bytes)) or value is None
    return repr(value) if plain else type(value).__qualname__
