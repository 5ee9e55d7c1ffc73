"""What a long run takes: of its settings, of a plan, of options, and of what is assumed."""

import argparse
import math
from collections.abc import Mapping

from tonari.errors import CommandError
from tonari.rehearse.model import LongRun
from tonari.report.units import span
from tonari.trainer.config.config import Config
from tonari.trainer.watch.plan import Plan, read_plan

STEPS, QUOTA, OTHERS = "steps", "waits for rows beyond the quota", "evaluation and epoch ends"


def make_run(
    given: argparse.Namespace, config: Config, *, assumed_s: Mapping[str, float]
) -> tuple[LongRun, list[float], list[str]]:
    """Put together what a run takes.

    Args:
        given: Options of the command; a time is None where it was not given.
        config: Settings of the run.
        assumed_s: In place of times that are not given.

    Returns:
        The run; the intervals between checkpoints that are asked for; what was assumed.

    Raises:
        CommandError: If a time is neither given nor planned, or the plan is of other nodes.
        ConfigError: If it is a plan of other settings, or none.
    """
    plan = read_plan(given.plan, config, None) if given.plan else None
    if plan and given.nodes not in (None, plan.num_nodes):
        raise CommandError(
            f"--nodes is {given.nodes}, and {given.plan} is a plan for {plan.num_nodes}; plan that "
            "many with `tonari plan --cluster FILE`, or leave --nodes out"
        )
    staging_s, checkpoint_s = given.staging, given.checkpoint_cost
    nodes = plan.num_nodes if plan else given.nodes
    work_s = {STEPS: given.epoch} if given.epoch or not plan else _epoch(plan)
    assumed = []
    if plan and staging_s is None:
        staging_s = plan.staging_s + plan.late_rows_s
    if plan and checkpoint_s is None:
        checkpoint_s = plan.mean_s["checkpoint_s"] * plan.checkpoint_every or None
    if checkpoint_s is None and config.run.checkpoint_async:
        checkpoint_s = 0.0
        assumed.append("--checkpoint-cost 0 s, as the file has run.checkpoint_async=true")
    needed = {
        "--nodes": nodes, "--epoch": work_s[STEPS], "--staging": staging_s,
        "--checkpoint-cost": checkpoint_s,
    }  # fmt: skip
    if missing := [name for name, value in needed.items() if value is None]:
        raise CommandError(
            f"{', '.join(missing)}: not known; give {'it' if len(missing) == 1 else 'them'}"
            + ("" if plan else ", or --plan FILE, which `tonari plan CONFIG.toml --probe FILE "
               "--json > FILE` writes")
        )  # fmt: skip
    others_s = {}
    for name, seconds in {**assumed_s, "reload": checkpoint_s}.items():
        others_s[f"{name}_s"] = getattr(given, name)
        if others_s[f"{name}_s"] is None:
            others_s[f"{name}_s"] = seconds
            assumed.append(f"--{name} {span(seconds)}")
    epochs, intervals_s = _length(given, config, plan, sum(work_s.values()))
    run = LongRun(
        work_s={name: epochs * seconds for name, seconds in work_s.items()},
        days=given.days, nodes=nodes, mtbf_s=given.mtbf, interval_s=intervals_s[0],
        checkpoint_s=checkpoint_s, staging_s=staging_s, keeps_caches=not given.empty_disks,
        limit_s=math.inf if given.time_limit is None else given.time_limit,
        full_fraction=given.disk_full, **others_s,
    )  # fmt: skip
    return run, intervals_s, assumed


def _epoch(plan: Plan) -> dict[str, float]:
    """Part what an epoch takes without its checkpoints."""
    steps_s = plan.mean_s["train_s"]
    others_s = sum(plan.mean_s.values()) - steps_s - plan.mean_s["checkpoint_s"]
    return {STEPS: steps_s - plan.windows_s, QUOTA: plan.windows_s, OTHERS: others_s}


def _length(
    given: argparse.Namespace, config: Config, plan: Plan | None, epoch_s: float
) -> tuple[float, list[float]]:
    """Find the epochs of a run, and the intervals between its checkpoints."""
    run, asked = config.run, given.checkpoint
    counts = ["max_tokens", *(() if plan else ("max_steps",))]
    if not asked:
        counts += ["checkpoint_tokens", *(() if plan else ("checkpoint_steps",))]
    for name in counts:
        if getattr(run, name):
            cure = "run.epochs" if name.startswith("max") else "--checkpoint TIME"
            raise CommandError(
                f"{given.config}: run.{name} is {getattr(run, name):,}, and how many an epoch has "
                f"is not known; set run.{name}=0 and give {cure}"
            )
    epochs, every = float(run.epochs), float(run.checkpoint_epochs or math.inf)
    if plan and run.max_steps:
        epochs = min(epochs, run.max_steps / plan.steps)
    if plan and run.checkpoint_steps:
        every = min(every, run.checkpoint_steps / plan.steps)
    return epochs, asked or [every * epoch_s]
