"""A step on each rank of a real job, recorded operator by operator."""

import json
import sys
from pathlib import Path

from oracle import Recorder
from oracle.trace import NoReports, make_batch
from trainer.config.config import load_config
from trainer.run.build import build_parallel
from trainer.run.optimizers import build_optimizer
from trainer.run.own import Own
from trainer.run.step import train_step
from trainer.watch.launch import join


def main() -> None:
    out, settings, *overrides = sys.argv[1:]
    config = load_config(Path(settings), overrides)
    with join(device="cpu", timeout_s=60) as job:
        parallel = build_parallel(config, job)
        pipeline = parallel.pipeline
        optimizer = build_optimizer(config.optimizer, pipeline.parameters())
        batch = make_batch(config, Own(), parallel.task, pipeline.place)
        recorder = Recorder()
        for number in range(3):
            recorder.mark()
            with recorder:
                train_step(
                    pipeline, optimizer, NoReports(), [batch], clip=config.optimizer.clip,
                    step=number,
                )  # fmt: skip
        report = {"events": [repr(event) for event in recorder.events]}
        Path(out, f"{job.world.rank}.json").write_text(json.dumps(report))


if __name__ == "__main__":
    main()
