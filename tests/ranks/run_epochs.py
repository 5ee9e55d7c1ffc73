"""Stage, exchange, commit and checkpoint for some epochs; killed on the way where told to be.

Arguments: report directory, work directory, samples, exchange fraction, epochs, kill plan as JSON
(or "none"). An exchange of -1 deals all rows anew every epoch. No torch: it starts quickly.
"""

import json
import os
import signal
import sys
from pathlib import Path

import numpy as np

import dataio.cache
import dataio.snapshot
import dataio.staging
from dataio.cache import Cache
from dataio.errors import StateError
from dataio.layout import Layout
from dataio.policies import Selection, Turn
from dataio.pool import Pool
from dataio.rows import corrupt_rows
from dataio.snapshot import NodeSnapshot, find_snapshot, load_node, load_state, save_snapshot
from dataio.world import discover_world
from shuffle.policies import Global, Partial
from tests.memory_source import FIELDS, MemorySource, placement_of

POINTS = {
    "staging": (Cache, "write_rows"),
    "exchange": (Cache, "write_arrivals"),
    "seal": (dataio.cache, "write_table"),
    "commit": (dataio.cache, "write_json"),
    "turn": (Cache, "turn"),
    "replace": (os, "replace"),
    "checkpoint": (dataio.snapshot, "write_table"),
    "checkpoint renames": (dataio.snapshot, "replace_directory"),
}


def arm(plan, rank):
    """Wrap a function so that its n-th call on one rank is the last thing that happens."""
    if plan is None or plan["rank"] != rank:
        return
    owner, name = POINTS[plan["point"]]
    original = getattr(owner, name)
    calls = 0

    def wrapped(*args, **kwargs):
        nonlocal calls
        calls += 1
        if calls == plan["call"] and plan["when"] == "before":
            os.kill(os.getpid(), signal.SIGKILL)
        result = original(*args, **kwargs)
        if calls == plan["call"]:
            os.kill(os.getpid(), signal.SIGKILL)
        return result

    setattr(owner, name, wrapped)


def score_of(ids, epoch):
    """A score that names its sample and the last epoch it was trained in."""
    return ids + epoch * 1000.0


def main():
    out, work = Path(sys.argv[1]), Path(sys.argv[2])
    num_samples, exchange, epochs = int(sys.argv[3]), float(sys.argv[4]), int(sys.argv[5])
    world = discover_world(timeout_s=60)
    arm(json.loads(sys.argv[6]) if sys.argv[6] != "none" else None, world.rank)
    policy = Global(moves=True) if exchange < 0 else Partial(exchange)
    layout = Layout(world.replicas_per_node, num_samples)
    source = MemorySource(num_samples, block_rows=4)
    dataio.staging.SEAL_BYTES = 50
    pool = Pool(
        source,
        FIELDS,
        world=world,
        root=work / "cache",
        num_slots=layout.pool_rows(world.node),
        num_leaving=policy.num_leaving(layout),
        progress=False,
        columns=("loss",),
    )
    checkpoint, epoch = work / "checkpoint", 0
    try:
        found = find_snapshot(checkpoint)
        epoch = int(str(load_state(found)["epoch"]))
    except StateError:
        found = None
    started_at = epoch
    pool.ensure(placement_of(policy, layout, node=world.node, epoch=epoch, seed=0))
    (work / f"staged-{world.rank}").touch()
    if found is not None and world.local_rank == 0:
        pool.scores[:] = load_node(found, world.node, pool.scores.dtype).scores
    world.barrier(doing="restore scores")
    share = slice(*layout.share_slots(world.replica))
    rows = np.zeros(2, np.int64)
    while epoch < epochs:
        pool.scores["loss"][share] = score_of(pool.cache.entries.sample_id[share], epoch)
        world.barrier(doing="score")
        running = policy.begin(Turn(world, pool.cache, layout, epoch, 0, range(4), 20, 0))
        if running is not None:
            for step in range(4):
                running.progress(step)
            figures = running.finish(pool.scores)
            rows += np.array([figures["rows"], policy.num_leaving(layout)], np.int64)
            pool.commit(epoch + 1)
        epoch += 1
        ids = pool.cache.entries.sample_id[:]
        pool.settle()
        node = NodeSnapshot(ids, pool.scores, Selection(), np.zeros(len(ids), np.uint8))
        save_snapshot(checkpoint, {"epoch": epoch}, node, world)
    entries = pool.cache.entries
    report = {
        "started_at": started_at,
        "rows": rows.tolist(),
        "ids": entries.sample_id[share].tolist(),
        "expected": policy.placement(layout, node=world.node, epoch=epochs, seed=0)[share].tolist(),
        "corrupt": len(corrupt_rows(pool.cache.read_rows(np.arange(share.start, share.stop)))),
        "scores": pool.scores["loss"][share].tolist(),
        "read_from_source": len(source.rows_read),
        "files": sorted(p.name for p in (work / "cache").rglob("*.partial")),
    }
    (out / f"{world.rank}.json").write_text(json.dumps(report))
    pool.close()
    world.close()


main()
