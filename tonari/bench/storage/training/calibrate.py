"""Measure the step of the user's own model, to emulate it while storage is measured."""

import runpy
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch

from dataio import World
from tonari.bench.errors import BenchError

Step = Callable[[], object]

WARM_UP = 3
REPEATS = 10
LONGEST_S = 60.0
"""Enough has been seen after this time, however few steps it was."""


def calibrate(script: Path, batch_size: int, *, world: World) -> float:
    """Measure the seconds of a step, the same on every rank: the slowest rank's median. Collective.

    Runs the user's program.

    Args:
        script: Defines ``make_step(batch_size)``, which returns a function that does one step on
            made-up samples: forward, backward, update.
        batch_size: Of a rank.
        world: All ranks.

    Raises:
        BenchError: If the script cannot be run, defines no such function, or a step fails.
    """
    took_s = _median_step(load_step(script, batch_size), script)
    slowest = world.allreduce(np.array([took_s]), op="max", doing="agree on the step's time")
    return float(slowest[0])


def load_step(script: Path, batch_size: int) -> Step:
    """Run a script and let it make its step.

    Raises:
        BenchError: See `calibrate`.
    """
    if not script.is_file():
        raise _refused(script, "found no such file")
    try:
        make_step = runpy.run_path(str(script)).get("make_step")
        step = make_step(batch_size) if callable(make_step) else None
    except Exception as error:
        raise _refused(script, f"running it failed: {type(error).__name__}: {error}") from error
    if not callable(make_step):
        raise _refused(script, "it defines no function make_step")
    if not callable(step):
        raise _refused(script, f"make_step({batch_size}) returned {type(step).__name__}")
    made: Step = step
    return made


def _median_step(step: Step, script: Path) -> float:
    took_s: list[float] = []
    began = time.perf_counter()
    try:
        for repeat in range(WARM_UP + REPEATS):
            started = time.perf_counter()
            step()
            # A step that was only queued on a device has not been taken.
            if torch.cuda.is_available():
                torch.cuda.synchronize()
            ended = time.perf_counter()
            took_s.append(ended - started)
            if ended - began > LONGEST_S and repeat >= WARM_UP:
                break
    except Exception as error:
        problem = f"step {len(took_s)} failed: {type(error).__name__}: {error}"
        raise _refused(script, problem) from error
    return statistics.median(took_s[WARM_UP:])


def _refused(script: Path, found: str) -> BenchError:
    return BenchError(
        f"{script}: {found}; expected a program with a function make_step(batch_size) that returns "
        "a function for one training step: write one, or give the step's time by --step-ms"
    )
