"""The steps of a recorded run by plain torch: one process, the plain module, a plain loop.

Nothing of the mesh is here: no stages, no sharding, no pipeline, no clipping of ours. Three things
are as the mesh has them, as nothing else could be compared: the rows of each microbatch with their
weights, the keys by which blocks draw, and that each replica has batch statistics of its own, which
are averaged now and then. So there is one module for each replica, and all have the same
parameters.
"""

import copy
import math
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn

from tonari.trainer.checkpoint.weights import WeightFiles
from tonari.trainer.config.config import Config
from tonari.trainer.mesh.materialize import materialize
from tonari.trainer.mesh.pipeline import MOST_BATCHES
from tonari.trainer.mesh.randomness import Randomness
from tonari.trainer.models import Adapted, StagedModel, deferred, seeded
from tonari.trainer.models.given import Inputs, call, extra_losses, pick_logits
from tonari.trainer.private.dispatch import TorchDispatchMode
from tonari.trainer.private.norms import NormWithStatistics
from tonari.trainer.private.trees import tree_leaves, tree_map
from tonari.trainer.run.build import make_model, make_task
from tonari.trainer.run.optimizers import build_optimizer
from tonari.trainer.run.own import Own
from tonari.trainer.run.step import EvaluationMeans
from tonari.trainer.run.tasks import CountsTargets
from tonari.trainer.run.verify.recording import Columns

Key = tuple[str, str]
"""A kind and a name, as `recording.Held` has them."""


