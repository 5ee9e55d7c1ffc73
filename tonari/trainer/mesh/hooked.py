"""Hooks that a caller has put on weights, and memory that two weights share, over a mesh.

Weights that are made by themselves, sharded, or computed in another precision are other tensors
than those that the module's constructor made. Hooks on gradients go along; what cannot is refused.
"""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from tonari.trainer.errors import ConfigError
from tonari.trainer.models.staged import StagedModel
from tonari.trainer.private.modules import has_late_hooks, hooks_of, parameters_of

Hooks = Mapping[int, Callable[[Tensor], Tensor | None]]
"""As torch keeps those of a tensor, so that one that the caller removes is gone."""


def hooks_on(model: nn.Module) -> dict[str, Hooks]:
    """Find the hooks on gradients of a model's weights, by name."""
    named = model.named_parameters(remove_duplicate=False)
    return {name: hooks for name, its in named if (hooks := hooks_of(its))}


def check_hooks(model: StagedModel, mesh: DeviceMesh, *, is_whole: bool) -> None:
    """Refuse hooks on weights that would be lost or be given a part of a gradient.

    Args:
        model: The whole of it.
        mesh: With the axes of ``tonari.trainer.mesh.mesh.AXES``.
        is_whole: Whether weights stay the tensors that they are.

    Raises:
        ConfigError: Names a weight.
    """
    if mesh["tp"].size() > 1 and (hooks := hooks_on(model)):
        raise ConfigError(
            f"mesh.tp is {mesh['tp'].size()}, but the weight {_first(hooks)} has a hook on its "
            "gradient, of which a rank of tp may have a part; leave mesh.tp out, or do it in "
            "forward"
        )
    late = [name for name, its in model.named_parameters() if has_late_hooks(its)]
    if late and not is_whole:
        raise ConfigError(
            f"the weight {_plain(late[0])} has a hook that is called once its gradient is added "
            "up (register_post_accumulate_grad_hook), which runs in one process in its own "
            "precision only; leave it out: the trainer steps and clips by itself"
        )


def carry_hooks(hooks: Mapping[str, Hooks], part: nn.Module) -> None:
    """Put hooks on the weights of a part that took the places of those that had them."""
    sharded: list[tuple[nn.Module, str, Hooks]] = []
    for path, module in part.named_modules(remove_duplicate=False):
        for name, parameter in parameters_of(module).items():
            found = hooks.get(f"{path}.{name}" if path else name)
            if found is None or parameter is None or hooks_of(parameter) is found:
                continue
            if isinstance(parameter, DTensor):
                sharded.append((module, name, found))
            else:
                put_hooks(found, parameter)
    if not sharded:
        return
    done: dict[int, Tensor] = {}

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def put(*_: object) -> None:
        # Whole weights are other tensors, the same in each step, which are here once gathered.
        for module, name, found in sharded:
            whole = parameters_of(module)[name]
            if whole is not None and not isinstance(whole, DTensor) and id(whole) not in done:
                done[id(whole)] = whole
                put_hooks(found, whole)

    for module in part.modules():
        if isinstance(module, FSDPModule):
            module.register_forward_pre_hook(put)


def put_hooks(hooks: Hooks, parameter: Tensor) -> None:
    """Have the hooks of another tensor change this one's gradient."""

    def change(gradient: Tensor) -> Tensor:
        for hook in list(hooks.values()):
            changed = hook(gradient)
            gradient = gradient if changed is None else changed.to(gradient.dtype)
        return gradient

    if parameter.requires_grad:
        parameter.register_hook(change)  # type: ignore[no-untyped-call]


def check_memory(model: StagedModel) -> None:
    """Refuse two weights in the same memory, where each would get memory of its own.

    Raises:
        ConfigError: Names two of them.
    """
    first: dict[Any, str] = {}
    for name, parameter in model.named_parameters():
        where: Any
        if model.recording is not None:
            view = model.recording.views[name]
            where = view.storage, view.offset * view.dtype.itemsize
        elif parameter.is_meta or not parameter.numel():
            continue
        else:
            where = parameter.data_ptr()
        before = first.setdefault(where, name)
        if before != name and parameter.numel():
            raise ConfigError(
                f"the weights {_plain(before)} and {_plain(name)} are two parameters in the same "
                "memory, of which the mesh would make two; tie them as one (b.weight = a.weight, "
                "not b.weight.data = a.weight.data)"
            )


def _first(hooks: Mapping[str, Hooks]) -> str:
    return _plain(next(iter(hooks)))


def _plain(name: str) -> str:
    return name.removeprefix("wrapped.")
