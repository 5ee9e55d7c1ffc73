"""Models without memory, each of whose weights can be made by itself.

While a model is built, its tensors are made on ``meta``, and what is done to them is written down.
Numbers are drawn all the same, and dropped, so that every later draw is the one that it would have
been. To make a weight, what it depends on is repeated, each draw from the generator's state before
it: the weight is the same, bit for bit, as that of a model built in memory.

Source: the idea is that of torchdistX's ``deferred_init``.
"""

import gc
import logging
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from tonari.trainer.errors import ConfigError
from tonari.trainer.models.fake import written
from tonari.trainer.models.seeded import seeded
from tonari.trainer.models.staged import StagedModel
from tonari.trainer.models.tape import Constant, Entry, Tape, View, storages
from tonari.trainer.private.dispatch import DisableTorchFunction, TorchDispatchMode, schema_of
from tonari.trainer.private.modules import buffers_of, parameters_of
from tonari.trainer.private.storages import storage_id
from tonari.trainer.private.trees import tree_leaves, tree_map

logger = logging.getLogger(__name__)

Model = TypeVar("Model", bound=StagedModel)

aten = torch.ops.aten

FILLS = {
    aten.normal_, aten.uniform_, aten.exponential_, aten.log_normal_, aten.cauchy_,
    aten.geometric_, aten.random_, aten.bernoulli_, aten.fill_, aten.zero_, aten.copy_,
}  # fmt: skip
"""Operations in place whose result does not depend on what was there before."""

EMPTY = {aten.empty, aten.empty_like, aten.empty_strided, aten.new_empty, aten.new_empty_strided}
"""Operations whose result has no contents yet; memory is allocated where it is first filled."""

READS = (torch.Tensor.tolist, torch.Tensor.numpy, torch.Tensor.__array__)
"""Those that give values to Python without an operation of torch's."""


SEEMS: Mapping[Any, object] = {
    vars(torch.Tensor.__base__)[name].__get__: value
    for name, value in (("is_meta", False), ("is_cpu", True), ("device", torch.device("cpu")))
}
"""What a tensor of a model that is being recorded says of itself: what it will be."""


class NotRecordedError(Exception):
    """A model does something that cannot be written down and repeated."""


class Recording:
    """How the weights of a model come to be; one for all copies of the model.

    Attributes:
        tape: What was done.
        views: Where each parameter and buffer of the whole model lies, by each of its names.
    """

    def __init__(self, tape: Tape, views: Mapping[str, View]) -> None:
        self.tape, self.views = tape, views

    def __deepcopy__(self, memo: dict[int, object]) -> "Recording":
        return self

    def make(self, name: str) -> Tensor:
        """Make one parameter or buffer, whole, on the CPU, as the model's constructor did."""
        return self.tape.replay(self.views[name])

    def digests(self) -> dict[str, int]:
        """Sum up how each parameter and buffer comes to be: the same sum, the same contents."""
        made = self.tape.digests()
        return {name: made.get(its.storage, 0) for name, its in self.views.items()}


def deferred(build: Callable[[], Model], *, seed: int, draws: bool = True) -> Model:
    """Build a model on ``meta``, whose ``recording`` makes the weights that `seeded` gives.

    A model that cannot be recorded is built in memory, with a warning. Reading values, as
    ``item()`` does, is possible. Making tensors on another device than the CPU is not, ``meta``
    among them, nor keeping them where no module knows of them, nor loading weights from a file.

    Args:
        build: Makes the model; called again where it cannot be recorded.
        seed: Of the run.
        draws: False where nothing but shapes is asked for: no numbers are drawn, which takes no
            time, and the ``recording`` makes others.
    """
    try:
        operations = _DeferredOperations(draws=draws)
        with _new_objects_only():
            with _Reads(operations), operations:
                model = seeded(build, seed=seed)
            weights = [*model.parameters(), *model.buffers()]
            # What was built before is here already.
            if isinstance(model, StagedModel) and any(each.is_meta for each in weights):
                _finish(model, operations)
        return model
    except ConfigError:
        raise
    except Exception as error:
        reason = f"{type(error).__name__}: {error}".splitlines()[0]
    model = seeded(build, seed=seed)
    if not (dist.is_initialized() and dist.get_rank()):
        num_bytes = sum(each.nbytes for each in [*model.parameters(), *model.buffers()])
        logger.warning(
            "each rank makes the whole model in memory, %.3f GB, before it is cut: its constructor "
            "loads weights, or does what needs them (%s). The run is the same. For less memory "
            "make the model of its config, and give the files as model.weights",
            num_bytes / 1e9, reason,
        )  # fmt: skip
    return model


