"""Probe as ranks of several nodes, whose clocks differ by a thousand seconds.

Arguments: where reports go, the settings' file, where the probe goes.
"""

import json
import sys
import time
from pathlib import Path
from types import SimpleNamespace

from dataio.job.launch import join
from dataio.world import discover_world
from tonari.oracle.probe import messages
from tonari.oracle.probe.probe import probe, save_probe
from tonari.trainer.config.config import load_config

APART_S = 1000.0
SIZES = (256,)


def main() -> None:
    out, settings, kept = map(Path, sys.argv[1:4])
    with discover_world() as world:
        rank, node, world_size = world.rank, world.node, world.world_size
    clock = SimpleNamespace(
        perf_counter=lambda: time.perf_counter() + node * APART_S, process_time=time.process_time
    )
    messages.time = clock  # type: ignore[assignment, attr-defined]
    messages.MOST_MESSAGES = messages.LEAST_MESSAGES
    found = probe(
        load_config(settings), world_size=world_size, steps=1, sizes=SIZES, link_sizes=SIZES
    )
    if not rank:
        save_probe(found, kept)
    with join(device="cpu"):
        ahead_s = messages.clock_ahead_s(found.ranks)
    report = {"nodes": found.nodes, "ranks": found.ranks, "ahead_s": ahead_s}
    (out / f"{rank}.json").write_text(json.dumps(report))


if __name__ == "__main__":
    main()
