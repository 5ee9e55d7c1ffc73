"""What a tensor-parallel plan leaves to chance: whole tensors that meet parts of others."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor.parallel import ParallelStyle

from tonari.trainer.errors import ConfigError
from tonari.trainer.models.absent import OF_A_SHAPE
from tonari.trainer.models.fake import fake_tensors, written
from tonari.trainer.models.given import Inputs, call
from tonari.trainer.models.styles import Conv1D, LocalPart
from tonari.trainer.models.trace import copy_without_data
from tonari.trainer.private.dispatch import TorchDispatchMode
from tonari.trainer.private.storages import storage_id
from tonari.trainer.private.trees import tree_leaves, tree_map


def check_split(module: nn.Module, plan: Mapping[str, ParallelStyle], inputs: Inputs) -> set[str]:
    """Find layers whose gradients are to be added up, though a plan does not name them.

    Where a plan splits layers, what is between them is a part too. The weight of a norm of single
    heads, which is whole and meets it, gets on each rank the gradient of that rank's heads.

    Args:
        module: Whole; copied.
        plan: Path of a layer -> how it is split.
        inputs: Of the module, as meta tensors.

    Returns:
        The paths of layers all of whose own weights meet nothing but parts.

    Raises:
        ConfigError: Names a weight that meets parts and what is whole, or a tensor that is trained,
            whole and no weight of one layer.
    """
    with fake_tensors() as mode:
        copy, held = copy_without_data(module)
    parts = _Parts(type(module).__name__, held)
    with fake_tensors(mode), parts.followed(copy, plan), parts:
        call(copy, tree_map(_empty, inputs))
    return {parts.layer_of(name, copy) for name in sorted(parts.met_parts)}


class _Parts(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Follows which tensors are this rank's parts.

    Args:
        kind: Of the module.
        held: Its weights, by name.
    """

    def __init__(self, kind: str, held: Mapping[str, Tensor]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._kind = kind
        self._held = held
        # Of weights, and of what is made of one of them alone.
        self._names = {_address(value): name for name, value in held.items()}
        self.met_parts: set[str] = set()
        self._met_whole: set[str] = set()
        # Kept, so that no address comes twice.
        self._parts: dict[int, Tensor] = {}
        self._kept: list[Tensor] = []
        self._is_named = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        given = func(*args, **kwargs)
        made = [leaf for leaf in tree_leaves(given) if isinstance(leaf, Tensor)]
        self._kept += made
        if func.overloadpacket in OF_A_SHAPE or self._is_named:
            return given
        taken = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        weights = {self._names[_address(leaf)] for leaf in taken if _address(leaf) in self._names}
        others = [leaf for leaf in taken if _address(leaf) not in self._names]
        changed = written(func, args, kwargs)
        if any(_address(leaf) in self._parts for leaf in others):
            for leaf in others:
                is_part = _address(leaf) in self._parts or any(leaf is each for each in changed)
                if leaf.requires_grad and not is_part:
                    raise ConfigError(self._refusal(f"a tensor {list(leaf.shape)}", "its layer"))
            self.met_parts |= {name for name in weights if self._held[name].requires_grad}
            self._parts.update((_address(leaf), leaf) for leaf in (*made, *changed))
        elif others:
            self._met_whole |= weights
        elif len(weights) == 1:
            # What is made of one weight alone is no more than that.
            self._names |= {_address(leaf): next(iter(weights)) for leaf in made}
        return given

    def layer_of(self, name: str, module: nn.Module) -> str:
        """Find the layer of a weight that meets parts.

        Raises:
            ConfigError: If the gradients of its weights are not all parts.
        """
        path = name.rpartition(".")[0]
        own = module.get_submodule(path).named_parameters(path, recurse=False)
        names = {its for its, value in own if value.requires_grad}
        if not path or names & self._met_whole or not names <= self.met_parts:
            raise ConfigError(self._refusal(name, path or "its layer"))
        return path

    @contextmanager
    def followed(self, module: nn.Module, plan: Mapping[str, ParallelStyle]) -> Iterator[None]:
        """Note what the layers of a plan give, while the block runs."""
        handles = []
        for path, style in plan.items():
            layer = module.get_submodule(path)
            if (splits := _splits(style)) is not None:
                handles += [
                    layer.register_forward_pre_hook(self._begin),
                    layer.register_forward_hook(self._after(splits)),
                ]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def _begin(self, *_: object) -> None:
        self._is_named += 1

    def _after(self, splits: bool) -> Callable[..., Any]:
        def fresh(value: Any) -> Any:
            if not isinstance(value, Tensor):
                return value
            # Memory of its own, which says whether it is a part.
            made = torch.empty(value.shape, dtype=value.dtype, device=value.device)
            made.requires_grad_(value.requires_grad)
            if splits:
                self._parts[_address(made)] = made
            return made

        def hook(layer: nn.Module, args: object, given: Any) -> Any:
            self._is_named -= 1
            return tree_map(fresh, given)

        return hook

    def _refusal(self, what: str, layer: str) -> str:
        return (
            f"mesh.tp: {what} of {self._kind} is whole on each rank, and meets what the tp plan "
            "splits: each rank would have a part of its gradient, and train on that; name "
            f'{layer} in the plan, by "replicated_with_grad_allreduce" if it works on each head '
            "by itself, or leave the layers around it whole"
        )


def _splits(style: ParallelStyle) -> bool | None:
    """Say whether what a layer gives is a part; None: a style that says nothing of it."""
    if isinstance(style, LocalPart):
        return style.gives.is_shard() or style.gradient.is_partial()
    if isinstance(style, Conv1D):
        return style.by == "outputs"
    for name in ("output_layouts", "desired_output_layouts", "sequence_sharding"):
        layouts = getattr(style, name, None)
        if layouts is not None:
            several = layouts if isinstance(layouts, (tuple, list)) else (layouts,)
            return any(each is not None and not each.is_replicate() for each in several)
    return None


def _address(value: Tensor) -> int:
    address: int = storage_id(value.untyped_storage())
    return address


def _empty(value: Tensor) -> Tensor:
    return torch.empty(value.shape, dtype=value.dtype, device="cpu")
