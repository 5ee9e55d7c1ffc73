"""`tonari rehearse`: whether a long run ends in time, while its nodes fail."""

import argparse
import json
import math
import shlex
from pathlib import Path

from tonari.outputs import check_page
from tonari.report.units import span
from tonari.sizes import parse_duration_s
from tonari.terminal import show, wrote

ASSUMED_S = {"queue": 600.0, "start": 120.0, "ending": 300.0, "signal": 300.0, "live": 10.0}
"""In place of what is not given; Slurm by itself takes 300 s to give a node up."""


def main(argv: list[str]) -> int:
    """Run the command.

    Args:
        argv: Its arguments, without the command's name.

    Returns:
        The exit status.

    Raises:
        CommandError: If a time is neither given nor planned.
        ConfigError: If the settings are wrong, or the plan is of others.
    """
    parser = _parser()
    given = parser.parse_intermixed_args(argv)
    for name in ("nodes", "days", "runs", "mtbf", "epoch", "checkpoint"):
        value = getattr(given, name)
        if value is not None and not 0 < (min(value) if name == "checkpoint" else value) < math.inf:
            parser.error(f"--{name}: expected more than 0")
    if not 0 <= given.disk_full < 1:
        parser.error(f"--disk-full is {given.disk_full:g}, expected a chance in [0, 1)")
    check_page("--report", given.report)
    from tonari.rehearse.inputs import make_run
    from tonari.rehearse.report import document, page, rehearse, words
    from tonari.trainer.config.config import load_config

    run, intervals_s, assumed = make_run(
        given, load_config(given.config, given.overrides), assumed_s=ASSUMED_S
    )
    made = rehearse(run, intervals_s, assumed, runs=given.runs, seed=given.seed)
    if given.report:
        given.report.write_text(page(made, shlex.join(["tonari", "rehearse", *argv])))
    if given.json:
        print(json.dumps(document(made), indent=1))
    else:
        show([*words(made), *wrote(given.report)])
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="tonari rehearse",
        description="Say whether a long run ends in time, while its nodes fail: many rehearsals of "
        "it in virtual time, each with failures of its own. A job that loses a node ends, waits in "
        "the queue, starts again, and trains again what no checkpoint holds. The answer has the "
        "day on which the run ends, the hours that are lost, the best interval between "
        "checkpoints, and what going on live would gain. "
        "Example: tonari rehearse run.toml --plan plan.json --days 30 --mtbf 2000h. "
        "Lengths of time are such as 90s, 10m, 24h or 7d. More: docs/rehearse.md.",
    )
    parser.add_argument("config", type=Path, metavar="CONFIG.toml", help="as of tonari train")
    parser.add_argument(
        "overrides", nargs="*", metavar="SECTION.KEY=VALUE", help="such as run.epochs=90"
    )
    add = parser.add_argument
    add("--days", type=float, required=True, metavar="D", help="days in which the run is to end")
    _add_time(parser, "mtbf", "mean time between failures of one node", required=True)
    add("--nodes", type=int, metavar="N", help="nodes of the job (default: those of --plan)")
    add("--plan", type=Path, metavar="FILE", help="what tonari plan --json printed of this run")
    planned = "(default: of --plan)"
    _add_time(parser, "epoch", f"an epoch without its checkpoints {planned}")
    _add_time(parser, "staging", f"filling the caches {planned}")
    _add_time(parser, "checkpoint-cost", f"for which training waits for a checkpoint {planned}")
    _add_time(parser, "reload", "reading a checkpoint (default: as long as --checkpoint-cost)")
    _add_time(
        parser, "checkpoint", "training from one checkpoint to the next (default: as in the file); "
        "of several, the first is that of the run, and the others are compared", nargs="+",
    )  # fmt: skip
    for name, words in {
        "queue": "waiting for nodes, at each start",
        "start": "from the end of the queue until rows are staged, or found",
        "ending": "from a failure until the job has ended",
        "signal": "before the time limit, when the job begins a checkpoint and ends; 0s: it is "
        "killed at the limit",
        "live": "for which training stops when a node is lost, if the others go on live",
    }.items():
        _add_time(parser, name, f"{words} (default: {span(ASSUMED_S[name])})")
    _add_time(parser, "time-limit", "of a job, which is then queued again (default: none)")
    add(
        "--disk-full", type=float, default=0.0, metavar="P",
        help="chance of a start to find a disk full, which ends it (default: 0)",
    )  # fmt: skip
    add(
        "--empty-disks", action="store_true",
        help="disks of nodes are emptied between jobs, so that each start fills the caches",
    )  # fmt: skip
    add("--runs", type=int, default=200, metavar="N", help="rehearsals (default: 200)")
    add("--seed", type=int, default=0, metavar="S", help="of the failures (default: 0)")
    add(
        "--report", type=Path, metavar="FILE.html",
        help="write all of it as one page, with one run's progress (needs tonari[report])",
    )  # fmt: skip
    add("--json", action="store_true", help="one JSON document instead of tables")
    return parser


def _add_time(
    parser: argparse.ArgumentParser,
    name: str,
    words: str,
    *,
    required: bool = False,
    nargs: str | None = None,
) -> None:
    parser.add_argument(
        f"--{name}", type=_seconds, required=required, nargs=nargs, metavar="TIME", help=words
    )


def _seconds(text: str) -> float:
    try:
        return parse_duration_s(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from error
