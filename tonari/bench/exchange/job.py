"""What every rank of an exchange benchmark runs: all ways, an epoch each; rank 0 reports.

mpiexec -n 2 python -m tonari.bench.exchange.job task.json
"""

import json
import sys
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path

import msgspec
import numpy as np
import torch
from numpy.typing import NDArray

from dataio import World, discover_world
from dataio.plan.policies import Local
from shuffle import Partial
from tonari.bench.exchange.task import Epoch, ExchangeTask, Step
from tonari.bench.exchange.ways import ExchangeWay, Loaded, OneByOne, Reread

PRODUCT_SIDE = 256
CALIBRATION_S = 0.5

Ways = dict[tuple[str, float], ExchangeWay]


def main() -> None:
    """Measure; rank 0 writes a line of JSON an epoch."""
    task = msgspec.json.decode(Path(sys.argv[1]).read_bytes(), type=ExchangeTask)
    settings = task.settings
    torch.set_num_threads(1)
    world = discover_world(timeout_s=settings.timeout_s)
    products = calibrate(settings.step_s, world)
    send(world, {"progress": "staging"})
    ways = open_ways(task, world)
    actions: dict[Step, Callable[[], None]] = {
        "sleep": lambda: time.sleep(settings.step_s),
        "product": lambda: multiply(products),
    }
    send(world, {"begun": {"products_a_step": products, "product_side": PRODUCT_SIDE}})
    order = list(ways)
    for repeat in range(-1, settings.repeats):
        for step in settings.steps:
            for name in order:
                epoch = measure(name, ways[name], actions[step], world, step, repeat)
                if repeat >= 0:  # The first round warms up.
                    send(world, {"epoch": asdict(epoch)})
        # The way that follows the heaviest is slowed by its flushing: a different one each time.
        order = order[1:] + order[:1]
    for way in ways.values():
        way.close()
    world.close()


def open_ways(task: ExchangeTask, world: World) -> Ways:
    """Stage what each way needs. Collective."""
    ways: Ways = {("local", 0.0): Loaded(task, world, Local(), "local")}
    for fraction in task.settings.exchanges:
        shuffle = Partial(fraction)
        ways["exchange", fraction] = Loaded(task, world, shuffle, f"exchange-{fraction:g}")
    if get := task.settings.get:
        ways["get", get] = Loaded(task, world, OneByOne(get), "get")
    if task.settings.shared_rate:
        ways["reread", 0.0] = Reread(task, world)
    return ways


def measure(
    name: tuple[str, float], way: ExchangeWay, act: Callable[[], None], world: World, step: Step,
    repeat: int,
) -> Epoch:  # fmt: skip
    """Train one epoch. Collective."""
    ids: list[NDArray[np.int64]] = []
    before = way.figures()
    world.barrier(doing="start the epoch")
    cpu, started = time.process_time(), time.perf_counter()
    for batch_ids in way.epoch():
        ids.append(batch_ids.copy())
        act()
    trained = time.perf_counter()
    way.end_epoch()
    ended, cpu = time.perf_counter(), time.process_time() - cpu
    after = way.figures()
    mine = [
        ended - started, ended - trained, cpu,
        *(after[figure] - before[figure]
          for figure in ("exchanged_bytes", "exchange_messages", "exchange_blocked_s")),
        after["exchange_overlap_fraction"],
    ]  # fmt: skip
    everyone = world.allgather_array(np.array(mine, float), doing="bring figures together")
    delivered = world.allgather_array(np.concatenate(ids), doing="compare samples").ravel()
    most, total = everyone.max(axis=0), everyone.sum(axis=0)
    return Epoch(
        way=name[0],
        fraction=name[1],
        step=step,
        repeat=repeat,
        epoch_s=float(most[0]),
        epoch_end_s=float(most[1]),
        cpu_s=float(total[2]),
        sent_bytes=int(total[3]),
        messages=int(most[4]),
        blocked_s=float(most[5]),
        overlap_fraction=float(total[6]) / world.world_size,
        exact=np.array_equal(np.sort(delivered), np.arange(len(delivered))),
    )


def calibrate(step_s: float, world: World) -> int:
    """Count the matrix products that fill a step while all ranks multiply; the same on all."""
    multiply(10)
    world.barrier(doing="calibrate the step")
    looks: list[float] = []
    end = time.perf_counter() + CALIBRATION_S
    while (started := time.perf_counter()) < end:
        multiply(10)
        looks.append((time.perf_counter() - started) / 10)
    # The median: what else the machine does now and then is not part of a step.
    mine = np.array([step_s / float(np.median(looks))])
    total = world.allreduce(mine, op="sum", doing="agree on the step")
    return max(round(float(total[0]) / world.world_size), 1)


def multiply(count: int) -> None:
    """Keep this rank's core busy."""
    left = torch.ones((PRODUCT_SIDE, PRODUCT_SIDE))
    into = torch.empty_like(left)
    for _ in range(count):
        torch.mm(left, left, out=into)


def send(world: World, message: dict[str, object]) -> None:
    """Send a line of JSON to whoever started the job, from rank 0."""
    if world.rank == 0:
        sys.stdout.write(json.dumps(message) + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
