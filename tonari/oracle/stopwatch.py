"""How long the parts of a step take between messages, on this machine and on nobody's data.

The step is the trainer's own, as any rank of any world, with real tensors; what other ranks would
send is made up. So one machine can time what any rank of a larger job computes.
"""

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from tonari.oracle.record import Message, Wait, Watcher
from tonari.oracle.trace import NoReports, alone, make_batch
from tonari.trainer.config.config import Config
from tonari.trainer.run.build import build_rank
from tonari.trainer.run.optimizers import build_optimizer
from tonari.trainer.run.own import Own, own_of
from tonari.trainer.run.step import evaluating, train_step

WARM_UP_STEPS = 2
RECEIVED = 0.01
"""What a peer sends: memory that nobody wrote to can hold numbers that are slow to compute with."""


@dataclass(frozen=True, kw_only=True)
class Timed:
    """What a rank computes in a step, in seconds.

    Attributes:
        rank: Which.
        events: Messages and waits, in the order in which they are issued.
        laps_s: Of computation up to each of these, and after the last one, in several steps.
        step_s: Of whole steps without a clock in them, made-up messages included.
    """

    rank: int
    events: tuple[Message | Wait, ...]
    laps_s: tuple[tuple[float, ...], ...]
    step_s: tuple[float, ...]

    @property
    def computing_s(self) -> float:
        """Seconds that a step computes: the median of those that were timed."""
        return statistics.median(map(sum, self.laps_s))


def time_step(
    config: Config,
    *,
    world_size: int,
    rank: int,
    own: Own | None = None,
    steps: int = 10,
    ready: Callable[[], None] = lambda: None,
    evaluates: bool = False,
) -> Timed:
    """Train some steps as one of a job's ranks, with nobody at the other end, and time them.

    Args:
        config: The settings; ``mesh.compile`` is heeded.
        world_size: Ranks of the job.
        rank: Which of them to be.
        own: What the caller of `trainer.train` would bring.
        steps: How many to time with a clock in them, and without.
        ready: Called before each step: waits for others that share the machine, if they are to
            compute at the same time.
        evaluates: Score a batch, as an evaluation does, in place of each step.

    Raises:
        ConfigError: If the settings do not fit such a world.
    """
    own = own_of(config, own)
    with alone(rank, world_size):
        parallel = build_rank(
            config, rank=rank, world_size=world_size, device=torch.device("cpu"), own=own
        )
        pipeline = parallel.pipeline
        make = own.optimizer or (lambda given: build_optimizer(config.optimizer, given))
        optimizer = make(pipeline.parameters())
        batches = [
            make_batch(config, own, parallel.task, pipeline.place)
            for _ in range(config.optimizer.accumulate)
        ]

        def train() -> None:
            train_step(pipeline, optimizer, NoReports(), batches, clip=config.optimizer.clip)

        def score() -> None:
            with evaluating(pipeline):
                pipeline.forward(batches[0])

        run = score if evaluates else train

        def step() -> float:
            ready()
            start = time.perf_counter()
            run()
            return time.perf_counter() - start

        plain_s, laps_s = [], []
        clock = Stopwatch()
        with clock:
            for _ in range(WARM_UP_STEPS):
                step()
        for _ in range(steps):
            plain_s.append(step())
            with clock:
                ready()
                clock.mark()
                run()
                laps_s.append(clock.stop())
    # The clock itself takes time, at each operator alike
    scale = statistics.median(plain_s) / statistics.median(map(sum, laps_s))
    return Timed(
        rank=rank,
        events=tuple(event for event in clock.events if isinstance(event, Message | Wait)),
        laps_s=tuple(tuple(part * scale for part in lap) for lap in laps_s),
        step_s=tuple(plain_s),
    )


class Stopwatch(Watcher):  # type: ignore[no-untyped-call]
    """Notes the seconds between messages, and makes up what peers would send.

    That a rank issues a message, and copies what it sends, is computation of its own.
    """

    def __init__(self) -> None:
        super().__init__()
        self._laps_s: list[float] = []
        self._since = self._made_up_s = 0.0

    def mark(self) -> None:
        """Begin a step."""
        super().mark()
        self._laps_s = []
        self._since = time.perf_counter()

    def stop(self) -> list[float]:
        """End a step: seconds up to each event, and after the last one."""
        return [*self._laps_s, time.perf_counter() - self._since]

    def call(self, func: Any, args: tuple[Any, ...], named: dict[str, Any]) -> Any:
        """Receive what is as fast to compute with as anything, and agree to what is asked."""
        result = super().call(func, args, named)
        start = time.perf_counter()
        if func is torch.ops.c10d.recv_.default:
            for tensor in args[0]:
                tensor.fill_(RECEIVED if tensor.is_floating_point() else 1)
        self._made_up_s = time.perf_counter() - start
        return result

    def exchange(self, carry_out: Callable[[], Any], note: Callable[[Any], None]) -> Any:
        """End a lap with a message or wait."""
        self._made_up_s, known = 0.0, len(self.events)
        result = super().exchange(carry_out, note)
        if len(self.events) > known:
            end = time.perf_counter()
            self._laps_s.append(end - self._since - self._made_up_s)
            self._since = end
        return result
