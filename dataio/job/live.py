"""Train on when ranks are lost, come or leave: all begin again behind the last step that counts.

It is a restart without a restart. The training function is called again in the same processes, in
a world of the ranks that are left. Model, optimizer and place come from memory, rows from caches.

A step counts if a rank that is left has taken it. A rank takes a step when it has the sum of all
gradients, so every rank has given its part by then. Who is left and lacks the sum takes weights
over from one that has it. No vote is needed beside the sum.
"""

import contextlib
import copy
import gc
import json
import logging
import os
import signal
import threading
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, TypeVar

import torch
import torch.distributed as dist

from dataio.base.errors import WorldError
from dataio.job.generations import EndedError, Generations
from dataio.world import World

Result = TypeVar("Result")
Noting = Callable[[], contextlib.AbstractContextManager[None]]

MOST_IN_VAIN = 5
"""Losses of nobody, one after the other at one step: what comes next is no accident."""

log = logging.getLogger(__name__)


class KeepsPlace(Protocol):
    """What is asked of a loader."""

    @property
    def lost_with_ranks(self) -> str: ...

    def state_dict(self) -> dict[str, object]: ...

    def remember(self) -> Any: ...

    def count(self, state: dict[str, object]) -> None: ...

    def go_on(self, state: dict[str, object], remembered: Sequence[Any]) -> None: ...


@dataclass(frozen=True)
class Counted:
    """What all ranks have in common after a step that counts.

    Attributes:
        number: Steps counted so far.
        loader: Where it stands.
        random: State of torch's generator.
        values: What is not a weight and not a tensor of an optimizer, by the object's name.
        objects: What `LiveJob.keep` was given.
    """

    number: int
    loader: dict[str, object]
    random: torch.Tensor
    values: Mapping[str, Any]
    objects: Mapping[str, Any]

    def state(self) -> dict[str, Any]:
        """Put all of it together, as ``state_dict`` of each gives it: of shards, this rank's."""
        whole = {name: _own(_whole(its, self.values[name])) for name, its in self.objects.items()}
        return {**whole, "loader": self.loader, "random": self.random}


