"""Train by a framework on all ranks, then go on from where rows were hidden.

Arguments: directory of reports, framework, work directory with ``blobs``.
"""

import json
import os
import sys
from pathlib import Path

from tests.fits.drive import checkpoint, find_steps, run

out, framework, work = Path(sys.argv[1]), sys.argv[2], Path(sys.argv[3])
os.environ["TONARI_CACHE"] = str(work / "cache")
ranks = int(os.environ["WORLD_SIZE"])

loader, accuracy, *_ = run(framework, work / "blobs", work / "saved", ranks=ranks)
steps = find_steps(loader)["hidden rows"]
resumed, *_ = run(
    framework, work / "blobs", work / "again", resume=checkpoint(work / "saved", steps), ranks=ranks
)
report = {
    "accuracy": accuracy,
    "steps": len(loader.given),
    "given": loader.by_epoch(loader.given),
    "heard": loader.by_epoch(loader.reported),
    "exchanged": loader.stats()["exchanged_rows"],
    "rest": loader.reported[loader.saves[steps] :],
    "resumed": resumed.reported,
}
(out / f"{os.environ['RANK']}.json").write_text(json.dumps(report))
