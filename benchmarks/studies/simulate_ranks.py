"""How long does it take to simulate a step, by the ranks of the job?

A small GPT over dp, FSDP, tp and pp, whose ranks are timed here and simulated on a cluster whose
nodes have eight ranks each: one step, event by event, of all ranks.

    python -m benchmarks.studies.simulate_ranks [--ranks 64 256 1024]
"""

import argparse
import resource
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from benchmarks.studies.step_memory import Case, load
from benchmarks.studies.step_time import GPT
from tonari.oracle.cluster.cluster import Cluster, Level
from tonari.oracle.cluster.machine import Nodes
from tonari.oracle.machine import OneNode
from tonari.oracle.programs import programs
from tonari.oracle.record import Message
from tonari.oracle.simulate import simulate
from tonari.oracle.stopwatch import time_step
from tonari.trainer.run.build import lay_out

PER_NODE = 8
MESH = ("mesh.pp=4", "mesh.tp=4", "mesh.dp_shard=4", "mesh.microbatches=4")


def main(argv: Sequence[str] | None = None) -> None:
    """Simulate a step of each number of ranks."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--ranks", type=int, nargs="+", default=[64, 256, 1024])
    given = parser.parse_args(argv)
    for ranks in given.ranks:
        settings = (*GPT, "model.depth=8", *MESH, f"mesh.dp_replicate={ranks // 64}")
        with tempfile.TemporaryDirectory() as directory:
            _, config = load(Case("gpt", ranks, settings), Path(directory))
        timed = [
            time_step(config, world_size=ranks, rank=stage * ranks // 4, steps=2)
            for stage in range(4)
        ]
        levels = (
            Level(name="node", units=PER_NODE, gbyte_s=100.0, latency_us=3.0),
            Level(name="switch", units=ranks // PER_NODE, gbyte_s=12.5, latency_us=6.0),
        )
        machine = Nodes(
            Cluster(name="wide", level=levels), OneNode((), ((1, 1.0), (PER_NODE, 1.0)))
        )
        steps = programs(timed, ranks, lay_out(config, ranks).sizes)
        messages = sum(isinstance(event, Message) for each in steps for event in each.events)
        started = time.perf_counter()
        found = simulate(steps, machine, steps=1)
        took_s = time.perf_counter() - started
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
        print(
            f"{ranks} ranks, {messages:,} messages: {took_s:.1f} s, {peak:.0f} MiB at most; the "
            f"step takes {found.step_s:.3f} s",
            flush=True,
        )


if __name__ == "__main__":
    main()
