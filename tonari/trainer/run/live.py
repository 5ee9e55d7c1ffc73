"""Train on with the replicas that are left when ranks are lost: a run under `dataio.live`.

Ranks keep their coordinates on all axes of the mesh but dp_replicate, and with them their shards.
Where a replica has several ranks, the norm of the gradients is the last that ranks do together
before they take a step. Who has it knows that all have their gradients. So who lacks it takes the
step after the loss, with the norm that another has.

One replica over dp_shard has copies of its pieces: see `tonari.trainer.run.next_door`.
"""

import contextlib
import itertools
import json
import logging
import math
import os
import signal
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

import dataio
from dataio.base.errors import StateError, WorldError
from dataio.base.lines import read_checked_lines
from dataio.job.launch import Job, claim_files_of_ranks, join
from dataio.job.live import LiveJob
from dataio.job.memory import keep_freed_memory
from dataio.job.numbers import JOIN, count_numbers, find_job
from dataio.job.watchdog import Watchdog
from dataio.world import keep_lines_whole
from dataio.world.launchers import outliving_claim
from tonari.trainer.checkpoint.agree import from_rank_0
from tonari.trainer.checkpoint.directory import Progress, latest
from tonari.trainer.config.config import Config
from tonari.trainer.deliver.deliver import ReplicaLoader
from tonari.trainer.errors import ConfigError
from tonari.trainer.mesh.clip import clip_gradients
from tonari.trainer.mesh.mesh import AXES
from tonari.trainer.mesh.pipeline import Pipeline
from tonari.trainer.private.modules import steps_plainly
from tonari.trainer.run.build import lay_out
from tonari.trainer.run.ema import WeightAverage
from tonari.trainer.run.pace import same_rows
from tonari.trainer.run.whole_steps import ELEMENTWISE
from tonari.trainer.watch.metrics import MetricsLog
from tonari.trainer.watch.stop import noting_between

if TYPE_CHECKING:
    from tonari.trainer.run.next_door import PieceCopies

Result = TypeVar("Result")
PATIENCE_S = 5.0
"""See `dataio.job.live.live`."""

log = logging.getLogger(__name__)

CURE = "or leave run.live out: a run that loses a rank then goes on from a checkpoint"


