"""`tonari ablate`: train the cells of a study that are still missing, and report."""

import argparse
import difflib
import json
import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from tonari.errors import CommandError

if TYPE_CHECKING:
    from trainer.study_config import Cell, Study


def main(argv: list[str]) -> int:
    """Run the command.

    Args:
        argv: Its arguments, without the command's name.

    Returns:
        The exit status.

    Raises:
        ConfigError: If the study is wrong.
        CommandError: If an arm that was asked for is not in it, a training process failed, or the
            directory cannot be written.
    """
    given = _parser().parse_intermixed_args(argv)
    # Only now: `--help` and wrong arguments should not wait for torch.
    from trainer.study_config import load_study

    overrides = [*given.overrides, *([f"study.seeds={given.seeds}"] if given.seeds else [])]
    study = load_study(given.study, overrides, full=given.full)
    command = shlex.join(["tonari", "ablate", *argv])
    cells = _asked(study, given.only)
    try:
        return _train_and_report(given, argv, study, cells, command)
    except OSError as error:
        raise CommandError(
            f"--out {given.out}: {error}; the cells that are there are whole: free some space or "
            "name a directory that can be written, and the same command goes on"
        ) from error


def _train_and_report(
    given: argparse.Namespace,
    argv: Sequence[str],
    study: "Study",
    cells: "Sequence[Cell]",
    command: str,
) -> int:
    from tonari.ablate_cells import read_cells, train_in_processes, train_missing
    from tonari.ablate_report import markdown, write_report

    if given.part:
        part = int(given.part)
        share = cells[part :: given.jobs]
        train_missing(study, share, given.out, command=given.command, is_part=True)
        return 0
    if given.jobs == 1:
        train_missing(study, cells, given.out, command=command)
    else:
        train_in_processes(argv, given.jobs, command=command)
    document = write_report(given.out / "report", study, read_cells(study, given.out), command)
    if given.json:
        print(json.dumps(document))
    else:
        print(markdown(document))
        print(f"table and plot: {given.out / 'report'}")
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="tonari ablate",
        description="Train every arm of a study with every seed, and compare the arms, paired by "
        "seed. A cell (an arm and a seed) that has its file in the directory is not trained again, "
        "so the same command goes on after a kill; a changed setting makes other cells.",
    )
    parser.add_argument("study", type=Path, metavar="STUDY.toml")
    parser.add_argument(
        "overrides", nargs="*", metavar="SECTION.KEY=VALUE",
        help="instead of the file's, such as settings.epochs=3 data.train=shards/train.parquet",
    )  # fmt: skip
    parser.add_argument(
        "--out", type=Path, required=True, metavar="DIR", help="for the cells and the report"
    )
    parser.add_argument(
        "--jobs", type=_count, default=1, metavar="N", help="cells trained at once (default: 1)"
    )
    parser.add_argument(
        "--only", action="append", default=[], metavar="ARM",
        help="train only this arm's cells; may be given several times",
    )  # fmt: skip
    parser.add_argument(
        "--seeds", type=_count, metavar="K", help="instead of the file's number of seeds"
    )
    parser.add_argument(
        "--full", action="store_true", help="apply the file's tables under [full] too"
    )
    parser.add_argument(
        "--json", action="store_true", help="print one JSON document, nothing else on stdout"
    )
    # How the processes of --jobs are told their share
    parser.add_argument("--part", help=argparse.SUPPRESS)
    parser.add_argument("--command", help=argparse.SUPPRESS)
    return parser


def _count(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is no whole number >= 1")
    return int(text)


def _asked(study: "Study", only: Sequence[str]) -> "list[Cell]":
    names = [arm.name for arm in study.arms]
    for name in only:
        if name not in names:
            near = difflib.get_close_matches(name, names, n=1, cutoff=0)[0]
            raise CommandError(
                f"--only {name!r} is no arm of the study, expected one of "
                f"{', '.join(map(repr, names))}; did you mean {near!r}?"
            )
    return [cell for cell in study.cells() if not only or cell.arm.name in only]
