"""Starts of runs whose model the settings name, one after the other.

Arguments: report directory, settings, then the overrides of each start joined by "|".
"""

import json
import sys
from pathlib import Path

from dataio.job.launch import join
from tonari.trainer.config.config import load_config
from tonari.trainer.run.loop import train


def main() -> None:
    """Train, and say how each ended."""
    directory, config, *cases = sys.argv[1:]
    with join(device="cpu") as job:
        ended = [train(load_config(Path(config), case.split("|"))) for case in cases]
        steps = [each.progress.steps for each in ended]
        Path(directory, f"{job.world.rank}.json").write_text(json.dumps({"steps": steps}))


if __name__ == "__main__":
    main()
