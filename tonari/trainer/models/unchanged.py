"""Run a caller's code, and put back what it changed: attributes, caches, generators.

A look at a model on tensors without data, and an evaluation, are to leave no trace in what trains.
So what a caller's objects reach is listed before, and put back after: attributes, containers,
buffers and generators of random numbers; and for a look, which the caller does not know of, also
what code reaches: variables of closures, class attributes, global variables that functions name,
caches of `functools`. The code of installed packages is not followed.
"""

import functools
import random  # noqa: TID251
import sys
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from types import (
    CellType,
    CodeType,
    FunctionType,
    MemberDescriptorType,
    MethodType,
    ModuleType,
    SimpleNamespace,
)
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from tonari.trainer.models.absent import Absent
from tonari.trainer.private.compiling import is_compiler_imported
from tonari.trainer.private.modules import parameters_of

OURS = ("dataio", "tonari", "shuffle", "importance")
LIBRARIES = frozenset({*sys.stdlib_module_names, *OURS, "torch", "numpy", "PIL", "_pytest"})
"""Packages whose code is not followed, as that of all installed ones, which is long."""

WRAPPERS = (staticmethod, classmethod, property, functools.cached_property)

HOLDERS = (nn.Module, SimpleNamespace, functools.partial, *WRAPPERS)
"""Classes of libraries whose objects hold what a caller puts into them."""

MOST_ITEMS = 1 << 16
"""Of a container that is put back: a larger one is a table of data, not a state."""

PLAIN = (
    str, bytes, int, float, complex, type(None), range, torch.dtype, torch.device, torch.Size,
    np.generic, np.dtype, CodeType, ModuleType,
)  # fmt: skip

Undo = Callable[[], None]


@contextmanager
def without_trace(*roots: object) -> Iterator[None]:
    """Put back at the end all that modules, tasks and functions reach, and global generators.

    Inside, they run on tensors without data. Weights that modules hold stay in their places: who
    puts others there puts them back.
    """
    held = _Held(follows_code=True)
    for root in (random._inst, np.random.mtrand._rand, *roots):
        held.reach(root)
    generators = [torch.default_generator, *torch.cuda.default_generators]
    on_gpu = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
    for generator in generators if on_gpu else generators[:1]:
        held.reach(generator)
    # What a caller compiles runs as it is: nothing is compiled for tensors without data.
    compiler = is_compiler_imported()
    try:
        with torch.compiler.set_stance("force_eager") if compiler else nullcontext():
            yield
    finally:
        held.put_back()


@contextmanager
def state_kept(modules: Iterable[nn.Module]) -> Iterator[None]:
    """Put back at the end what modules hold: buffers, weights that are trained, attributes.

    It takes a copy of them. What a forward pass notes elsewhere, such as in a global list, stays.
    """
    held = _Held(follows_code=False)
    for module in modules:
        held.reach(module)
    try:
        yield
    finally:
        held.put_back()


