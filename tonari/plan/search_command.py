"""`tonari search`: the fastest meshes of a job on a cluster that a file describes."""

import argparse
import gc
import json
import shlex
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

from tonari.names import EXAMPLES
from tonari.outputs import check_output, check_report
from tonari.plan.options import add_outputs, fraction, settings
from tonari.plan.picture import search_bars
from tonari.terminal import show, wrote

if TYPE_CHECKING:
    from tonari.oracle.search.search import Plans
    from tonari.trainer.config.config import Config


def main(argv: list[str]) -> int:
    """Run the command.

    Args:
        argv: Its arguments, without the command's name.

    Returns:
        The exit status.

    Raises:
        ConfigError: If the settings are wrong.
        OracleError: If the cluster's file is wrong or lacks what a search needs, or nothing fits.
    """
    given = _parser().parse_intermixed_args(argv)
    check_output("--picture", given.picture)
    check_report("--report", given.report)
    gc.disable()  # a tenth of the time or more, for 3 % of the memory: what is made stays
    from tonari.trainer.config.config import load_config

    config = load_config(given.config, given.overrides)
    try:
        found = _search(given, config)
    finally:
        gc.enable()
    from tonari.plan.search import search_words

    if given.picture:
        given.picture.write_text(search_bars(found).svg())
    if given.report:
        from tonari.plan.report import search_page

        command = shlex.join(["tonari", "search", *argv])
        given.report.write_text(search_page(found, config, command))
    if given.json:
        print(json.dumps(asdict(found), indent=1))
    else:
        show([*search_words(found, config), *wrote(given.picture, given.report)])
    return 0


def _search(given: argparse.Namespace, config: "Config") -> "Plans":
    from tonari.oracle.cluster.cluster import load_cluster
    from tonari.oracle.search.search import search
    from tonari.plan.search import data_choices

    cluster = load_cluster(given.cluster)
    words = given.data
    if given.probe is None and (given.tries or given.hidden):
        words = words or "files"
    epochs = data_choices(
        given.config, given.overrides, cluster, world_size=given.world, words=words,
        probe=given.probe, tries=given.tries or [()], hidden_fractions=given.hidden or [0.0],
    ) if words or given.probe else []  # fmt: skip
    return search(
        config, cluster, world_size=given.world, global_batch_size=given.global_batch,
        epochs=epochs,
    )  # fmt: skip


def _machine_file(text: str) -> Path:
    path = Path(text)
    if path.suffix == ".json":
        raise argparse.ArgumentTypeError(
            f"{path} is a probe, and a search prices computation by the [device] of a machine's "
            f"file; give a file such as {EXAMPLES / 'clusters/h100.toml'}"
        )
    return path


def _at_least_one(text: str) -> int:
    number = int(text) if text.isdecimal() else 0
    if number < 1:
        raise argparse.ArgumentTypeError(f"{text}, expected a number >= 1")
    return number


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="tonari search",
        description="List the ten fastest meshes, schedules and ways of recomputation that fit "
        "into memory, without a probe: a step of every legal configuration is priced by equations, "
        "for a cluster whose file describes what a rank computes on.",
    )
    parser.add_argument("config", type=Path, metavar="CONFIG.toml", help="as of tonari train")
    parser.add_argument(
        "overrides", nargs="*", metavar="SECTION.KEY=VALUE", help="settings of all configurations"
    )
    parser.add_argument(
        "--cluster", type=_machine_file, required=True, metavar="FILE",
        help=f"the nodes and what joins them, such as {EXAMPLES / 'clusters/h100.toml'}",
    )  # fmt: skip
    parser.add_argument(
        "--world", type=_at_least_one, required=True, metavar="N", help="ranks of the job"
    )
    parser.add_argument(
        "--global-batch", type=_at_least_one, metavar="ROWS",
        help="rows of a step, kept the same (default: those of CONFIG.toml on N ranks)",
    )  # fmt: skip
    data = parser.add_mutually_exclusive_group()
    data.add_argument(
        "--data", metavar="ROWSxBYTES",
        help="price whole epochs, of so many rows, such as 1281167x110KB; or \"files\" to count "
        "those of CONFIG.toml (default: a step; with --try or --hidden, \"files\")",
    )  # fmt: skip
    data.add_argument(
        "--probe", type=Path, metavar="FILE",
        help="price whole epochs, of the data that this probe timed",
    )  # fmt: skip
    parser.add_argument(
        "--try", dest="tries", type=settings, action="append", metavar="'KEY=VALUE ...'",
        help="settings of the data to choose among, such as "
        "'shuffle.exchange=0.1 data.cache.quota=1GB'; give it once for each",
    )  # fmt: skip
    parser.add_argument(
        "--hidden", type=fraction, action="append", metavar="F",
        help="share of the rows that an epoch leaves out (default: 0); give it once for each share "
        "to choose among",
    )  # fmt: skip
    add_outputs(parser, picture="a step, or an epoch, of each of the ten")
    return parser
