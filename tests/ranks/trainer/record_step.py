"""A step on each rank of a real job: what is recorded, and what the allocator counted."""

import json
import sys
from pathlib import Path

from torch.profiler import ProfilerActivity, profile, record_function

from oracle import Recorder
from oracle.trace import _Silent, make_batch
from trainer.config.config import load_config
from trainer.run.build import build_parallel
from trainer.run.optimizers import build_optimizer
from trainer.run.own import Own
from trainer.run.step import train_step
from trainer.watch.launch import join


def main() -> None:
    out, settings, *given = sys.argv[1:]
    config = load_config(Path(settings), given)
    with join(device="cpu", timeout_s=60) as job:
        profiled = profile(activities=[ProfilerActivity.CPU], profile_memory=True)
        profiled.start()
        parallel = build_parallel(config, job)
        pipeline = parallel.pipeline
        optimizer = build_optimizer(config.optimizer, pipeline.parameters())
        batches = [make_batch(config, Own(), parallel.task, pipeline.place)]
        batches *= config.optimizer.accumulate

        def step(number: int) -> None:
            train_step(
                pipeline, optimizer, _Silent(), batches, clip=config.optimizer.clip, step=number
            )

        for number in range(2):
            step(number)
        with record_function("measured"):
            step(2)
        profiled.stop()
        recorder = Recorder()
        with recorder:
            step(3)
        report = {
            "events": [repr(event) for event in recorder.events],
            "peak_bytes": _peak(profiled) - sum(v.nbytes for v in batches[0].values()),
        }
        Path(out, f"{job.world.rank}.json").write_text(json.dumps(report))


def _peak(profiled):
    """The most bytes at a time that torch's allocator had given out, in the measured step."""
    events = profiled.profiler.kineto_results.events()
    began = next(e.start_ns() for e in events if e.name() == "measured")
    now = most = 0
    for event in sorted(events, key=lambda e: e.start_ns()):
        if event.name() == "[memory]":
            now += event.nbytes()
            most = max(most, now) if event.start_ns() >= began else now
    return most


if __name__ == "__main__":
    main()
