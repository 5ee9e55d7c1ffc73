"""Draws inside a model, such as dropout's, that depend on the step and the place in the model only.

Before each block of each microbatch torch's generators are seeded by (run's seed, step, microbatch
among those of all replicas, block, how often it was used before). So a run that is resumed draws
what it would have drawn; so does another mesh that trains the same microbatches; peers over tp,
which hold the same activations, draw the same; and what is computed again in the backward pass is
what the forward pass drew. What a task draws is keyed by the step and the replica. Python's and
NumPy's generators are seeded before a task and before each stage: for each block it would take
longer than a small block itself.
"""

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Literal, Protocol

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from dataio.base.seeding import Key, key
from dataio.batch.global_generators import globals_kept, seed_globals

SEEDS = 2**63
BY_USE = 0x8CB92BA72F3D8DD7
"""An odd constant that spreads the uses of a block over all seeds."""


class RandomPart(Protocol):
    """What is asked of a stage's module."""

    @property
    def blocks(self) -> Any: ...

    def register_forward_pre_hook(self, hook: Callable[..., None]) -> RemovableHandle: ...


class Randomness:
    """Seeds torch's generators for the parts of one rank.

    Args:
        seed: Of the run.
        replica: This rank's; replicas draw differently.
        microbatches: Of a replica's batch.
        apart: Number among the ranks of this replica that hold other activations of the same
            block: those of cp, and those of tp with sequence parallel; 0 where they are the same.
        device: Of the parts.
    """

    def __init__(
        self, *, seed: int, replica: int, microbatches: int, apart: int, device: torch.device
    ) -> None:
        self._seed, self._apart = seed, apart
        self._first = replica * microbatches
        self._generators = [torch.default_generator]
        if device.type == "cuda":
            number = torch.cuda.current_device() if device.index is None else device.index
            self._generators.append(torch.cuda.default_generators[number])
        self._on = False
        self._base = 0
        self._step, self._step_key = 0, 0
        # Of each place in the model, how often it was passed in this forward pass.
        self._uses: dict[int, int] = {}

    def attach(self, part: nn.Module) -> None:
        """Seed before each block of a part, before what comes before them, and after the last."""
        blocks: dict[str, nn.Module] = dict(getattr(part, "blocks", {}).items())
        part.register_forward_pre_hook(self._reseeding(0, stage=min(map(int, blocks), default=0)))
        for name, block in blocks.items():
            number = int(name) + 1
            block.register_forward_pre_hook(self._reseeding(number))
            # What follows the last block, such as the head, is no block's.
            block.register_forward_hook(self._reseeding(-number))

    @contextmanager
    def drawing(self, step: int) -> Iterator[None]:
        """Seed while a batch is trained on, and leave torch's generators as they were.

        Args:
            step: Number of the batch in the run.
        """
        states = [generator.get_state() for generator in self._generators]
        self._on, self._step, self._step_key = True, step, key(self._seed, "draws", step=step)
        try:
            yield
        finally:
            self._on = False
            for generator, state in zip(self._generators, states, strict=True):
                generator.set_state(state)

    @contextmanager
    def drawing_alike(self) -> Iterator[None]:
        """Seed once, the same each time, and leave all generators as they were."""
        device = [] if len(self._generators) == 1 else [torch.cuda.current_device()]
        with globals_kept(), torch.random.fork_rng(devices=device):
            self._seed_all(key(self._seed, "evaluation"))
            yield

    def before_task(self, what: Literal["input", "target"]) -> None:
        """Seed before a task takes its part of a batch."""
        if self._on:
            self._seed_all(
                key(self._seed, f"draws of {what}", replica=self._first, step=self._step)
            )

    def _seed_all(self, stream: Key) -> None:
        seed_globals(stream)
        for generator in self._generators:
            generator.manual_seed(stream % SEEDS)

    def begin(self, microbatch: int) -> None:
        """Say which microbatch the next forward pass is of."""
        # Neighbouring numbers, spread over all seeds by the odd constant of the golden ratio.
        self._uses.clear()
        number = (self._first + microbatch) * 1024 + self._apart
        self._base = (self._step_key + number * 0x9E3779B97F4A7C15) % SEEDS

    def _reseeding(self, number: int, *, stage: int | None = None) -> Callable[..., None]:
        def reseed(*_: object) -> None:
            if self._on:
                uses = self._uses.get(number, 0)
                seed = (self._base + number * 0xD1342543DE82EF95 + uses * BY_USE) % SEEDS
                self._uses[number] = uses + 1
                if stage is not None:
                    seed_globals(Key((seed + stage * BY_USE) % SEEDS))
                for generator in self._generators:
                    generator.manual_seed(seed)

        # A compiler that looked inside would compile each block anew, and for each seed. Where
        # nothing is compiled, its own hook takes longer than the generators.
        not_traced = torch.compiler.disable(reseed)  # type: ignore[no-untyped-call]

        def hook(*_: object) -> None:
            (not_traced if torch.compiler.is_compiling() else reseed)()

        return hook


@contextmanager
def deterministic(wanted: bool) -> Iterator[None]:
    """Have torch compute the same bits each time, on the same device, while the block runs.

    On a GPU it is slower, and begins before the first call of cuBLAS: that reads its setting once.
    An operation without such a kernel raises torch's RuntimeError, which names it. On a CPU torch
    computes so in any case, but for a few scatters.
    """
    if not wanted:
        yield
        return
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    cudnn = torch.backends.cudnn
    before = torch.are_deterministic_algorithms_enabled(), cudnn.deterministic, cudnn.benchmark
    only_warned = torch.is_deterministic_algorithms_warn_only_enabled()
    torch.use_deterministic_algorithms(True)
    cudnn.deterministic, cudnn.benchmark = True, False
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before[0], warn_only=only_warned)
        _, cudnn.deterministic, cudnn.benchmark = before
