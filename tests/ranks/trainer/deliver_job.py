"""Meshes of 4 ranks, one after the other, without a model; reports what each rank saw.

Arguments: report directory.
"""

import json
import sys
from pathlib import Path

from dataio.job.launch import join
from tests.trainer.mesh.meshes import train
from tonari.trainer.mesh.place import place_of

MESHES = {"pp2tp2": (2, 1, 2), "pp4": (4, 1, 1)}


def main() -> None:
    directory = Path(sys.argv[1])
    report: dict[str, dict[str, object]] = {}
    with join(device="cpu", timeout_s=60) as job:
        rank = job.world.rank
        for name, (pp, dp, tp) in MESHES.items():
            place = place_of(rank, (pp, dp, 1, 1, tp), schedule="1f1b", virtual=1)
            run = train(job.world, place, directory / name)
            report[name] = {
                "steps": run.steps, "losses": run.losses, "held_bytes": run.held_bytes,
                "mapped": run.mapped, "rows_read": len(run.rows_read),
                "columns": sorted(map(list, run.columns)),
            }  # fmt: skip
    (directory / f"{rank}.json").write_text(json.dumps(report))


if __name__ == "__main__":
    main()