class _Held:
    """What is reached, and how each of it is put back.

    Args:
        follows_code: Whether to go into functions and classes; else into weights that are trained.
    """

    def __init__(self, *, follows_code: bool) -> None:
        self._follows_code = follows_code
        self._undo: list[Undo] = []
        # Kept, so that no address comes twice.
        self._seen: dict[int, object] = {}
        self._ahead: list[object] = []

    def reach(self, root: object) -> None:
        """Note an object, and all that it leads to."""
        self._ahead.append(root)
        while self._ahead:
            value = self._ahead.pop()
            if isinstance(value, PLAIN) or id(value) in self._seen:
                continue
            self._seen[id(value)] = value
            self._note(value)

    def put_back(self) -> None:
        """Give everything back what it held; the tensors last, in their places again."""
        for undo in reversed(self._undo):
            undo()

    def _note(self, value: Any) -> None:
        match value:
            case Absent():
                pass  # nothing is there to be changed
            case Tensor():
                self._note_tensor(value)
            case np.ndarray():
                if value.flags.writeable and value.size <= MOST_ITEMS:
                    copy = value.copy()
                    self._undo.append(lambda: np.copyto(value, copy))
            case torch.Generator():
                state = value.get_state()
                self._undo.append(lambda: _set(value, state))
            case random.Random():
                drawn = value.getstate()
                self._undo.append(lambda: value.setstate(drawn))
            case np.random.Generator():
                self._ahead.append(value.bit_generator)
            case np.random.RandomState():
                words = value.get_state(legacy=False)
                self._undo.append(lambda: value.set_state(words))
            case np.random.BitGenerator():
                before = value.state
                self._undo.append(lambda: setattr(value, "state", before))
            case dict() | list() | set() | deque() | tuple() | frozenset():
                self._note_items(value)
            case FunctionType() | MethodType() | type() | functools._lru_cache_wrapper():
                if self._follows_code:
                    self._note_code(value)
            case _:
                self._note_object(value)

    def _note_code(self, value: Any) -> None:
        match value:
            case functools._lru_cache_wrapper():
                misses = value.cache_info().misses
                self._undo.append(lambda: _forget(value, misses))
                self._ahead.append(value.__wrapped__)
            case FunctionType():
                self._note_function(value)
            case MethodType():
                self._ahead += [value.__self__, value.__func__]
            case type():
                self._note_class(value)

    def _note_tensor(self, value: Tensor) -> None:
        # A look has other tensors in the weights' places. Of those that are not trained an
        # evaluation takes no copy: a large model may have little more memory than they take.
        if isinstance(value, nn.Parameter) and (self._follows_code or not value.requires_grad):
            return
        if not value.is_meta:
            own = value.detach()
            copy = _local_part(own).clone()
            self._undo.append(lambda: _copy_back(value, own, copy))

    def _note_items(self, value: Any) -> None:
        if len(value) > MOST_ITEMS:
            return
        items = list(value.values()) if isinstance(value, dict) else list(value)
        self._ahead += items
        if isinstance(value, dict):
            before = list(value.items())
            self._undo.append(lambda: _refill_dict(value, before))
        elif not isinstance(value, (tuple, frozenset)):
            self._undo.append(lambda: _refill(value, items))

    def _note_object(self, value: Any) -> None:
        kind = type(value)
        if not isinstance(value, HOLDERS) and _is_library(kind.__module__):
            return
        if isinstance(value, functools.partial):
            self._ahead += [value.func, value.args, value.keywords]
        if isinstance(value, WRAPPERS):
            self._ahead += [getattr(value, name, None) for name in ("__func__", "fget", "func")]
        self._ahead.append(kind)
        attributes = _own_dict(value)
        if attributes is not None and isinstance(value, nn.Module):
            # FSDP keeps whole weights here at times, and knows which: they are not ours to change.
            weights = parameters_of(value)
            self._seen[id(weights)] = weights
            self._ahead += weights.values()
        self._ahead.append(attributes)
        for base in kind.__mro__:
            names = vars(base).get("__slots__", ())
            for name in (names,) if isinstance(names, str) else names:
                if isinstance(slot := vars(base).get(name), MemberDescriptorType):
                    self._note_slot(value, slot)

    def _note_slot(self, value: Any, slot: Any) -> None:
        try:
            before = slot.__get__(value)
        except AttributeError:
            return
        self._ahead.append(before)
        self._undo.append(lambda: slot.__set__(value, before))

    def _note_class(self, kind: type) -> None:
        if _is_library(kind.__module__):
            return
        before = {
            name: its
            for name, its in vars(kind).items()
            if name not in ("__dict__", "__weakref__", "__doc__")
        }
        self._ahead += [*before.values(), *kind.__mro__[1:]]
        self._undo.append(lambda: _refill_class(kind, before))

    def _note_function(self, value: FunctionType) -> None:
        if _is_library(value.__module__):
            return
        self._ahead += [value.__defaults__, value.__kwdefaults__, value.__dict__]
        for cell in value.__closure__ or ():
            self._note_cell(cell)
        names = _names(value.__code__)
        self._note_globals(value.__globals__, names)
        for name in names & value.__globals__.keys():
            found = value.__globals__[name]
            if isinstance(found, ModuleType) and not _is_library(found.__name__):
                self._note_globals(vars(found), names)

    def _note_cell(self, cell: CellType) -> None:
        try:
            before = cell.cell_contents
        except ValueError:
            return
        self._ahead.append(before)
        self._undo.append(lambda: setattr(cell, "cell_contents", before))

    def _note_globals(self, held: dict[str, Any], names: frozenset[str]) -> None:
        before = {name: held[name] for name in names & held.keys()}
        self._ahead += before.values()
        missing = names - held.keys()

        def undo() -> None:
            held.update(before)
            for name in missing & held.keys():
                del held[name]

        self._undo.append(undo)


def _is_library(module: str | None) -> bool:
    package = _root(module)
    return package in LIBRARIES or _is_installed(package)


@functools.cache
def _is_installed(package: str) -> bool:
    module = sys.modules.get(package)
    paths = [*getattr(module, "__path__", ()), getattr(module, "__file__", None) or ""]
    return any(name in path for path in paths for name in ("site-packages", "dist-packages"))


def _root(module: str | None) -> str:
    return (module or "builtins").partition(".")[0]


def _own_dict(value: object) -> dict[str, Any] | None:
    try:
        found = object.__getattribute__(value, "__dict__")
    except AttributeError:
        return None
    return found if isinstance(found, dict) else None


@functools.lru_cache(maxsize=4096)
def _names(code: CodeType) -> frozenset[str]:
    """List the names that code looks up outside of itself, functions within it included."""
    within = [each for each in code.co_consts if isinstance(each, CodeType)]
    return frozenset(code.co_names).union(*map(_names, within))


def _refill_dict(held: dict[Any, Any], before: list[tuple[Any, Any]]) -> None:
    now = list(held.items())
    same = len(now) == len(before) and all(
        one[0] is other[0] and one[1] is other[1] for one, other in zip(now, before, strict=True)
    )
    if not same:
        held.clear()
        held.update(before)


def _refill(held: Any, before: list[Any]) -> None:
    now = list(held)
    if len(now) == len(before) and all(a is b for a, b in zip(now, before, strict=True)):
        return
    held.clear()
    held.update(before) if isinstance(held, set) else held.extend(before)


def _refill_class(kind: type, before: Mapping[str, object]) -> None:
    now = vars(kind)
    for name in [name for name in now if name not in before]:
        if name not in ("__dict__", "__weakref__", "__doc__"):
            type.__delattr__(kind, name)
    for name, value in before.items():
        if now.get(name) is not value:
            type.__setattr__(kind, name, value)


def _forget(cache: Any, misses: int) -> None:
    if cache.cache_info().misses != misses:
        cache.cache_clear()


def _set(generator: torch.Generator, state: Tensor) -> None:
    generator.set_state(state)


def _local_part(value: Tensor) -> Tensor:
    return value.to_local() if isinstance(value, DTensor) else value


@torch.no_grad()
def _copy_back(value: Tensor, own: Tensor, before: Tensor) -> None:
    local = _local_part(own)
    if local is own and value.data_ptr() != own.data_ptr():
        value.data = own  # it was given other memory
    # Not written where nothing has changed: autograd would count it as a change.
    if not torch.equal(local, before):
        local.copy_(before)
