"""Row 2: what does the trainer cost beside a bare loop, and does compiling issue less?

`benchmarks.studies.trainer_loop` runs whole trainings beside its bare loops. ``copies`` has the
same arithmetic and the same optimizer as the trainer, ``bare`` takes autocast in its place. The
cases of issuing take steps on one batch that lies on the card: what Python issues slower than the
card computes is waited for.
"""

from collections.abc import Sequence
from dataclasses import replace
from functools import partial

from benchmarks.gpu.jobs import (
    REPEATS,
    WARM_UP,
    compare_steps,
    make_config,
    small_pictures,
    with_text,
)
from benchmarks.gpu.row import Case, Goal, Setting, Ways
from benchmarks.studies import trainer_loop
from dataio.job.launch import join

QUESTION = "The trainer beside a bare loop, compiled and not; what issuing a step takes"

MODELS = ("gpt", "resnet50", "vit_b", "resnet20")
BATCH_SIZES = {"vit_b": 128}
NUM_STEPS = {"resnet20": 64}
"""Of an epoch, where not 24."""


def cases(setting: Setting) -> Sequence[Case]:
    """List the models as they are, what issuing takes, and the models compiled."""
    same = tuple(
        Goal(f"trainer beside {way}", "wall_ratio", most=1.01) for way in ("copies", "bare")
    )
    no_more = tuple(Goal("compiled", figure, most=1.0) for figure in ("issue_ratio", "step_ratio"))
    issued = [
        Case(f"issuing {model}", partial(issue, setting, model), no_more)
        for model in ("gpt", "resnet50")
    ]
    compiled = [
        Case(f"{model}, compiled", partial(measure, setting, model, compiled_by(setting)), same[1:])
        for model in MODELS[:3]
    ]
    plain = [Case(model, partial(measure, setting, model), same) for model in MODELS]
    return [*plain, *issued, *compiled]


def measure(setting: Setting, model: str, *overrides: str) -> Ways:
    """Run a training beside the bare loops."""
    repeats, own = (1 if setting.tiny else REPEATS), setting.work / f"trainer-{model}"
    own.mkdir(exist_ok=True)
    config = make_config(
        model, setting, f"run.epochs={repeats + WARM_UP}", f'data.cache="{own / "cache"}"',
        f'run.directory="{own / "run"}"', *overrides,
    )  # fmt: skip
    if model in BATCH_SIZES and not setting.tiny:
        config = replace(config, data=replace(config.data, batch_size=BATCH_SIZES[model]))
    num_steps = NUM_STEPS.get(model, 24)
    if config.data.kind == "text":
        config = with_text(config, setting, num_steps=num_steps)
    else:
        # Small, so that decoding takes little beside the model.
        source = small_pictures(setting, num_larger=num_steps * config.data.batch_size // 64)
        config = replace(config, data=replace(config.data, train=str(source)))
    with join(device=setting.device) as job:
        found = trainer_loop.measure(config, job, own)
    ways = {}
    for way in ("copies", "bare", "memory"):
        if f"wall_ratio_to_{way}" in found:
            figures = {
                "step_ms": found["trainer_step_ms"],
                "other_step_ms": found[f"{way}_step_ms"],
                "wall_ratio": found[f"wall_ratio_to_{way}"],
                "cpu_ratio": found[f"cpu_ratio_to_{way}"],
                "idle_fraction": found.get("gpu_idle_fraction"),
            }
            ways[f"trainer beside {way}"] = {
                name: value for name, value in figures.items() if isinstance(value, float)
            }
    return ways


def issue(setting: Setting, model: str) -> Ways:
    """Compare steps as they are with compiled ones."""
    configs = {
        "as it is": make_config(model, setting),
        "compiled": make_config(model, setting, compiled_by(setting)),
    }
    with join(device=setting.device) as job:
        return compare_steps(configs, job, tiny=setting.tiny, to="as it is")


def compiled_by(setting: Setting) -> str:
    """Name the setting; a compiler would take minutes of what is to take seconds."""
    return f"mesh.compile={'false' if setting.tiny else 'true'}"