class LiveJob:
    """The ranks that are there, for one call of the training function.

    Attributes:
        world: All of them.
        ranks: Their numbers when the job began.
        num_began: How many they were then.
        number: Steps counted so far, of all calls.
        noting_groups: Within it process groups beside the default one are to be made: waits in
            them end too when ranks are lost.
        leave: Leaves the job: the others go on. Raises SystemExit, with status 0.
        remembered: By this rank of the loaders since the last step that counts.
    """

    def __init__(
        self, world: World, ranks: tuple[int, ...], counted: Counted | None,
        *, num_began: int = 0, noting_groups: Noting = contextlib.nullcontext,
        after_step: Callable[[], None] = lambda: None, leave: Callable[[], None] = lambda: None,
        remembered: Sequence[Any] = (),
    ) -> None:  # fmt: skip
        self.world, self.ranks, self.noting_groups = world, ranks, noting_groups
        self.num_began, self.leave, self._after_step = num_began, leave, after_step
        self.counted, self.remembered = counted, [*remembered]
        self._loader: KeepsPlace | None = None
        self._objects: dict[str, Any] = {}

    @property
    def number(self) -> int:
        return self.counted.number if self.counted is not None else 0

    def keep(self, loader: KeepsPlace, *, part: int = 0, **objects: Any) -> bool:
        """Name what steps change; after a loss it gets what it had. Collective, once in each call.

        Args:
            loader: Made in this call, and not iterated yet; or a `dataio.Mixture`, with ``steps``.
            part: Which part of the weights this rank has; ranks of one part have the same.
            objects: Modules, optimizers, schedulers and others with ``state_dict`` and
                ``load_state_dict``, made in this call as in the one before.

        Returns:
            Whether they go on from a step; if not, restore a checkpoint now, or begin.

        Raises:
            WorldError: If the loader could not go on without a rank, or only newcomers are left.
        """
        if loader.lost_with_ranks:
            raise WorldError(
                f"live: the loader has {loader.lost_with_ranks}, which would be lost with a rank; "
                "leave them out, give a Mixture steps=, or train without live"
            )
        before, its = tuple(self.remembered), loader.remember()
        self.remembered.append(its)
        self._loader, self._objects = loader, objects
        mine = json.dumps([self.number, part]).encode()
        said = self.world.allgather(mine, doing="comparing counted steps")
        found = [tuple(json.loads(each)) for each in said]
        most, _ = max(found)
        if not most and 0 < self.num_began <= min(self.ranks):
            raise WorldError(
                f"live: ranks {[*self.ranks]} have come, and no rank is left that has what the job "
                "came to; it has ended, or start the same command again without TONARI_LIVE_JOIN"
            )
        if not most:
            return False
        state = self.counted.state() if self.counted and self.number == most else {}
        lack = [rank for rank, (number, _) in enumerate(found) if number < most]
        if lack:
            state = self._take_over(state, _find_donors(lack, found, most=most))
        for name, its in objects.items():
            its.load_state_dict(_spread(its, state[name]))
        loader.go_on(state["loader"], before)
        torch.set_rng_state(state["random"])
        self._count(most, state["loader"])
        return True

    @contextlib.contextmanager
    def step(self) -> Iterator[None]:
        """Change weights, and all else that a step changes, within; at its end the step counts.

        The last collective before it must be one to which each rank gives its part of this step,
        such as `average`. Within is none.

        Raises:
            SystemExit: At its end, with status 0, if this rank was asked to leave by SIGTERM.
        """
        yield
        if self._loader is None:
            raise WorldError(
                "live: a step was taken before keep; call job.keep(loader, model=model, ...) first"
            )
        self.count(self._loader.state_dict())
        self._after_step()

    def count(self, place: dict[str, object]) -> None:
        """Count a step that was taken, where `step` is not used.

        Args:
            place: Where the loader stands behind it, by its ``state_dict``.
        """
        self._count(self.number + 1, place)
        if self._loader is not None:
            self._loader.count(place)
        del self.remembered[:-1]

    def average(self, parameters: Iterable[torch.nn.Parameter]) -> None:
        """Average the gradients of all ranks; None counts as zeros. Collective."""
        given = [each for each in parameters if each.requires_grad]
        grads = [torch.zeros_like(p) if p.grad is None else p.grad for p in given]
        flat = torch.cat([grad.flatten() for grad in grads])
        dist.all_reduce(flat)
        flat /= self.world.world_size
        for parameter, part in zip(
            given, torch.split(flat, [p.numel() for p in given]), strict=True
        ):
            parameter.grad = part.view_as(parameter)

    def _count(self, number: int, loader: dict[str, object]) -> None:
        values = {name: _values(its) for name, its in self._objects.items()}
        self.counted = Counted(number, loader, torch.get_rng_state(), values, self._objects)

    def _take_over(self, state: dict[str, Any], donors: Mapping[int, int]) -> Any:
        """Have ranks that lack a state take it from others, by the ranks of both. Collective."""
        me, tensors = self.world.rank, list[torch.Tensor]()
        text = json.dumps(describe(state, tensors)).encode() if me in donors.values() else b""
        texts = self.world.allgather(text, doing="taking over weights")
        if me in donors:
            state = restore(json.loads(texts[donors[me]]), tensors)
        for rank, donor in donors.items():
            for each in tensors if me in (rank, donor) else []:
                flat = each.view(-1).view(torch.uint8)
                if flat.numel():
                    dist.send(flat, rank) if me == donor else dist.recv(flat, donor)
        return state


def _find_donors(lack: list[int], found: list[tuple[int, int]], *, most: int) -> dict[int, int]:
    """Choose from whom each rank takes what it lacks; they take turns.

    Args:
        lack: Ranks that lack the last step.
        found: Of each rank the steps that it has counted, and its part.
        most: Steps that count.

    Raises:
        WorldError: If nobody has a part any more.
    """
    donors = {}
    for turn, rank in enumerate(lack):
        part = found[rank][1]
        have = [other for other, its in enumerate(found) if its == (most, part)]
        if not have:
            raise WorldError(
                f"live: no rank that is left has part {part} of the weights of step {most}, which "
                "a newcomer is to have; start the same command again, from a checkpoint"
            )
        donors[rank] = have[turn % len(have)]
    return donors


