"""Train a run in a process that may take so much more memory than it has at the start.

Arguments: report directory, settings and overrides joined by "|", the bytes, and what the memory
cgroups are called, but for the number of the rank: each makes its own.
"""

import json
import os
import sys
from pathlib import Path

from dataio.job.launch import join
from tonari.trainer.config.config import load_config
from tonari.trainer.run.loop import train

LIMITS = ("memory.max", "memory.limit_in_bytes")


def main() -> None:
    """Train, and say the losses."""
    directory, run, num_bytes, cgroup = sys.argv[1:]
    settings, *overrides = run.split("|")
    losses = []
    with join(device="cpu") as job:
        own = Path(f"{cgroup}{job.world.rank}")
        own.mkdir()
        next(own / name for name in LIMITS if (own / name).exists()).write_text(num_bytes)
        # What the process has already is not counted in it
        (own / "cgroup.procs").write_text(str(os.getpid()))
        config = load_config(Path(settings), overrides)
        train(config, quiet=True, on_epoch=lambda line: losses.append(line["loss"]))
        report = {"losses": losses}
        Path(directory, f"{job.world.rank}.json").write_text(json.dumps(report))


if __name__ == "__main__":
    main()