class Live:
    """A run on one rank, from its start to its end, however many ranks are lost meanwhile.

    Until `begin` is called it does nothing: a rank that is lost ends the run.

    Args:
        config: Its settings.
        sizes: Ranks along each of ``tonari.trainer.mesh.mesh.AXES``; that of dp_replicate is not
            read, as replicas go and come, unless one is all.

    Attributes:
        goes_on: Whether these ranks go on behind a step, after a loss.
        on_all: Whether the norm is that of all ranks, by which a step counts.
        before_norm: To be called by all before they measure it; None: it is not so.
        progress: Behind the last step that counts.
        leave: Waits for what the ranks before these had under way.
        signals: That ask to stop: a run that was asked, and loses a rank, stops all the same.
    """

    def __init__(self, config: Config, sizes: tuple[int, ...] = ()) -> None:
        self._has_copies = bool(sizes) and is_one_over_shards(sizes)
        # The ranks of one replica over dp_shard go and come as replicas do.
        self._config, self._sizes = config, (1,) * len(sizes) if self._has_copies else sizes
        self._job: LiveJob | None = None
        self.goes_on = self.on_all = False
        self.before_norm: Callable[[], None] | None = None
        # What the last step that counts has left; and what becomes that by the first that counts.
        self._had: PieceCopies | None = None
        self._has: PieceCopies | None = None
        self._providers: list[int] = []
        self._buffers: list[Tensor] = []
        self._groups: list[dict[str, Any]] = []
        self.progress = Progress()
        self.leave: Callable[[], None] = _nothing
        self.signals: dict[int, float] = {}
        self._finish: Callable[[Tensor], None] = _nothing
        self._place: dict[str, object] = {}
        self._norm, self._steps, self._part = 0.0, 0, 0

    def choose(self, ranks: tuple[int, ...], num_began: int) -> tuple[int, ...]:
        """Make as many whole replicas of ranks as there can be, each rank where it was in its own.

        Args:
            ranks: Those that are there, ascending, by their numbers.
            num_began: Ranks with which the run began. Later ones are numbered replica by replica.

        Returns:
            Those that go on, in the order of the mesh.

        Raises:
            WorldError: If not one is whole, or a piece of the weights is on none of them.
        """
        had = [each for each in (self._had, self._has) if each and self._had]
        # Another rank may know that a step counts on the pieces of which this one does not.
        if had and not any(each.can_spare(ranks) for each in had):
            raise _none_left(ranks)
        pp, _, *others = self._sizes
        inner = math.prod(others)
        held: defaultdict[tuple[int, int], list[int]] = defaultdict(list)
        for rank in ranks:
            row, place = (
                divmod(rank, num_began // pp) if rank < num_began
                else divmod((rank - num_began) % (pp * inner), inner)
            )  # fmt: skip
            held[row, place % inner].append(rank)
        whole = min(len(held[at]) for at in itertools.product(range(pp), range(inner)))
        if not whole:
            raise WorldError(
                f"live: ranks {[*ranks]} are left, and do not make up one replica on the mesh of "
                f"{dict(zip(AXES, self._sizes, strict=True))}; start the same command again: it "
                "goes on from the newest checkpoint"
            )
        return tuple(
            held[row, place][copy]
            for row in range(pp) for copy in range(whole) for place in range(inner)
        )  # fmt: skip

    def begin(self, job: LiveJob) -> Config:
        """Join ranks, and take the step that one of them has taken. Collective.

        Returns:
            The settings, with as many rows a step on these ranks.
        """
        self.leave()
        mine = [job.number, self._norm, self._steps]
        said = job.world.allgather(json.dumps(mine).encode(), doing="comparing counted steps")
        most, norm, steps = max(map(json.loads, said))
        if job.number < most and self.on_all:
            assert self._job is not None, "a rank that lacks a step was there before"
            self._finish(torch.tensor(norm, dtype=torch.float64))
            job.counted = self._job.counted
        self.progress = replace(self.progress, steps=steps)
        self._finish = self.leave = _nothing
        self._job, self.goes_on = job, most > 0
        pp, _, *others = self._sizes
        inner, world = math.prod(others), job.world
        self.on_all = self._has_copies or pp * inner > 1
        self.before_norm = _nothing if self.on_all else None
        self._find_providers(job)
        row, place = divmod(world.rank, world.world_size // pp)
        self._part = row * inner + place % inner
        config = same_rows(
            self._config, before=job.num_began // (pp * inner),
            now=world.world_size // (pp * inner),
        )  # fmt: skip
        if job.ranks == tuple(range(job.num_began)):
            return config
        if self._has_copies:
            mesh = replace(config.mesh, dp_replicate=1, dp_shard=world.world_size)
            return replace(config, mesh=mesh)
        # Ranks of other replicas make up one: its stages need not share nodes as others' do.
        return replace(config, mesh=replace(config.mesh, targets="send"))

    def _find_providers(self, job: LiveJob) -> None:
        """Find for each piece of the weights a rank that has it; its owner first. Collective."""
        self._has, self._providers = None, []
        if not (self._has_copies and self.goes_on):
            return
        had = self._had
        mine = [had.index, had.copied, len(had.numbers)] if had else []
        said = job.world.allgather(json.dumps(mine).encode(), doing="finding pieces")
        found, numbers = dict[int, int](), [*map(json.loads, said)]
        for which in (0, 1):
            for rank, its in enumerate(numbers):
                if its:
                    found.setdefault(its[which], rank)
        num_pieces = max((its[2] for its in numbers if its), default=1)
        if len(found) < num_pieces:
            raise _none_left(job.ranks)
        self._providers = [found[piece] for piece in range(num_pieces)]

    def as_given(self, config: Config) -> Config:
        """Put back what `begin` has changed of settings."""
        given = self._config
        data = replace(config.data, batch_size=given.data.batch_size)
        return replace(config, data=data, optimizer=given.optimizer, mesh=given.mesh)

    def leave_job(self, asked: list[bool]) -> bool:
        """Leave the job if this rank is among those that were asked to, and the others go on.

        Returns:
            Whether they do: whether they make up a replica.
        """
        job = self._job
        assert job is not None, "under live alone"
        stay = [rank for rank, ends in zip(job.ranks, asked, strict=True) if not ends]
        if self._had is not None and not self._had.can_spare(stay):
            return False
        try:
            self.choose(tuple(sorted(stay)), job.num_began)
        except WorldError:
            return False
        if asked[job.world.rank]:
            self.leave()
            job.leave()
        return True

    def noting_groups(self) -> contextlib.AbstractContextManager[None]:
        """See `LiveJob`."""
        return contextlib.nullcontext() if self._job is None else self._job.noting_groups()

    @contextlib.contextmanager
    def joined(self) -> Iterator[Job]:
        """Join the ranks; under live nobody ends those that are left. Collective."""
        run = self._config.run
        if self._job is None:
            with join(device=run.device, timeout_s=run.timeout_s) as job:
                yield job
        else:
            world = self._job.world
            keep_lines_whole()
            keep_freed_memory()
            claim_files_of_ranks(world.world_size)
            watchdog = Watchdog(world, None, timeout_s=run.timeout_s)
            yield Job(world, torch.device("cpu"), watchdog)

    def check_optimizer(self, optimizer: torch.optim.Optimizer) -> None:
        """Refuse one that sends messages within a step, where a step may end on some ranks alone.

        Raises:
            ConfigError: If it looks at whole weights, of which ranks have parts; or some are whole.
        """
        if self.on_all and type(optimizer) not in ELEMENTWISE:
            raise ConfigError(
                f"run.live is true and the optimizer is {type(optimizer).__name__}, which looks at "
                "whole weights, of which ranks have parts; choose another such as AdamW, "
                f"{CURE}"
            )
        weights = [each for group in optimizer.param_groups for each in group["params"]]
        is_cut = [isinstance(each, DTensor) for each in weights]
        if self._has_copies and any(is_cut) and not all(is_cut):
            whole = weights[is_cut.index(False)]
            raise ConfigError(
                f"run.live is true on one replica, and a weight of the shape {[*whole.shape]} is "
                f"{whole.dtype}, which lies whole on each rank, expected one dtype of all weights "
                f"that train; convert it where the model is made, {CURE}"
            )
        if self._has_copies and not steps_plainly(optimizer):
            raise ConfigError(
                "run.live is true on one replica, and the optimizer has hooks of its step, which "
                f"copies of weights would not see; leave them out, {CURE}"
            )

    def keep(
        self, progress: Progress, loader: ReplicaLoader, optimizer: torch.optim.Optimizer,
        parts: Sequence[nn.Module], average: WeightAverage | None,
    ) -> Progress:  # fmt: skip
        """Name what steps change; after a loss it gets what it had. Collective.

        Returns:
            What is done.
        """
        if self._job is None:
            return progress
        self.progress = progress
        module = nn.ModuleList([*parts, *([] if average is None else [average.held])])
        if not self._has_copies:
            self._job.keep(loader, part=self._part, model=module, optimizer=optimizer, run=self)
        else:
            from tonari.trainer.run.next_door import PieceCopies

            self._buffers, self._groups = [*module.buffers()], optimizer.param_groups
            self._job.keep(loader, run=self)
            self._has = PieceCopies(self._job, parts, optimizer, average)
            self._has.begin(self._had, self._providers)
            if not self._has.are_apart and self._job.world.rank == 0:
                log.warning(
                    "[rank 0] live: more than half of the ranks are on one node, which has pieces "
                    "of the weights and their copies: if it is lost, the run ends, and the same "
                    "command goes on from a checkpoint"
                )
            self.before_norm = self._has.share_gradients
        self._steps = self.progress.steps
        # What the epoch's line would count is gone with those that are lost.
        return replace(self.progress, so_far={}) if self.goes_on else progress

    def begin_step(self, loader: ReplicaLoader, finish: Callable[[Tensor], None]) -> None:
        """Note how a step is taken and counted, once its gradients and their norm are there."""
        if self._job is not None:
            self._place, self._finish = loader.state_dict(), finish

    def count(self, progress: Progress, norm: Tensor | None) -> None:
        """Count a step that was taken; see `LiveJob.count`."""
        if self._job is not None:
            self.progress, self._steps = progress, progress.steps
            self._norm = 0.0 if norm is None else float(norm)
            if self._has is not None and norm is not None:
                self._has.step(norm, clip=self._config.optimizer.clip, steps=progress.steps)
                self._had = self._has
            self._job.count(self._place)

    def state_dict(self) -> dict[str, object]:
        """For `LiveJob.keep`: with all that has no copy, as each rank has it."""
        groups = [
            {name: value for name, value in group.items() if name != "params"}
            for group in self._groups
        ]
        return {"progress": asdict(self.progress), "buffers": self._buffers, "groups": groups}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """For `LiveJob.keep`."""
        self.progress = Progress(**state["progress"])
        for group, values in zip(self._groups, state["groups"], strict=True):
            group.update(values)
        with torch.no_grad():
            for buffer, value in zip(self._buffers, state["buffers"], strict=True):
                buffer.copy_(value)


def is_one_over_shards(sizes: Sequence[int]) -> bool:
    """Whether all ranks are one replica over dp_shard, of which each has a piece of the weights."""
    return sizes[AXES.index("dp_shard")] == math.prod(sizes) > 1


def _none_left(ranks: Sequence[int]) -> WorldError:
    return WorldError(
        f"live: ranks {[*ranks]} are left, and a piece of the weights is on none of them: the rank "
        "that had it and the one that had its copy are both lost; start the same command again: "
        "it goes on from the newest checkpoint"
    )


def written_at(step: int, logs: Sequence[object]) -> list[str]:
    """Find the kinds of lines of a step that the log has, by rank 0's ``logs``. Collective."""
    paths = [log.path for log in logs if isinstance(log, MetricsLog)]
    lines = itertools.chain.from_iterable(map(read_checked_lines, paths))
    return from_rank_0(" ".join(line["kind"] for line in lines if line["step"] == step)).split()


def _nothing(*_: object) -> None:
    """Do nothing: nothing is under way."""


def finish_step(
    pipeline: Pipeline, optimizer: torch.optim.Optimizer, clip: float, norm: Tensor
) -> None:
    """Take a step whose gradients are there, and whose norm others have measured."""
    clip_gradients(
        pipeline.parameters(), pipeline.mesh, max_norm=clip, again=pipeline.again, norm=norm
    )
    optimizer.step()


def train_on(config: Config, train: Callable[..., Result]) -> Result:
    """Train by settings with ``run.live``, on the replicas that are left whenever ranks are lost.

    Args:
        config: The settings.
        train: Given settings and ``live``, trains, or goes on from what that keeps.

    Raises:
        ConfigError: If the run could not go on without a rank, or these are to join one and make up
            no whole replicas.
        WorldError: If the launcher ends all ranks with the first, or not one whole replica is left.
    """
    (claim, _), joins = outliving_claim(os.environ), bool(os.environ.get(JOIN))
    directory = Path(config.run.directory)
    sizes = _sizes_of_job(config, directory / "live") if joins else ()
    if not (sizes and is_one_over_shards(sizes)):
        mesh = replace(config.mesh, dp_replicate=None) if joins else config.mesh
        mine = lay_out(replace(config, mesh=mesh), claim.world_size or 1).sizes
        # A replica that joins others is one of several.
        sizes = sizes or mine
    check_live(config, sizes, joins=joins)
    live = Live(config, sizes)
    try:
        with noting_between(live.signals):
            return dataio.live(
                lambda job: train(live.begin(job), live=live), choose=live.choose,
                directory=directory / "live", patience_s=PATIENCE_S,
                timeout_s=config.run.timeout_s, asked=lambda: signal.SIGTERM in live.signals,
            )  # fmt: skip
    except WorldError:
        if live.signals:
            log.warning(
                "[rank %d] live: was asked to stop by %s, and cannot save; the same command goes "
                "on from %s", claim.rank, signal.Signals(min(live.signals)).name,
                latest(directory / "checkpoints") or "the run's beginning",
            )  # fmt: skip
        raise


def _sizes_of_job(config: Config, directory: Path) -> tuple[int, ...]:
    """Find the mesh with which the job began that runs in a directory; empty if none does."""
    with contextlib.suppress(StateError, OSError, ConfigError):
        return lay_out(config, count_numbers(find_job(directory), 0)).sizes
    return ()


def check_live(config: Config, sizes: tuple[int, ...], *, joins: bool = False) -> None:
    """Refuse a run that could not go on without a rank.

    Args:
        config: The settings.
        sizes: Ranks along each of ``tonari.trainer.mesh.mesh.AXES``.
        joins: Whether they join others, that have replicas of their own.

    Raises:
        ConfigError: Says what to set.
    """
    optimizer, copies = config.optimizer, sizes[AXES.index("dp_replicate")]
    parts = ", ".join(
        f"mesh.{axis} = {size}" for axis, size in zip(AXES, sizes, strict=True)
        if size > 1 and axis != "dp_replicate"
    )  # fmt: skip
    device, cp = config.run.device, sizes[AXES.index("cp")]
    if cp > 1:
        name = "tiles" if config.mesh.tiles else "cp"
        raise ConfigError(
            f"run.live is true and mesh.{name} takes {cp} ranks, expected 1: with parts of samples "
            f"nothing goes on yet; leave mesh.{name} out, {CURE}"
        )
    if device == "cuda" or (device == "auto" and torch.cuda.is_available()):
        raise ConfigError(
            f'run.live is true and run.device is "{device}", expected "cpu": ranks of GPUs cannot '
            f"leave a group in which others wait; give run.device=cpu, {CURE}"
        )
    if copies == 1 and not (joins or is_one_over_shards(sizes)):
        raise ConfigError(
            f"run.live is true, and all {math.prod(sizes)} ranks are one replica, of which none is "
            "left when a rank is lost; start more ranks, or divide one over mesh.dp_shard alone, "
            f"{CURE}"
        )
    if parts and not optimizer.clip:
        raise ConfigError(
            f"run.live is true with {parts} and optimizer.clip = 0, but that all ranks have their "
            "gradients shows only in the norm of all; give optimizer.clip, such as 1e9 to cut "
            f"nothing, {CURE}"
        )