def describe(state: object, tensors: list[torch.Tensor]) -> object:
    """Put a state into what JSON holds, and append its tensors, contiguous, to a list.

    Raises:
        WorldError: If something in it is neither a tensor nor plain.
    """
    if isinstance(state, torch.Tensor):
        tensors.append(state.detach().contiguous())
        return {"tensor": str(state.dtype).removeprefix("torch."), "shape": [*state.shape]}
    if isinstance(state, Mapping):
        return {"pairs": [[describe(part, tensors) for part in pair] for pair in state.items()]}
    if isinstance(state, list | tuple):
        return {type(state).__name__: [describe(part, tensors) for part in state]}
    if state is None or isinstance(state, bool | int | float | str):
        return state
    raise WorldError(
        f"live: a state holds {state!r:.100}, expected tensors, numbers, text, lists and mappings; "
        "keep what gives such a state_dict"
    )


def restore(described: Any, tensors: list[torch.Tensor]) -> Any:
    """Make a state again, with empty tensors that are appended to a list."""
    if not isinstance(described, dict):
        return described
    if "tensor" in described:
        made = torch.empty(described["shape"], dtype=getattr(torch, described["tensor"]))
        tensors.append(made)
        return made
    if "pairs" in described:
        pairs = [[restore(part, tensors) for part in pair] for pair in described["pairs"]]
        return {key: value for key, value in pairs}
    ((kind, parts),) = described.items()
    return {"list": list, "tuple": tuple}[kind](restore(part, tensors) for part in parts)


def live(
    train: Callable[[LiveJob], Result],
    *,
    directory: str | os.PathLike[str],
    least: int = 1,
    patience_s: float = 5.0,
    timeout_s: float = 300.0,
    choose: Callable[[tuple[int, ...], int], tuple[int, ...]] = lambda ranks, num_began: ranks,
    asked: Callable[[], bool] = lambda: False,
) -> Result:
    """Call a training function, and again on the ranks that are left whenever some are lost.

    Started by torchrun (RANK, WORLD_SIZE, MASTER_ADDR, MASTER_PORT), ``mpirun --with-ft ulfm`` of
    Open MPI 5, or srun with SLURM_KILL_BAD_EXIT=0. On CPUs.
    With TONARI_LIVE_JOIN they join the job that runs in the directory, all of them at one step.
    After SIGTERM a rank ends with its step, with status 0, unless the program handles the signal.

    Args:
        train: Makes loader, model and optimizer, gives them to `LiveJob.keep`, and trains as if it
            went on from a checkpoint. Nothing else may go from one call to the next.
        directory: On a filesystem that every node sees: ranks that lost others meet in it.
        least: With fewer ranks the job ends, >= 1.
        patience_s: How long ranks that lost others wait for more of them to come: longer than
            a node that is busy takes to notice, or that node is left behind.
        timeout_s: Longest wait for another rank, > 0; one that is silent for longer is lost.
        choose: Given the ranks that are there, by their numbers, and how many began: which of them
            go on, in the order of their new numbers; the others end. Defaults to all.
        asked: Whether this rank was asked to leave, of a program that handles SIGTERM itself. Where
            ranks were lost, it ends if those that were not asked can go on: if ``choose`` raises no
            WorldError for them.

    Returns:
        What the function returns.

    Raises:
        StateError: If the directory cannot be made, or no job is in it that can be joined.
        WorldError: If fewer ranks are left, the others go on without this one, one of them ended by
            an error of its own, not all came at the start, or the launcher ends all with the first.
        SystemExit: With status 0, if this rank was asked to leave, or the job that it was to join
            has ended.
    """
    generations = Generations(
        Path(directory), patience_s=patience_s, timeout_s=timeout_s, choose=choose, asked=asked
    )
    with _handling_sigterm(generations.ask_to_leave), contextlib.closing(generations):
        world, counted = generations.first(), None
        remembered: list[Any] = []
        results: list[Result] = []
        stuck_at: tuple[tuple[int, ...], int] = (), -1
        num_in_vain = 0
        while True:
            job = LiveJob(
                world, generations.ranks, counted, num_began=generations.num_began,
                noting_groups=generations.sockets.noting,
                after_step=generations.leave_if_asked, leave=generations.leave,
                remembered=remembered,
            )  # fmt: skip
            # They hold the model and the rows of the call before.
            counted, remembered = None, []
            if generations.why:
                log.warning(
                    "[rank %d] live: ranks %s go on from step %d (%s)",
                    world.rank, [*generations.ranks], job.number, generations.why,
                )  # fmt: skip
            generations.leave_if_asked()  # meanwhile
            try:
                results = [train(job)]
                return generations.end(world, results[0])
            except Exception as error:
                counted, remembered = job.counted, job.remembered
                if not generations.are_lost(error):
                    generations.fail(error, has_state=counted is not None)
                    raise
                stands_at = generations.ranks, job.number
                num_in_vain = num_in_vain + 1 if stands_at == stuck_at else 0
                stuck_at = stands_at
                if num_in_vain == MOST_IN_VAIN:
                    wrong = WorldError(
                        f"live: ranks {[*generations.ranks]} fail again and again behind step "
                        f"{job.number}, and none of them is lost ({error}); look for what one rank "
                        f"alone does there, or give a timeout_s longer than it takes"
                    )
                    generations.fail(wrong, has_state=True)
                    raise wrong from error
                why = str(error)
                # Its frames hold the loader and the model of this call.
                traceback.clear_frames(error.__traceback__)
            gc.collect()
            try:
                world = generations.go_on(why, least=least)
            except EndedError:
                if not results:
                    raise
                return results[0]  # a rank has passed the end: all had come to it


