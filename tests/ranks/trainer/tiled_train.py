"""Train runs one after the other; each is settings and overrides joined by "|"."""

import json
import sys
from pathlib import Path

from dataio.job.launch import join
from tonari.trainer.config.config import load_config
from tonari.trainer.run.loop import train


def main() -> None:
    """Train, and say how far each came."""
    directory, *runs = sys.argv[1:]
    with join(device="cpu") as job:
        steps = []
        for each in runs:
            settings, *overrides = each.split("|")
            summary = train(load_config(Path(settings), overrides), quiet=True)
            steps.append(summary.progress.steps)
        Path(directory, f"{job.world.rank}.json").write_text(json.dumps({"steps": steps}))


if __name__ == "__main__":
    main()
