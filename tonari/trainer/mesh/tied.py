"""Parameters that have several names, or a copy on several stages: one weight all the same.

A tied weight on two stages has a copy on each. Each copy gets the gradient of its own uses, so the
copies' gradients are added up before the optimizer's step, in the order of the stages, on all of
them alike: equal weights with equal gradients stay equal.
"""

from collections.abc import Iterable, Mapping, Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from tonari.trainer.errors import ConfigError
from tonari.trainer.private.modules import parameters_of

Owners = Mapping[str, tuple[int, ...]]
"""Of each parameter that several stages have, by its first name: their numbers, ascending."""


def first_names(part: nn.Module) -> Mapping[str, str]:
    """Say the first name in the whole model of each of a part's parameters that has several."""
    names: Mapping[str, str] = getattr(part, "first_names", {})
    return names


def tie_again(part: nn.Module, before: Mapping[str, str]) -> None:
    """Make one parameter of those that were one before tp split them, in place.

    Args:
        part: Split.
        before: Further names of the parameters of this part, and the first of each.

    Raises:
        ConfigError: If they were split differently.
    """
    for name, first in before.items():
        own, kept = part.get_parameter(name), part.get_parameter(first)
        if _placed(own) != _placed(kept):
            raise ConfigError(
                f"mesh.tp: {name} and {first} are one weight, but tp splits them differently: "
                f"{_placed(own)} and {_placed(kept)}; name both in the tp plan with styles that "
                "split them alike, or neither"
            )
        owner, _, leaf = name.rpartition(".")
        parameters_of(part.get_submodule(owner))[leaf] = kept


def find_owners(names: Sequence[Iterable[str]]) -> Owners:
    """Find the parameters that several stages have.

    Args:
        names: Of each stage in its order: the first names of its parameters.
    """
    stages: dict[str, list[int]] = {}
    for stage, owned in enumerate(names):
        for name in dict.fromkeys(owned):
            stages.setdefault(name, []).append(stage)
    return {name: tuple(owned) for name, owned in stages.items() if len(owned) > 1}


class Ties:
    """The copies that this rank has of weights that several stages have.

    Args:
        parts: This rank's stages; each knows its ``shared_with`` and ``first_names``.
        stages: Their numbers.
        mesh: With the axes of ``tonari.trainer.mesh.mesh.AXES``.
        rank_of_stage: Of the pipeline, for each stage.

    Attributes:
        again: Copies that are not the first one of their weight: norms pass over them.

    Raises:
        ConfigError: If tp splits a weight on one stage in another way than on another.
    """

    def __init__(
        self, parts: Sequence[nn.Module], stages: Sequence[int], mesh: DeviceMesh,
        rank_of_stage: Sequence[int],
    ) -> None:  # fmt: skip
        self._group = mesh["pp"].get_group() if rank_of_stage else None
        self._here = mesh["pp"].get_local_rank()
        self._rank_of_stage = rank_of_stage
        self.again: set[nn.Parameter] = set()
        # Of each weight, in the order of its name: all owning stages, and the copies here.
        self._copies: list[tuple[tuple[int, ...], dict[int, nn.Parameter]]] = []
        by_name: dict[str, dict[int, nn.Parameter]] = {}
        owners: dict[str, tuple[int, ...]] = {}
        shared_anywhere = False
        for stage, part in zip(stages, parts, strict=True):
            shared: Owners = getattr(part, "shared_with", {})
            names = first_names(part)
            for name, parameter in part.named_parameters():
                first = names.get(name, name)
                # One that is not trained has no gradient, not even of zeros.
                if first in shared and parameter.requires_grad:
                    owners[first] = shared[first]
                    by_name.setdefault(first, {})[stage] = parameter
            shared_anywhere |= bool(shared)
        if shared_anywhere:
            self._check_alike(by_name)
        for name in sorted(by_name):
            copies = by_name[name]
            self._copies.append((owners[name], copies))
            self.again |= {copy for stage, copy in copies.items() if stage != owners[name][0]}

    def add_gradients(self) -> None:
        """Give each copy the sum of all copies' gradients. Collective over the owners."""
        if not self._copies:
            return
        sends: list[dist.P2POp] = []
        got: list[dict[int, Tensor]] = []
        for owners, copies in self._copies:
            grads = {stage: _local(copy) for stage, copy in copies.items()}
            for stage in owners:
                if stage not in copies:
                    grads[stage] = torch.empty_like(next(iter(grads.values())))
            got.append(grads)
            sends += self._messages(owners, copies, grads)
        if sends:
            for work in dist.batch_isend_irecv(sends):
                work.wait()
        for (owners, copies), grads in zip(self._copies, got, strict=True):
            total = grads[owners[0]].clone()
            for stage in owners[1:]:
                total += grads[stage]
            for copy in copies.values():
                _local(copy).copy_(total)

    def _check_alike(self, by_name: Mapping[str, Mapping[int, nn.Parameter]]) -> None:
        """Compare the copies' splits over the pipeline. Collective over it."""
        mine = {
            name: (stage, _placed(copy), tuple(_numbers(copy).shape))
            for name, copies in by_name.items()
            for stage, copy in copies.items()
        }
        everyone: list[dict[str, tuple[int, str, tuple[int, ...]]]] = [{}]
        everyone *= len(set(self._rank_of_stage))
        dist.all_gather_object(everyone, mine, group=self._group)
        for name in sorted(set().union(*everyone)):
            found = sorted(each[name] for each in everyone if name in each)
            if len({(how, shape) for _, how, shape in found}) > 1:
                shown = "; ".join(
                    f"stage {stage}: {how}, {list(shape)}" for stage, how, shape in found
                )
                raise ConfigError(
                    f"mesh.tp: {name} is one weight on several stages, but they split it "
                    f"differently ({shown}); name all its layers in the tp plan with styles that "
                    "split them alike, or none"
                )

    def _messages(
        self, owners: tuple[int, ...], copies: Mapping[int, nn.Parameter],
        grads: Mapping[int, Tensor],
    ) -> list[dist.P2POp]:  # fmt: skip
        messages = []
        for stage in owners:
            rank = self._rank_of_stage[stage]
            others = sorted({self._rank_of_stage[other] for other in owners} - {rank})
            if stage in copies:
                messages += [
                    dist.P2POp(dist.isend, grads[stage], group=self._group, group_peer=other)
                    for other in others
                ]
            elif self._here in others:
                messages.append(
                    dist.P2POp(dist.irecv, grads[stage], group=self._group, group_peer=rank)
                )
        return messages


def _local(parameter: nn.Parameter) -> Tensor:
    """See the gradient that this rank keeps; zeros where the copy was not used."""
    if parameter.grad is None:
        parameter.grad = torch.zeros_like(parameter)
    grad = parameter.grad
    return grad.to_local() if isinstance(grad, DTensor) else grad


def _numbers(parameter: nn.Parameter) -> Tensor:
    return parameter.to_local() if isinstance(parameter, DTensor) else parameter


def _placed(parameter: nn.Parameter) -> str:
    """Say how tp splits a parameter; dp splits all copies alike."""
    if isinstance(parameter, DTensor):
        names = parameter.device_mesh.mesh_dim_names or ()
        if "tp" in names and not parameter.placements[names.index("tp")].is_replicate():
            return str(parameter.placements[names.index("tp")])
    return "whole"