class Plain:
    """The model in one process, and its plain steps.

    Args:
        config: The settings of the run.
        own: What its caller brings.
        replicas: Of the mesh.
        microbatches: Parts of a batch.
        weights: To start from, by the names of the plain module; None: those of the constructor.
        device: Where it computes.
        by_parts: Make each weight by itself, of a model whose constructor makes more than is kept.

    Attributes:
        repeats: Blocks that drew the same numbers twice in a step, and how often.
        apart: How far the first step's losses are from those of its whole batch in one pass, of
            the largest; None where they cannot be compared: ``why`` says so.
    """

    def __init__(
        self, config: Config, own: Own, *, replicas: int, microbatches: int,
        weights: Mapping[str, Tensor] | None = None, device: torch.device | None = None,
        by_parts: bool = False,
    ) -> None:  # fmt: skip
        self._config, self._microbatches = config, microbatches
        self._device = device = device or torch.device("cpu")
        build = partial(make_model, config, own)
        if by_parts:
            # All layers would not fit: those that are left out are never made.
            model = deferred(build, seed=config.run.seed)
            if model.recording is not None:
                materialize(model, "cpu", offload=False)
                model.recording = None
        else:
            model = seeded(build, seed=config.run.seed)
        if config.model.weights and weights is None:
            WeightFiles(Path(config.model.weights)).read_into([model])
        model = model.double() if config.mesh.dtype == "float64" else model
        if weights is not None:
            plain_of(model).load_state_dict(weights, strict=False)
        model = model.to(device)
        shared = {id(each): each for each in model.parameters()}
        self.models = [model, *(copy.deepcopy(model, dict(shared)) for _ in range(1, replicas))]
        self._tasks = [make_task(config, own, replica=number) for number in range(replicas)]
        self._draws = [
            Randomness(
                seed=config.run.seed, replica=number, microbatches=microbatches, apart=0,
                device=device,
            )
            for number in range(replicas)
        ]  # fmt: skip
        self.repeats: dict[str, int] = {}
        self._seeds: set[int] = set()
        for draws, each in zip(self._draws, self.models, strict=True):
            draws.attach(cast(nn.Module, _Keyed(each)))
            self._watch_draws(each)
        self._parameters = list(model.parameters())
        make = own.optimizer or partial(build_optimizer, config.optimizer)
        self._optimizer = make(self._parameters)
        rates = [float(group["lr"]) for group in self._optimizer.param_groups]
        self._rates = [rate / max(rates) if max(rates) else 1.0 for rate in rates]
        self._operations, self._evaluating = _PlainOperations(), _PlainOperations()
        self._averages: list[dict[str, Tensor]] = []
        self.apart: float | None = None
        self.why, self._has_extra = "", False

    def step(
        self, batches: Sequence[Sequence[Columns]], *, number: int, lr: float, first: bool = False
    ) -> tuple[list[list[Tensor]], float]:
        """Train a step: forward, backward, clip, update.

        Args:
            batches: For each batch of the step, the columns of each replica's rows.
            number: Of the step in the run.
            lr: Its learning rate.
            first: Whether to compare it with its batch in one pass.

        Returns:
            Each batch's and replica's losses, floating[rows], and the norm of the gradients.
        """
        if self.averages and not self._averages:
            self._averages = [
                {name: value.detach().clone() for name, value in _averaged(each)}
                for each in self.models
            ]
        before = self._copy() if first else None
        losses, norm = self.gradients(batches, number=number)
        if before is not None:
            self._compare_whole(before, batches, losses)
        if self._config.optimizer.clip:
            given = [each for each in self._parameters if each.grad is not None]
            nn.utils.clip_grad_norm_(given, self._config.optimizer.clip)
        for group, rate in zip(self._optimizer.param_groups, self._rates, strict=True):
            group["lr"] = lr * rate
        self._optimizer.step()
        self._optimizer.zero_grad()
        for means, model in zip(self._averages, self.models, strict=False):
            kept = min(self._config.optimizer.ema, (2 + number) / (11 + number))
            for name, value in _averaged(model):
                means[name].mul_(kept).add_(value.detach(), alpha=1 - kept)
        return losses, norm

    def gradients(
        self, batches: Sequence[Sequence[Columns]], *, number: int, limit_s: float = math.inf
    ) -> tuple[list[list[Tensor]], float]:
        """Add up the gradients of a step: of the mean over all its rows that are no padding.

        Args:
            batches, number: See `step`.
            limit_s: No microbatch begins later than so many seconds from now.

        Returns:
            Losses as `step` does, of the rows that were come to, and the norm: nan without others.
        """
        ends = time.monotonic() + limit_s
        self._seeds.clear()
        weights = self._weigh(batches)
        losses: list[list[Tensor]] = []
        for position, (each, its) in enumerate(zip(batches, weights, strict=True), 1):
            losses.append([])
            for replica, batch in enumerate(each):
                drawing = number * MOST_BATCHES + position
                with self._draws[replica].drawing(drawing):
                    losses[-1].append(self._pass(replica, batch, its[replica], ends=ends))
                if len(losses[-1][-1]) < len(batch["sample_id"]):
                    return losses, math.nan
        grads = [each.grad for each in self._parameters if each.grad is not None]
        return losses, float(nn.utils.get_total_norm(grads))

    @property
    def draws(self) -> bool:
        """Whether a step draws random numbers."""
        return self._operations.draws

    @property
    def averages(self) -> bool:
        """Whether an average of the weights is kept."""
        return self._config.optimizer.ema > 0

    @property
    def evaluation_draws(self) -> bool:
        """Whether an evaluation does."""
        return self._evaluating.draws

    @property
    def in_parts(self) -> bool:
        """Whether parts of it compute in less than double precision."""
        return self._operations.in_parts

    def average_buffers(self) -> None:
        """Give all replicas the mean of their batch statistics."""
        for named in zip(*(list(each.buffers()) for each in self.models), strict=True):
            if len(named) > 1 and named[0].is_floating_point():
                mean = torch.stack([each.detach() for each in named]).mean(0)
                for each in named:
                    each.data.copy_(mean)
        for name, _ in plain_of(self.models[0]).named_buffers() if self._averages else ():
            if name in self._averages[0]:
                mean = torch.stack([means[name] for means in self._averages]).mean(0)
                for means in self._averages:
                    means[name].copy_(mean)

    @torch.no_grad()
    def evaluate(
        self, batches: Sequence[Sequence[Columns]], *, averaged: bool = False
    ) -> EvaluationMeans:
        """Judge the model, or its averaged weights; changes nothing.

        Returns:
            Means over all rows that are no padding.
        """
        right = loss = rows = 0.0
        for replica, model in enumerate(self.models):
            means = self._averages[replica] if averaged else {}
            with _holding(model, means), _evaluating(model):
                for batch in batches[replica]:
                    task = self._tasks[replica]
                    inputs, target = task.input(batch), task.target(batch)
                    with self._evaluating:
                        logits = run(model, inputs)
                    valid = batch["valid"]
                    shares, _ = task.outcome(logits, target)
                    right += float(shares.double()[valid].sum())
                    loss += float(task.losses(logits, target).double()[valid].sum())
                    rows += float(valid.sum())
        return EvaluationMeans(right / max(rows, 1), loss / max(rows, 1))

    def state(self, replica: int) -> dict[Key, Tensor]:
        """Name all that one process holds: weights, buffers and what the optimizer remembers."""
        model = plain_of(self.models[replica])
        means = self._averages[replica] if self._averages else {}
        found: dict[Key, Tensor] = {}
        for name, parameter in model.named_parameters():
            found["weight", name] = parameter.detach().clone()
            if name in means:
                found["average", name] = means[name].clone()
            for kind, value in self._optimizer.state.get(parameter, {}).items():
                if isinstance(value, (Tensor, int, float)):
                    found[kind, name] = torch.as_tensor(value).detach().clone()
        saved = set(model.state_dict())
        first_names = {id(buffer): name for name, buffer in model.named_buffers()}
        for name, buffer in model.named_buffers(remove_duplicate=False):
            if name in saved:
                found["buffer", name] = buffer.detach().clone()
                if first_names[id(buffer)] in means:
                    found["average", name] = means[first_names[id(buffer)]].clone()
        return found

    def _pass(self, replica: int, batch: Columns, weights: Tensor, *, ends: float) -> Tensor:
        batch = {name: column.to(self._device) for name, column in batch.items()}
        task, model = self._tasks[replica], self.models[replica]
        inputs, target = task.input(batch), task.target(batch)
        found = []
        for number, rows in enumerate(torch.arange(len(weights)).chunk(self._microbatches)):
            if number + replica and time.monotonic() > ends:
                break
            self._draws[replica].begin(number)
            with self._operations:
                given = call_plain(model, tree_map(lambda each, rows=rows: each[rows], inputs))
                logits = _logits_of(model, given)
                losses = task.losses(logits, target[rows])
                for extra in _extra_losses_of(model, given, logits):
                    losses, self._has_extra = losses + extra.reshape(()), True
            found.append(losses.detach())
            (losses * weights[rows].to(losses)).sum().backward()  # type: ignore[no-untyped-call]
        return torch.cat(found) if found else weights[:0]

    def _weigh(self, batches: Sequence[Sequence[Columns]]) -> list[list[Tensor]]:
        """Weigh each row of a step by its loader's weight, for a mean over all its answers.

        Those are its rows that are no padding, or their targets where the task counts them.
        """
        shares: list[float] = []
        found: list[list[Tensor]] = []
        for each in batches:
            valid = [batch["sample_id"] >= 0 for batch in each]
            counts = [
                task.num_targets(batch) * valid[number]
                if isinstance(task := self._tasks[number], CountsTargets)
                else valid[number].long()
                for number, batch in enumerate(each)
            ]
            num_rows = sum(float(its.sum()) for its in valid)
            num_answers = sum(float(its.sum()) for its in counts)
            shares.append(num_answers)
            scale = num_rows / max(num_answers, 1)
            size = sum(len(its) for its in valid)
            weights = [batch["weight"] for batch in each]
            if isinstance(self._tasks[0], CountsTargets):
                # In the precision of the loader's weights, as on the mesh
                pairs = zip(weights, counts, strict=True)
                weights = [(weight * count * scale).float() for weight, count in pairs]
            found.append([weight.double() / size for weight in weights])
        total = max(sum(shares), 1)
        return [
            [weight * share / total for weight in weights]
            for weights, share in zip(found, shares, strict=True)
        ]

    def _copy(self) -> list[StagedModel] | None:
        try:
            return [copy.deepcopy(self.models[0])]
        except Exception:
            # What cannot be copied is compared by its microbatches alone.
            return None

    @torch.no_grad()
    def _compare_whole(
        self, before: Sequence[StagedModel], batches: Sequence[Sequence[Columns]],
        losses: list[list[Tensor]],
    ) -> None:  # fmt: skip
        """Compare the losses of the microbatches with those of all rows in one pass."""
        first = batches[0]
        if self.draws:
            self.why = "it draws"
        elif any(isinstance(each, NormWithStatistics) for each in before[0].modules()):
            self.why = "its batch statistics are those of a microbatch"
        elif self._has_extra:
            self.why = "the loss that it gives beside its logits is that of a microbatch"
        if self.why:
            return
        tasks = [task for task, _ in zip(self._tasks, first, strict=True)]
        inputs = [task.input(batch) for task, batch in zip(tasks, first, strict=True)]
        targets = [task.target(batch) for task, batch in zip(tasks, first, strict=True)]
        joined = tree_map(lambda *each: torch.cat(each), *inputs)
        found = tasks[0].losses(run(before[0], joined), torch.cat(targets))
        expected = torch.cat(losses[0])
        valid = torch.cat([batch["sample_id"] >= 0 for batch in first])
        self.apart = float(
            (found - expected)[valid].abs().max() / found[valid].abs().max().clamp_min(1e-30)
        )

    def _watch_draws(self, model: StagedModel) -> None:
        """Note blocks that draw numbers that were drawn before in the same step."""
        for name, block in model.blocks.items():
            started: list[Tensor] = []

            def before(*_: object, started: list[Tensor] = started) -> None:
                started.append(torch.get_rng_state())

            def after(*_: object, started: list[Tensor] = started, name: str = name) -> None:
                state = torch.get_rng_state()
                if torch.equal(started.pop(), state) or not torch.is_grad_enabled():
                    return
                # As many numbers from the same seed leave the generator the same.
                drawn = hash(state.numpy().tobytes())
                if drawn in self._seeds:
                    self.repeats[name] = self.repeats.get(name, 0) + 1
                self._seeds.add(drawn)

            block.register_forward_pre_hook(before)
            # Before the generators are seeded again for what follows the block
            block.register_forward_hook(after, prepend=True)


