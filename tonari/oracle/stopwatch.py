"""How long the parts of a step take between messages, on this machine and on nobody's data.

The step is the trainer's own, as any rank of any world, with real tensors; what other ranks would
send is made up. So one machine can time what any rank of a larger job computes. On a GPU a step is
timed twice: what its kernels take there, and what the host takes to issue them.
"""

import statistics
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from dataio.rows.samples import Batch
from tonari.oracle.clock import DeviceClock, Gpu, HostClock, StepClock
from tonari.oracle.record import Message, Wait, Watcher
from tonari.oracle.trace import NoReports, alone, make_batch, warmed_up
from tonari.trainer.config.config import Config
from tonari.trainer.run.build import build_rank
from tonari.trainer.run.optimizers import build_optimizer
from tonari.trainer.run.own import Own, own_of
from tonari.trainer.run.step import evaluating, train_step

WARM_UP_STEPS = 2
COPIES = 5
"""Of a step's batches, that are timed."""
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
        issuing_s: As ``laps_s``, of a host that issues them to a GPU; empty: they are its own.
        copy_s: Of a step's batches from the host to its GPU.
    """

    rank: int
    events: tuple[Message | Wait, ...]
    laps_s: tuple[tuple[float, ...], ...]
    step_s: tuple[float, ...]
    issuing_s: tuple[tuple[float, ...], ...] = ()
    copy_s: float = 0.0

    @property
    def computing_s(self) -> float:
        """Seconds that a step computes: the median of those that were timed."""
        return statistics.median(map(sum, self.laps_s))

    @property
    def core_s(self) -> float:
        """Seconds that a step takes of the host's processors; as of ``computing_s``."""
        return statistics.median(map(sum, self.issuing_s or self.laps_s))


def time_step(
    config: Config,
    *,
    world_size: int,
    rank: int,
    own: Own | None = None,
    steps: int = 10,
    ready: Callable[[], None] = lambda: None,
    evaluates: bool = False,
    gpu: Gpu | None = None,
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
        gpu: Where the steps are computed; None: on the host.

    Raises:
        ConfigError: If the settings do not fit such a world.
    """
    own, config = own_of(config, own), warmed_up(config)
    device = torch.device("cpu") if gpu is None else gpu.device
    with alone(rank, world_size):
        parallel = build_rank(config, rank=rank, world_size=world_size, device=device, own=own)
        pipeline = parallel.pipeline
        make = own.optimizer or (lambda given: build_optimizer(config.optimizer, given))
        optimizer = make(pipeline.parameters())
        batches = [
            make_batch(config, own, parallel.task, pipeline.place)
            for _ in range(config.optimizer.accumulate)
        ]
        held: Stopwatch | None = None
        copy_s = 0.0
        if gpu is not None:
            of_kernels = DeviceClock(gpu.cuda, holds=True)
            held = Stopwatch(of_kernels)
            batches, copy_s = _send(batches, gpu, held)

        def train() -> None:
            train_step(pipeline, optimizer, NoReports(), batches, clip=config.optimizer.clip)

        def score() -> None:
            with evaluating(pipeline):
                pipeline.forward(batches[0])

        run = score if evaluates else train

        def plain() -> tuple[float, float]:
            """Time a step on the host, and where it is computed."""
            clocks: list[StepClock] = [HostClock()]
            if gpu is not None:
                clocks.insert(0, DeviceClock(gpu.cuda))
            for clock in clocks:
                clock.begin()
            run()
            found = [sum(clock.end()) for clock in reversed(clocks)]
            return found[0], found[-1]

        def watched(watch: Stopwatch) -> list[float]:
            with watch:
                watch.mark()
                run()
                found = watch.stop()
            if gpu is not None:
                gpu.cuda.synchronize()
            return found

        plain_s, issued_s, laps_s, kernels_s = [], [], [], []
        host = Stopwatch(HostClock())
        for _ in range(WARM_UP_STEPS):
            ready()
            watched(host)
        if held is not None:
            watched(held)
            while of_kernels.falls_short():
                watched(held)
        for _ in range(steps):
            ready()
            taken_s, step_s = plain()
            issued_s.append(taken_s)
            plain_s.append(step_s)
            ready()
            laps_s.append(watched(host))
            if held is not None:
                ready()
                kernels_s.append(watched(held))
    # The clock itself takes time, at each operator alike
    scale = statistics.median(issued_s) / statistics.median(map(sum, laps_s))
    of_host = tuple(tuple(part * scale for part in lap) for lap in laps_s)
    return Timed(
        rank=rank,
        events=tuple(event for event in host.events if isinstance(event, Message | Wait)),
        laps_s=of_host if gpu is None else tuple(map(tuple, kernels_s)),
        step_s=tuple(plain_s),
        issuing_s=() if gpu is None else of_host,
        copy_s=copy_s,
    )


def _send(batches: list[Batch], gpu: Gpu, watch: "Stopwatch") -> tuple[list[Batch], float]:
    """Copy a step's batches to a GPU, from where a loader has them; and the seconds it takes."""
    if gpu.device.type == "cuda":
        batches = [{name: value.pin_memory() for name, value in each.items()} for each in batches]
    sent = [
        {name: torch.empty_like(value, device=gpu.device) for name, value in each.items()}
        for each in batches
    ]
    took_s = []
    for _ in range(COPIES):
        with watch:
            watch.mark()
            for target, batch in zip(sent, batches, strict=True):
                for name, value in batch.items():
                    target[name].copy_(value, non_blocking=True)
            took_s.append(sum(watch.stop()))
    return sent, statistics.median(took_s)


class Stopwatch(Watcher):  # type: ignore[no-untyped-call]
    """Notes the seconds between messages, and makes up what peers would send.

    That a rank issues a message, and copies what it sends, is computation of its own.

    Args:
        clock: Measures them.
    """

    def __init__(self, clock: StepClock) -> None:
        super().__init__()
        self._clock = clock

    def mark(self) -> None:
        """Begin a step."""
        super().mark()
        self._clock.begin()

    def stop(self) -> list[float]:
        """End a step: seconds up to each event, and after the last one."""
        return self._clock.end()

    def compute(self, func: Any, args: tuple[Any, ...], named: dict[str, Any]) -> Any:
        """Carry out an operator that is no message."""
        self._clock.count()
        return self.call(func, args, named)

    def call(self, func: Any, args: tuple[Any, ...], named: dict[str, Any]) -> Any:
        """Receive what is as fast to compute with as anything, and agree to what is asked."""
        result = super().call(func, args, named)
        if func is torch.ops.c10d.recv_.default:
            self._clock.pause()
            for tensor in args[0]:
                tensor.fill_(RECEIVED if tensor.is_floating_point() else 1)
            self._clock.resume()
        return result

    def exchange(self, carry_out: Callable[[], Any], note: Callable[[Any], None]) -> Any:
        """End a lap with a message or wait."""
        known = len(self.events)
        result = super().exchange(carry_out, note)
        if len(self.events) > known:
            self._clock.lap()
        return result
