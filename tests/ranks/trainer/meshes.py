"""Train some runs, one after the other; each leaves its own metrics, and is told of step by step.

Arguments: report directory, then for each run its configuration and overrides joined by "|"; see
`train_watched`.
"""

import json
import sys
from pathlib import Path

from dataio.job.launch import join
from tests.trainer.watch.watched import train_watched


def main() -> None:
    directory, reports = Path(sys.argv[1]), []
    # One group for all runs: making it takes longer than most of them.
    with join(device="cpu") as job:
        for case in sys.argv[2:]:
            config, *given = case.split("|")
            reports.append(train_watched(Path(config), *given))
        rank = job.world.rank
    (directory / f"{rank}.json").write_text(json.dumps(reports))


if __name__ == "__main__":
    main()
