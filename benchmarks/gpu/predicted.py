"""Row 6: does the planner say what a job takes on a GPU, of time and of memory?

Memory is that of a trace on tensors without data beside the most that steps allocate. Time is that
of `tonari probe` and `tonari plan` beside the steps: both train the same job, one after the other,
by turns. A probe that refuses GPUs is the row's answer until it does not.
"""

import statistics
from collections.abc import Sequence
from functools import partial

from benchmarks.gpu.jobs import JobSteps, make_config
from benchmarks.gpu.row import Case, Goal, Setting, Ways
from dataio.job.launch import join
from tonari.oracle import trace_step
from tonari.oracle.machine import OneNode
from tonari.oracle.probe.probe import probe
from tonari.oracle.programs import programs
from tonari.oracle.simulate import simulate
from tonari.trainer.run.build import lay_out

QUESTION = "What a plan says of a job on a GPU beside what it takes"

MODELS = ("gpt", "vit_b", "resnet50")
VARIANTS = {
    "as it is": (),
    "float32": ("mesh.dtype=float32",),
    "computed again": ("mesh.checkpointing=full",),
}
NUM_STEPS, TURNS, SIMULATED_STEPS = 10, 3, 21


def cases(setting: Setting) -> Sequence[Case]:
    """List times and memory, by model."""
    times = (Goal("predicted", "error_fraction", most=0.1),)
    memory = tuple(Goal(name, "error_fraction", most=0.05) for name in VARIANTS)
    return [
        *(Case(f"{model}, time", partial(predict, setting, model), times) for model in MODELS),
        *(Case(f"{model}, memory", partial(trace, setting, model), memory) for model in MODELS),
    ]


def predict(setting: Setting, model: str) -> Ways:
    """Probe the job and train it by turns, then simulate a step."""
    config, num_steps = make_config(model, setting), 2 if setting.tiny else NUM_STEPS
    found, measured_s = [], []
    for _ in range(1 if setting.tiny else TURNS):
        found.append(probe(config, world_size=1, steps=num_steps, sizes=()))
        with join(device=setting.device) as job:
            steps = JobSteps(config, job)
            steps.take(2)
            measured_s.append(steps.take(num_steps)[0])
    sizes = lay_out(config, 1).sizes
    predicted_s = statistics.median(
        simulate(
            programs(each.steps, 1, sizes),
            OneNode(each.messages, each.slowdowns, cores=each.cores), steps=SIMULATED_STEPS,
        ).step_s for each in found
    )  # fmt: skip
    step_s = statistics.median(measured_s)
    return {
        "measured": {"step_ms": 1e3 * step_s},
        "predicted": {
            "step_ms": 1e3 * predicted_s, "error_fraction": abs(predicted_s / step_s - 1)
        },
    }  # fmt: skip


def trace(setting: Setting, model: str) -> Ways:
    """Trace a step of the job on nothing, then take some."""
    ways: Ways = {}
    for name, given in VARIANTS.items():
        config = make_config(model, setting, *given)
        traced = trace_step(config, world_size=1, rank=0).peak_bytes
        ways[name] = {"traced_bytes": traced}
        with join(device=setting.device) as job:
            steps = JobSteps(config, job)
            steps.take(3)
            if found := steps.peak_bytes:
                error = abs(traced / found - 1)
                ways[name] |= {"peak_bytes": found, "error_fraction": error}
    return ways