@contextmanager
def _new_objects_only() -> Iterator[None]:
    """Hide from Python's garbage collector what is here: it takes its time over all of torch."""
    is_frozen = gc.get_freeze_count() > 0
    gc.freeze()
    try:
        yield
    finally:
        # What the caller froze would thaw too
        if not is_frozen:
            gc.unfreeze()


def _finish(model: StagedModel, known: "_DeferredOperations") -> None:
    """Give a model its recording; tensors of modules that are no weights become real.

    Raises:
        NotRecordedError: If a tensor is kept where no module knows of it.
    """
    # Real parameters, such as those made of an array of NumPy's, are constants.
    empty = {
        id(value): known.keep(value)
        for value in [*model.parameters(), *model.buffers()]
        if not value.is_meta
    }
    for module in model.modules():
        for held in (parameters_of(module), buffers_of(module)):
            for name, value in held.items():
                held[name] = empty.get(id(value), value)
    named = [
        *model.named_parameters(remove_duplicate=False),
        *model.named_buffers(remove_duplicate=False),
    ]
    views = {name: known.view(value) for name, value in named}
    weights = {id(value) for _, value in named}
    for module in model.modules():
        for name, value in vars(module).items():
            if isinstance(value, (Tensor, list, tuple, dict)) and not name.startswith("_"):
                vars(module)[name] = tree_map(
                    lambda each: each if id(each) in weights else known.real(each), value
                )
    known.check_forgotten(storages(views.values()))
    model.recording = Recording(known.tape, views)


class _Reads(TorchFunctionMode):
    """Gives the true values to those that read them without an operation."""

    def __init__(self, operations: "_DeferredOperations") -> None:
        super().__init__()
        self._operations = operations

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        # Initial values are not drawn for tensors that are known to have no memory.
        if func in SEEMS and args[0].is_meta:
            return SEEMS[func]
        # Built in memory, the model has no contents there either, until they are read from a file.
        places = [each for each in tree_leaves((args, kwargs)) if _is_place(each)]
        if func is not torch.device and any(str(each) == "meta" for each in places):
            raise NotRecordedError(f"{getattr(func, '__name__', func)} makes a tensor on meta")
        if func in READS and args[0].is_meta:
            args = (self._operations.real(args[0].detach()), *args[1:])
        return func(*args, **(kwargs or {}))


