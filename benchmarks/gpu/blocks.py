"""Row 5: what do swapped blocks, offloaded parameters and checkpoints keep a GPU waiting for?

Swapping is held against keeping all activations and against computing all blocks again, by the time
of a step and its most memory. Offloading keeps parameters on the host. Trainings that write a
checkpoint each epoch, while they wait or in the background, take turns.
"""

import shutil
import statistics
from collections.abc import Mapping, Sequence
from functools import partial

from benchmarks.gpu.jobs import compare_steps, make_config, with_text
from benchmarks.gpu.row import Case, Goal, Setting, Ways
from dataio.job.launch import join
from tonari.trainer.run.loop import train
from tonari.trainer.watch.metrics import Line

QUESTION = "Swapped blocks, offloaded parameters, checkpoints: what they cost"

KEPT = "all kept"
SWAPPED = {
    KEPT: (),
    "all computed again": ("mesh.checkpointing=full",),
    "3 of 12 swapped": ("mesh.swap_blocks=3",),
    "6 of 12 swapped": ("mesh.swap_blocks=6",),
}
OFFLOADED = {
    KEPT: ("mesh.dtype=float32",),
    "offloaded": ("mesh.dtype=float32", "mesh.offload=true"),
}
WAITED, BEHIND = "waited for", "in the background"
EPOCHS, STEPS = 4, 40


def cases(setting: Setting) -> Sequence[Case]:
    """List what waits on the host, and checkpoints."""
    goals = (
        Goal("3 of 12 swapped", "step_ratio", most=1.02),
        Goal("6 of 12 swapped", "step_ratio", most=1.1),
    )
    waits = (Goal(BEHIND, "wait_ratio", most=0.5),)
    return [
        Case("gpt, swapped", partial(compare, setting, "gpt", SWAPPED), goals),
        Case("vit_b, swapped", partial(compare, setting, "vit_b", SWAPPED), goals),
        Case("gpt, offloaded", partial(compare, setting, "gpt", OFFLOADED)),
        Case("gpt, checkpoints", partial(write, setting), waits),
    ]


def compare(setting: Setting, model: str, given: Mapping[str, tuple[str, ...]]) -> Ways:
    """Compare steps of a job by these settings; blocks swap on a GPU alone."""
    configs = {
        way: make_config(model, setting, *overrides)
        for way, overrides in given.items()
        if setting.device == "cuda" or "swapped" not in way
    }
    with join(device=setting.device) as job:
        return compare_steps(configs, job, tiny=setting.tiny, to=KEPT)


def write(setting: Setting) -> Ways:
    """Train with a checkpoint each epoch: what an epoch waits for one, and its steps take."""
    num_steps = 2 if setting.tiny else STEPS
    lines: dict[str, list[Line]] = {WAITED: [], BEHIND: []}
    for _ in range(1 if setting.tiny else 2):
        for way, found in lines.items():
            directory = setting.work / "checkpoints"
            shutil.rmtree(directory, ignore_errors=True)
            config = make_config(
                "gpt", setting, f"run.checkpoint_async={'true' if way == BEHIND else 'false'}",
                "run.checkpoint_epochs=1", f"run.epochs={EPOCHS}",
                f'run.directory="{directory / "run"}"', f'data.cache="{directory / "cache"}"',
            )  # fmt: skip
            config = with_text(config, setting, num_steps=num_steps)
            epochs: list[Line] = []
            train(config, resume="never", on_epoch=epochs.append, quiet=True)
            found += epochs[1:]  # the first waits for no checkpoint
    wait_s = {way: _median(found, "checkpoint_s") for way, found in lines.items()}
    return {
        way: {
            "wait_ms": 1e3 * wait_s[way],
            "wait_ratio": wait_s[way] / wait_s[WAITED],
            "step_ms": 1e3 * _median(found, "train_s") / num_steps,
        } for way, found in lines.items()
    }  # fmt: skip


def _median(lines: Sequence[Line], name: str) -> float:
    return statistics.median(float(line[name] or 0) for line in lines)
