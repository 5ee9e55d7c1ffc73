"""`tonari plan`: the time and memory of a job's step, before the job runs."""

import argparse
import json
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

from tonari.outputs import check_output
from tonari.sizes import format_bytes

if TYPE_CHECKING:
    from oracle.plan import StepPlan


def main(argv: list[str]) -> int:
    """Run the command.

    Args:
        argv: Its arguments, without the command's name.

    Returns:
        The exit status.

    Raises:
        ConfigError: If the settings are wrong, or the probe is of others.
    """
    given = _parser().parse_intermixed_args(argv)
    check_output("--timeline", given.timeline)
    from oracle.plan import plan_step, timeline
    from oracle.probe.probe import load_probe
    from trainer.config.config import load_config

    config = load_config(given.config, given.overrides)
    planned = plan_step(config, load_probe(given.probe))
    if given.timeline:
        given.timeline.write_text(json.dumps(timeline(planned.simulation)))
    if given.json:
        document = {k: v for k, v in asdict(planned).items() if k != "simulation"}
        print(json.dumps(document, indent=1))
    else:
        print("\n".join(_words(planned)))
    return 0


def _words(planned: "StepPlan") -> list[str]:
    lines = [
        f"a step: {planned.step_s:.3f} s ({planned.low_s:.3f} to {planned.high_s:.3f}), "
        f"{planned.samples_per_s:,.1f} samples a second, without loading data",
        "",
    ]
    for name, seconds in sorted(planned.parts_s.items(), key=lambda part: -part[1]):
        words = "computing" if name == "compute" else f"waiting: {name.replace('_', '-')}"
        lines.append(f"  {words:24} {seconds:8.3f} s  {seconds / planned.step_s:6.1%}")
    peaks = ", ".join(map(format_bytes, planned.peak_bytes))
    memory = peaks or f"not known: {planned.untraced}"
    return [*lines, "", f"most memory of tensors a rank, by coordinate of pp: {memory}"]


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="tonari plan",
        description="Say what a step of a job takes, and where the time goes: its ranks, as "
        "`tonari probe` timed them, are simulated event by event. So far of one node, and without "
        "the loader.",
    )
    parser.add_argument("config", type=Path, metavar="CONFIG.toml", help="as of tonari train")
    parser.add_argument(
        "overrides", nargs="*", metavar="SECTION.KEY=VALUE", help="those of the probe"
    )
    parser.add_argument(
        "--probe", type=Path, required=True, metavar="FILE", help="what tonari probe wrote"
    )
    parser.add_argument(
        "--timeline", type=Path, metavar="FILE",
        help="write three steps of all ranks for https://ui.perfetto.dev",
    )  # fmt: skip
    parser.add_argument("--json", action="store_true", help="one JSON document instead of tables")
    return parser