class _Keyed:
    """What `Randomness.attach` asks of a stage, of the plain module."""

    def __init__(self, model: StagedModel) -> None:
        self.blocks = model.blocks
        self.register_forward_pre_hook = plain_of(model).register_forward_pre_hook


class _PlainOperations(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Notes whether random numbers are drawn, and whether some is computed in less than double."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.draws = self.in_parts = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        # Attention may draw, and says so where it does not.
        may_draw = torch.Tag.nondeterministic_seeded in func.tags
        state = torch.get_rng_state() if may_draw else None
        given = func(*args, **(kwargs or {}))
        if state is not None:
            on_cpu = all(not isinstance(each, Tensor) or each.is_cpu for each in tree_leaves(given))
            self.draws |= not (on_cpu and torch.equal(state, torch.get_rng_state()))
        # What is made of nothing, such as a mask, or turned into double, is not computed with.
        self.in_parts |= _is_narrow(given) and _is_narrow((args, kwargs))
        return given


def _is_narrow(values: object) -> bool:
    return any(
        isinstance(each, Tensor) and each.is_floating_point() and each.dtype != torch.float64
        for each in tree_leaves(values)
    )


def plain_of(model: StagedModel) -> nn.Module:
    """Take the caller's module out of what adapts it; a model of the trainer's is one itself."""
    return model.wrapped if isinstance(model, Adapted) else model


def run(model: StagedModel, inputs: Inputs) -> Tensor:
    """Call the module as its author would, and take the logits."""
    return _logits_of(model, call_plain(model, inputs))


def call_plain(model: StagedModel, inputs: Inputs) -> Any:
    """Call the module as its author would."""
    if not isinstance(model, Adapted):
        return model(inputs)
    return call(model.wrapped, model._prepared(inputs))


def _logits_of(model: StagedModel, given: Any) -> Tensor:
    return model._output(given) if isinstance(model, Adapted) else cast(Tensor, given)


def _extra_losses_of(model: StagedModel, given: Any, logits: Tensor) -> list[Tensor]:
    """Find the losses that the module gives beside its logits, which the trainer adds too."""
    if not isinstance(model, Adapted) or model._output is not pick_logits:
        return []
    return extra_losses(given, logits)


def _averaged(model: StagedModel) -> Iterator[tuple[str, Tensor]]:
    """List what an average of the weights is of: parameters, and floating buffers."""
    yield from plain_of(model).named_parameters()
    for name, buffer in plain_of(model).named_buffers():
        if buffer.is_floating_point():
            yield name, buffer


@contextmanager
def _holding(model: StagedModel, values: Mapping[str, Tensor]) -> Iterator[None]:
    """Have a model hold other values for a time."""
    own = {name: value.detach().clone() for name, value in _averaged(model) if name in values}
    now = dict(_averaged(model))
    try:
        for name in own:
            now[name].data.copy_(values[name])
        yield
    finally:
        for name, value in own.items():
            now[name].data.copy_(value)


@contextmanager
def _evaluating(model: nn.Module) -> Iterator[None]:
    """Put a module into evaluation, and each part of it back as it was; buffers too."""
    modes = {each: each.training for each in model.modules()}
    buffers = [(each, each.clone()) for each in model.buffers()]
    model.eval()
    try:
        yield
    finally:
        for module, mode in modes.items():
            module.training = mode
        for buffer, value in buffers:
            buffer.copy_(value)
