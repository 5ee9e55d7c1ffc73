"""What a long run takes: of its settings, of a plan, of options, and of what is assumed."""

import argparse
import math
from collections.abc import Mapping
from typing import Any

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
    work_s, times_s = _planned(given, plan)
    nodes, assumed = plan.num_nodes if plan else given.nodes, []
    if times_s["checkpoint_cost"] is None and config.run.checkpoint_async:
        times_s["checkpoint_cost"] = 0.0
        assumed.append("--checkpoint-cost 0 s, as the file has run.checkpoint_async=true")
    needed = {"nodes": nodes, "epoch": work_s[STEPS], **times_s}
    if missing := [name for name, value in needed.items() if value is None]:
        names = ", ".join(f"--{name.replace('_', '-')}" for name in missing)
        by_plan = "" if plan else (
            ", or --plan FILE, which `tonari plan CONFIG.toml --probe FILE --json > FILE` writes"
        )  # fmt: skip
        it = "it" if len(missing) == 1 else "them"
        raise CommandError(f"{names}: not known; give {it}{by_plan}")
    for name, seconds in {**assumed_s, "reload": times_s["checkpoint_cost"]}.items():
        times_s[name] = getattr(given, name)
        if times_s[name] is None:
            times_s[name] = seconds
            assumed.append(f"--{name} {span(seconds)}")
    limit_s = math.inf if given.time_limit is None else given.time_limit
    if limit_s <= times_s["signal"]:
        raise CommandError(
            f"--time-limit is {span(limit_s)}, expected more than --signal, "
            f"{span(times_s['signal'])}; give a longer limit, or a shorter --signal"
        )
    epochs, intervals_s = _length(given, config, plan, sum(work_s.values()))
    run = LongRun(
        work_s={name: epochs * seconds for name, seconds in work_s.items()},
        days=given.days, nodes=nodes, mtbf_s=given.mtbf, interval_s=intervals_s[0],
        checkpoint_s=times_s["checkpoint_cost"], reload_s=times_s["reload"],
        start_s=times_s["start"], staging_s=times_s["staging"],
        keeps_caches=not given.empty_disks, queue_s=times_s["queue"],
        ending_s=times_s["ending"], limit_s=limit_s, signal_s=times_s["signal"],
        full_fraction=given.disk_full, live_s=times_s["live"],
    )  # fmt: skip
    return run, intervals_s, assumed


def _planned(given: argparse.Namespace, plan: Plan | None) -> tuple[dict[str, Any], dict[str, Any]]:
    """Find an epoch's parts without its checkpoints, and what else a plan says; None: unknown."""
    times_s = {"staging": given.staging, "checkpoint_cost": given.checkpoint_cost}
    if plan is None:
        return {STEPS: given.epoch}, times_s
    if given.staging is None:
        times_s["staging"] = plan.staging_s + plan.late_rows_s
    if given.checkpoint_cost is None:
        times_s["checkpoint_cost"] = plan.mean_s["checkpoint_s"] * plan.checkpoint_every or None
    if given.epoch:
        return {STEPS: given.epoch}, times_s
    steps_s = plan.mean_s["train_s"]
    others_s = sum(plan.mean_s.values()) - steps_s - plan.mean_s["checkpoint_s"]
    work_s = {STEPS: steps_s - plan.windows_s, QUOTA: plan.windows_s, OTHERS: others_s}
    return work_s, times_s


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