@contextlib.contextmanager
def _handling_sigterm(handle: Callable[[], None]) -> Iterator[None]:
    """Call a function at SIGTERM, within, unless the program handles it or this is a thread."""
    is_main = threading.current_thread() is threading.main_thread()
    if not is_main or signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL:
        yield
        return
    signal.signal(signal.SIGTERM, lambda number, frame: handle())
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)


def _values(its: Any) -> Any:
    """Copy what changes outside of steps too, or is small."""
    if isinstance(its, torch.nn.Module):
        return [buffer.clone() for buffer in its.buffers()]
    if isinstance(its, torch.optim.Optimizer):
        # Tensors too: a learning rate may be one.
        return [
            {name: copy.deepcopy(value) for name, value in group.items() if name != "params"}
            for group in its.param_groups
        ]
    return copy.deepcopy(its.state_dict())


def _whole(its: Any, values: Any) -> Any:
    """Put an object's state together, as it was when its values were copied."""
    if isinstance(its, torch.nn.Module):
        with torch.no_grad():
            for buffer, value in zip(its.buffers(), values, strict=True):
                buffer.copy_(value)
        return its.state_dict()
    if isinstance(its, torch.optim.Optimizer):
        for group, value in zip(its.param_groups, values, strict=True):
            group.update(value)
        return its.state_dict()
    return values


def _own(state: Any) -> Any:
    """Put this rank's shards in the places of tensors that lie over ranks, which are others now."""
    if hasattr(state, "to_local"):  # a DTensor, which older torch has elsewhere
        return state.to_local()
    if isinstance(state, Mapping):
        return {name: _own(part) for name, part in state.items()}
    return type(state)(map(_own, state)) if isinstance(state, list | tuple) else state


def _spread(its: Any, state: Any) -> Any:
    """Make tensors over ranks again of shards, where an object has such."""
    if isinstance(its, torch.nn.Module):
        like = its.state_dict()
        return {name: _shard_of(like.get(name), part) for name, part in state.items()}
    if isinstance(its, torch.optim.Optimizer):
        parameters = [each for group in its.param_groups for each in group["params"]]
        spread = {
            number: {name: _shard_of(parameters[number], part) for name, part in held.items()}
            for number, held in state["state"].items()
        }
        return {**state, "state": spread}
    return state


def _shard_of(like: Any, part: Any) -> Any:
    # What an optimizer counts has no dimension, and is no shard.
    if not (hasattr(like, "to_local") and isinstance(part, torch.Tensor) and part.dim()):
        return part
    return type(like).from_local(
        part, like.device_mesh, like.placements, run_check=False, shape=like.shape,
        stride=like.stride(),
    )  # fmt: skip
