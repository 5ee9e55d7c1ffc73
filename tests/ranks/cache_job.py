"""One job of one process on a shared cache: says what it read and where; obeys on stdin.

Arguments: cache root, source pattern, and a JSON object: exchanging, uid, slow (pause after each
block read), explicit.
"""

import json
import mmap
import os
import sys
from pathlib import Path
from typing import Any

import numpy as np

from dataio import Bytes, DataioError, Int, open_source
from dataio.base.filesystem import cache_directory
from dataio.plan.layout import Layout
from dataio.plan.policies import Local
from dataio.store.pool import Pool
from dataio.world import World, single_world
from tests.memory_source import placement_of
from tests.opened import make_pool


def say(**told: object) -> None:
    # In one write: other threads speak too.
    sys.stdout.write(json.dumps(told) + "\n")
    sys.stdout.flush()


def open_pool(root: str, pattern: str, options: dict[str, Any], world: World) -> Pool:
    source = open_source(pattern)
    read = source.read

    def obedient(ids: Any, fields: Any) -> Any:
        for rows in read(ids, fields):
            say(event="block", rows=len(rows), opens=source.storage.num_opens)  # type: ignore[attr-defined]
            if options.get("slow"):
                sys.stdin.readline()
            yield rows

    source.read = obedient  # type: ignore[method-assign, assignment]
    layout = Layout(world.replicas_per_node, source.num_samples)
    wanted = placement_of(Local(), layout, node=0, epoch=0, seed=0)
    pool = make_pool(
        source,
        {"data": Bytes("bin"), "number": Int("cls")},
        world=world,
        root=cache_directory(root, read_only=True),
        num_slots=wanted.num_slots,
        num_leaving=3 if options.get("exchanging") else 0,
        wanted=None if options.get("exchanging") else wanted,
        columns=("loss",) if options.get("scores") else (),
        foreign=bool(options.get("foreign")),
        readers=1,
    )
    pool.ensure(wanted)
    return pool


def main() -> None:
    root, pattern, options = sys.argv[1], sys.argv[2], json.loads(sys.argv[3])
    if "uid" in options:
        os.setgid(options["uid"])
        os.setuid(options["uid"])
    world = single_world()
    world.timeout_s = options.get("timeout_s", 60.0)
    say(event="begin", pid=os.getpid())
    try:
        pool = open_pool(root, pattern, options, world)
    except DataioError as error:
        say(event="error", error=str(error), kind=type(error).__name__)
        return
    cache = pool.cache
    data = cache.read_rows(np.arange(cache.num_slots)).variable[0]
    say(
        event="ready",
        directory=str(cache.directory),
        shared=cache.hold.shared,
        num_bytes=len(data),
        staging=pool.staging_s > 0,
        names=sorted(path.name for path in Path(cache.directory).iterdir()),
    )
    sys.stdin.readline()
    pool.close()


if __name__ == "__main__":
    # NumPy imports it late, when this process may be of a user to whom the interpreter is closed.
    assert mmap
    main()
