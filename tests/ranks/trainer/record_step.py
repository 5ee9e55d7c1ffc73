"""Steps on each rank of a real job, recorded operator by operator.

Arguments: report directory, settings, overrides of each case as JSON.
"""

import json
import sys
from pathlib import Path

from dataio.job.launch import Job, join
from tonari.oracle import Recorder
from tonari.oracle.trace import NoReports, make_batch
from tonari.trainer.config.config import Config, load_config
from tonari.trainer.run.build import build_parallel
from tonari.trainer.run.optimizers import build_optimizer
from tonari.trainer.run.own import own_of
from tonari.trainer.run.step import train_step


def main() -> None:
    out, settings, cases = sys.argv[1:]
    with join(device="cpu", timeout_s=60) as job:
        events, sent_bytes = zip(
            *(
                _record(load_config(Path(settings), overrides), job)
                for overrides in json.loads(cases)
            ),
            strict=True,
        )
        report = {"events": events, "sent_bytes": sent_bytes}
        Path(out, f"{job.world.rank}.json").write_text(json.dumps(report))


def _record(config: Config, job: Job) -> tuple[list[str], int]:
    """Make three steps: the events of the last, and the bytes that tiles counted as sent."""
    own = own_of(config)
    parallel = build_parallel(config, job, own)
    pipeline = parallel.pipeline
    optimizer = build_optimizer(config.optimizer, pipeline.parameters())
    batch = make_batch(config, own, parallel.task, pipeline.place)
    recorder = Recorder()
    grid, before = getattr(parallel.task, "_grid", None), 0
    for number in range(3):
        recorder.mark()
        before = grid.sent_bytes if grid else 0
        with recorder:
            train_step(
                pipeline, optimizer, NoReports(), [batch], clip=config.optimizer.clip, step=number
            )
    return [repr(event) for event in recorder.events], grid.sent_bytes - before if grid else 0


if __name__ == "__main__":
    main()
