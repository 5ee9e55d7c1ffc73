"""A loader of shards that grow, on every rank: saves, and is killed; or goes on from the save.

Arguments: report directory, and a JSON object: shards, cache, save, kill (epoch and step, or null).
"""

import json
import os
import signal
import sys
from pathlib import Path

import shuffle
from dataio import Bytes, Int, Loader, Reports, Shards, Workers
from dataio.world import discover_world

EPOCHS = 4

report_directory, options = Path(sys.argv[1]), json.loads(sys.argv[2])
world = discover_world()
seen: list[list[object]] = []
shards = Path(options["shards"])
with Loader(
    Shards(str(shards / "*.tar"), grows=True), batch_size=4, world=world, seed=7,
    fields={"label": Int("cls"), "data": Bytes("bin")}, cache=options["cache"],
    shuffle=shuffle.Partial(0.3), workers=Workers(threads=1), reports=Reports(progress=False),
) as loader:  # fmt: skip
    if options["goes_on"]:
        loader.restore(options["save"])
    for epoch in loader.epochs(EPOCHS):
        for batch in loader:
            seen.append([epoch, batch["sample_id"].tolist(), [len(x) for x in batch["data"]]])
            if world.rank == 0 and loader.step == 2 and (shards / f"wait-{epoch}").exists():
                os.replace(shards / f"wait-{epoch}", shards / f"shard-{epoch + 2:03d}.tar")
            if [epoch, loader.step] == options["save_at"] and not options["goes_on"]:
                loader.save(options["save"])
                kept = len(seen)
            if [epoch, loader.step] == options["kill_at"]:
                os.kill(os.getpid(), signal.SIGKILL)
    result = {"seen": seen, "kept": 0 if options["goes_on"] else kept}
    (report_directory / f"{world.rank}.json").write_text(json.dumps(result))
world.close()