class _DeferredOperations(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Does on ``meta`` what is done to tensors of the CPU, and writes it down."""

    def __init__(self, *, draws: bool) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.tape = Tape()
        self._draws = draws
        # Kept, so that no address comes twice.
        self._storages: dict[int, torch.UntypedStorage] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        with DisableTorchFunction():
            return self._run(func, args, dict(kwargs or {}))

    def _run(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        tensors = [each for each in tree_leaves((args, kwargs)) if isinstance(each, Tensor)]
        without_data = any(each.is_meta for each in tensors)
        if any(argument.name == "device" for argument in schema_of(func).arguments):
            device = torch.device(kwargs.get("device") or "cpu")
            if device.type not in ("cpu", "meta"):
                raise NotRecordedError(f"{func} makes a tensor on {device}")
            if tensors and not without_data and device.type == "cpu":
                return func(*args, **kwargs)
            kwargs["device"] = torch.device("meta")
            if kwargs.get("pin_memory"):
                kwargs["pin_memory"] = False
        elif not without_data:
            return func(*args, **kwargs)
        changed = written(func, args, kwargs)
        returns = any("Tensor" in str(each.type) for each in schema_of(func).returns)
        if any(not each.is_meta for each in changed) or not (changed or returns):
            # It changes a real tensor, or gives Python a value.
            return func(*self.real(args), **self.real(kwargs))
        if torch.Tag.inplace_view in func.tags:
            return func(*args, **kwargs)
        return self._record(func, args, kwargs, changed)

    def _record(
        self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], written: list[Tensor]
    ) -> Any:
        noted = tree_map(self._noted, (args, kwargs))
        given = [each for each in tree_leaves(noted) if isinstance(each, View)]
        changed = [self.view(each) for each in written]
        fills = func.overloadpacket in FILLS and changed[0].is_whole
        # What is filled is not read, unless the operation takes it a second time.
        read = [each for each in given if not (fills and each is given[0])]
        state = None
        if torch.Tag.nondeterministic_seeded in func.tags:
            generator = kwargs.get("generator")
            state = torch.get_rng_state() if generator is None else generator.get_state()
            if self._draws:
                self._draw(func, noted, given[0] if fills else None)
        results = self._without_data(func, args, kwargs)
        before = storages(given)
        made = [
            (position, self.view(each, new=True))
            for position, each in enumerate(tree_leaves(results))
            if isinstance(each, Tensor) and _address(each) not in before
        ]
        if (made or changed) and func.overloadpacket not in EMPTY:
            self.tape.add(
                Entry(
                    func=func, args=noted[0], kwargs=noted[1], depends=storages(read),
                    writes=storages(changed) | storages(view for _, view in made),
                    makes=tuple(made), state=state,
                )
            )  # fmt: skip
        return results

    def _draw(self, func: Any, noted: Any, filled: View | None) -> None:
        """Draw as the operation does, from the same generator, and drop what was drawn."""

        def real(value: Any) -> Any:
            if isinstance(value, View):
                return value.of({}) if value is filled else self.tape.replay(value)
            return value.value.clone() if isinstance(value, Constant) else value

        args, kwargs = tree_map(real, noted)
        func(*args, **kwargs)

    def _without_data(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run an operation on ``meta``; where its result's shape follows from values, on these."""
        try:
            return func(*tree_map(_empty, args), **tree_map(_empty, kwargs))
        except NotImplementedError:
            if written(func, args, kwargs) or kwargs.get("generator") is not None:
                raise
        with torch.random.fork_rng(devices=[]):
            results = func(*self.real(args), **self.real(kwargs))
        return tree_map(_empty, results)

    def _noted(self, value: Any) -> Any:
        if isinstance(value, Tensor):
            # A real tensor may be changed later.
            return self.view(value) if value.is_meta else Constant(value.clone())
        is_meta = isinstance(value, torch.device) and value.type == "meta"
        return torch.device("cpu") if is_meta else value

    def view(self, value: Tensor, *, new: bool = False) -> View:
        """Find where a tensor without data lies.

        Raises:
            NotRecordedError: If it was not made here.
        """
        storage = value.untyped_storage()
        if not new and storage_id(storage) not in self._storages:
            raise NotRecordedError(f"a tensor {list(value.shape)} was made elsewhere on meta")
        self._storages[storage_id(storage)] = storage
        return View(
            storage_id(storage), storage.nbytes(), value.dtype, tuple(value.shape), value.stride(),
            int(value.storage_offset()),
        )  # fmt: skip

    def real(self, values: Any) -> Any:
        """Make real tensors of those without data, in a tree of values."""

        def make(value: Any) -> Any:
            if isinstance(value, Tensor) and value.is_meta:
                return self.tape.replay(self.view(value))
            is_meta = isinstance(value, torch.device) and value.type == "meta"
            return torch.device("cpu") if is_meta else value

        return tree_map(make, values)

    def keep(self, value: Tensor) -> Tensor:
        """Give a tensor without data that is made of a real one."""
        empty = torch.empty_like(value, device="meta").detach()
        view = self.view(empty, new=True)
        self.tape.add(
            Entry(
                func=aten.copy_.default, args=(view, Constant(value.detach())), kwargs={},
                depends=frozenset(), writes=storages([view]),
            )
        )  # fmt: skip
        if isinstance(value, nn.Parameter):
            parameter = nn.Parameter(empty, value.requires_grad)
            parameter.__dict__.update(value.__dict__)
            return parameter
        return empty

    def check_forgotten(self, weights: frozenset[int]) -> None:
        """Refuse tensors that are still used but belong to no module.

        Raises:
            NotRecordedError: Names the shape of one.
        """
        gc.collect()
        for each in gc.get_objects():
            if type(each) in (Tensor, nn.Parameter) and each.is_meta:
                address = _address(each)
                if address in self._storages and address not in weights:
                    raise NotRecordedError(
                        f"a tensor {list(each.shape)} is kept where no module knows of it"
                    )


def _is_place(value: Any) -> bool:
    return isinstance(value, (str, torch.device))


def _empty(value: Any) -> Any:
    if not isinstance(value, Tensor) or value.is_meta:
        return value
    return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device="meta")


def _address(value: Tensor) -> int:
    address: int = storage_id(value.untyped_storage())
    return address
