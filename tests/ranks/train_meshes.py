"""Train some runs, one after the other; each leaves its own metrics.

Arguments: report directory, configuration, then for each run its overrides joined by "|"; one of
them may be "stop=STEPS": a SIGTERM comes in that step of this start.
"""

import json
import os
import signal
import sys
from pathlib import Path
from typing import Any

import trainer.loop
import trainer.stop
from trainer.config import load_config
from trainer.launch import join
from trainer.loop import train
from trainer.step import Step, train_step


def stop_in(steps: int) -> None:
    """Send this process a SIGTERM in a step; 0: in none. Ranks ask after every step."""
    trainer.stop.ASK_S = 0
    taken: list[int] = []

    def counted(*args: Any, **kwargs: Any) -> Step:
        taken.append(1)
        if len(taken) == steps:
            os.kill(os.getpid(), signal.SIGTERM)
        return train_step(*args, **kwargs)

    trainer.loop.train_step = counted  # type: ignore[attr-defined]


def main() -> None:
    directory, config = Path(sys.argv[1]), Path(sys.argv[2])
    reports = []
    # One group for all runs: making it takes longer than most of them.
    with join(device="cpu") as job:
        for case in sys.argv[3:]:
            given = case.split("|")
            stops = [override for override in given if override.startswith("stop=")]
            stop_in(int(stops[0].removeprefix("stop=")) if stops else 0)
            summary = train(load_config(config, [each for each in given if each not in stops]))
            reports.append({"steps": summary.progress.steps, "finished": summary.finished})
        rank = job.world.rank
    (directory / f"{rank}.json").write_text(json.dumps(reports))


if __name__ == "__main__":
    main()
