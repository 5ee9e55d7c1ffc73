"""Draws inside a model, such as dropout's, that depend on the step and the place in the model only.

Before each block of each microbatch torch's generators are seeded by (run's seed, step, microbatch
among those of all replicas, block). So a run that is resumed draws what it would have drawn; so
does another mesh that trains the same microbatches; peers over tp, which hold the same activations,
draw the same; and what is computed again in the backward pass is what the forward pass drew.
"""

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Protocol, cast

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from dataio.base.seeding import key

SEEDS = 2**63


class Part(Protocol):
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
        self._microbatch: int | None = None
        self._step_key = 0

    def attach(self, part: nn.Module) -> None:
        """Seed before each block of a part, before what comes before them, and after the last."""
        part.register_forward_pre_hook(self._reseeding(0))
        blocks: dict[str, nn.Module] = dict(getattr(part, "blocks", {}).items())
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
        self._on, self._step_key = True, key(self._seed, "draws", step=step)
        try:
            yield
        finally:
            self._on = False
            for generator, state in zip(self._generators, states, strict=True):
                generator.set_state(state)

    def begin(self, microbatch: int) -> None:
        """Say which microbatch the next forward pass is of."""
        # Neighbouring numbers, spread over all seeds by the odd constant of the golden ratio.
        number = (self._first + microbatch) * 1024 + self._apart
        self._base = (self._step_key + number * 0x9E3779B97F4A7C15) % SEEDS

    def _reseeding(self, number: int) -> Callable[..., None]:
        # A compiler that looked inside would compile each block anew, and for each seed.
        @torch.compiler.disable  # type: ignore[untyped-decorator]
        def reseed(*_: object) -> None:
            if self._on:
                seed = (self._base + number * 0xD1342543DE82EF95) % SEEDS
                for generator in self._generators:
                    generator.manual_seed(seed)

        return cast(Callable[..., None], reseed)


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
