"""Train by a framework on all ranks; start again and be killed; in a second job go on from there.

Arguments: directory of reports, framework, work directory with ``data``, "killed" or "resumed".
"""

import contextlib
import json
import os
import sys
from pathlib import Path

import dataio
from tests.fits.drive import Heard, checkpoint, find_steps, run

out, framework, work, part = Path(sys.argv[1]), sys.argv[2], Path(sys.argv[3]), sys.argv[4]
os.environ["TONARI_CACHE"] = str(work / f"cache of {part}")
ranks, file = int(os.environ["WORLD_SIZE"]), f"{os.environ['RANK']}.json"
data, again = work / "data", work / "again"


def main() -> None:
    if part == "killed":
        loader, accuracy, *_ = run(framework, data, work / "saved", ranks=ranks)
        # timm saves at the end of an epoch.
        steps = len(loader) if framework == "timm" else find_steps(loader)["hidden rows"]
        report = {
            "accuracy": accuracy,
            "steps": len(loader.given),
            "given": loader.by_epoch(loader.given),
            "reported": loader.by_epoch(loader.reported) if framework != "timm" else {},
            "exchanged": loader.stats()["exchanged_rows"],
            "from": steps,
            "rest": [loader.given[steps:], loader.reported[loader.saves.get(steps, steps) :]],
        }
        (work / file).write_text(json.dumps(report))
        (out / file).write_text(json.dumps(report))
        Heard.killed_after = steps + 2
        run(framework, data, again, ranks=ranks)
    else:
        steps = json.loads((work / file).read_text())["from"]
        resume = again / "last.pth.tar" if framework == "timm" else checkpoint(again, steps)
        loader, *_ = run(framework, data, again, resume=resume, ranks=ranks)
        report = {"rest": [loader.given, loader.reported]}
        (out / file).write_text(json.dumps(report))


# The others make torch's process group themselves.
with dataio.join(device="cpu") if framework == "timm" else contextlib.nullcontext():
    main()
