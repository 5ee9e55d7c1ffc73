"""Train with a save after every step, or go on from each save: two thread ranks a process.

Arguments: "whole" or "rest", work directory, name of a policy. Prints what was seen as JSON.
"""

import json
import sys
from pathlib import Path
from typing import Any

from dataio import Workers
from dataio.world import run_threads, thread_worlds
from tests.dataio.loaders import EPOCHS, POLICIES, digest, jitter, loss_of, make


def run(loader, on_step=None):
    """Train to the end: digests of all batches, in order."""
    seen = []
    for epoch in loader.epochs(EPOCHS):
        for batch in loader:
            loader.report(batch, *loss_of(batch["sample_id"], epoch))
            seen.append(digest(batch))
            if on_step is not None:
                on_step(len(seen))
        for batch in loader.refresh():
            loader.report(batch, *loss_of(batch["sample_id"], epoch + 0.5))
            seen.append(digest(batch))
    return seen


def whole(world, work, policy):
    with make(world, work / "cache", importance=POLICIES[policy], transform=jitter) as loader:
        return run(loader, lambda number: loader.save(work / f"saved-{number}"))


def rest(world, work, policy):
    saved = sorted(int(path.name.split("-")[1]) for path in work.glob("saved-*"))
    ends = {}
    for number in saved:
        # Another thread count; a cache that stands at another epoch than the save.
        options: dict[str, Any] = {"importance": POLICIES[policy], "transform": jitter}
        options["workers"] = Workers(threads=number % 3)
        with make(world, work / "cache", **options) as loader:
            loader.restore(work / f"saved-{number}")
            ends[number] = run(loader)
    return ends


work, policy = Path(sys.argv[2]), sys.argv[3]
part = {"whole": whole, "rest": rest}[sys.argv[1]]
print(json.dumps(run_threads(thread_worlds([1, 1]), lambda world: part(world, work, policy))))
