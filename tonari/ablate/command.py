"""`tonari ablate`: train the cells of a study that are still missing, and report."""

import argparse
import difflib
import fnmatch
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from dataio.base.location import shown
from tonari.errors import CommandError

if TYPE_CHECKING:
    from tonari.ablate.study import Cell, Study


def main(argv: list[str]) -> int:
    """Run the command.

    Args:
        argv: Its arguments, without the command's name.

    Returns:
        The exit status: 1 if a cell failed, 130 or 143 if a signal ended it.

    Raises:
        ConfigError: If the study is wrong.
        CommandError: If an arm that was asked for is not in it, nothing can be trained, or the
            directory cannot be written.
    """
    parser = _parser()
    given = parser.parse_intermixed_args(_joined(argv))
    if given.out is None and not given.list:
        parser.error("the following arguments are required: --out")
    if given.dry_run and not given.slurm:
        parser.error("--dry-run shows what --slurm would submit; give both")
    # Only now: `--help` and wrong arguments should not wait for torch.
    from tonari.ablate.call import Call, unwritable
    from tonari.ablate.study import load_study

    overrides = [*given.overrides, *([f"study.seeds={given.seeds}"] if given.seeds else [])]
    study = load_study(given.study, overrides, full=given.full)
    # It is kept with each cell, and in the report.
    command = given.command or shown(shlex.join(["tonari", "ablate", *argv]))
    cells = _asked(study, given.only)
    data = [cell.arm.config(cell.seed).data for cell in cells]
    if any(each.test and each.test == each.train for each in data):
        print(
            "data.test is data.train: arms are judged by what they trained on; give others",
            file=sys.stderr,
        )
    if given.list:
        print(_list_text(cells))
        return 0
    if given.out.exists() and not given.out.is_dir():
        raise CommandError(f"--out {given.out}: is a file, expected a directory; name another")
    try:
        return Call(given, study, cells, command).run()
    except OSError as error:
        raise unwritable(given.out, error) from error


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="tonari ablate",
        description="Train every arm of a study with every seed, each a run of `tonari train`, and "
        "compare the arms, paired by seed. A cell (an arm and a seed) that has its file in the "
        "directory is not trained again, and one that was stopped goes on from its checkpoint, so "
        "the same command goes on after a kill; a changed setting makes other cells.",
    )
    parser.add_argument("study", type=Path, metavar="STUDY.toml")
    parser.add_argument(
        "overrides", nargs="*", metavar="SECTION.KEY=VALUE",
        help="of every arm, above the files, such as run.epochs=3 data.train=shards/train.parquet",
    )  # fmt: skip
    parser.add_argument("--out", type=Path, metavar="DIR", help="for the cells and the report")
    parser.add_argument(
        "--jobs", type=_jobs, metavar="N",
        help="cells trained at once; auto: one a physical core, or a GPU (default: 1; with "
        "--slurm, as many as Slurm lets run)",
    )  # fmt: skip
    parser.add_argument(
        "--only", action="append", default=[], metavar="ARM",
        help="train only this arm's cells, or those of all that a pattern fits, such as "
        "'full, *'; may be given several times",
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
    parser.add_argument("--list", action="store_true", help="list arms and cells, and end")
    parser.add_argument(
        "--status", action="store_true",
        help="say which cells are there, running, missing or failed and how long the rest takes, "
        "and end",
    )  # fmt: skip
    parser.add_argument(
        "--report-only", action="store_true", help="report what is there, training nothing"
    )
    slurm = parser.add_argument_group("as a Slurm array job")
    slurm.add_argument(
        "--slurm", action="store_true", help="submit the missing cells, and a job that reports"
    )
    slurm.add_argument(
        "--slurm-args", default="", metavar="ARGS",
        help='handed on to sbatch, such as "--partition=gpu --gres=gpu:1 --time=2:00:00"',
    )  # fmt: skip
    slurm.add_argument("--cells-per-task", type=_count, default=1, metavar="G", help="(default: 1)")
    slurm.add_argument(
        "--dry-run", action="store_true", help="show scripts and sbatch lines, submit nothing"
    )
    # What processes of --jobs, and tasks of an array, are started with
    parser.add_argument("--command", help=argparse.SUPPRESS)
    parser.add_argument("--worker", metavar="CALL", help=argparse.SUPPRESS)
    parser.add_argument("--task", type=int, help=argparse.SUPPRESS)
    return parser


def _count(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is no whole number >= 1")
    return int(text)


def _jobs(text: str) -> int | str:
    return text if text == "auto" else _count(text)


def _joined(argv: Sequence[str]) -> list[str]:
    """Let --slurm-args take a value that looks like a flag."""
    joined = [*argv]
    if "--slurm-args" in joined[:-1]:
        place = joined.index("--slurm-args")
        joined[place : place + 2] = [f"--slurm-args={joined[place + 1]}"]
    return joined


def _asked(study: "Study", only: Sequence[str]) -> "list[Cell]":
    names = [arm.name for arm in study.arms]
    wanted: set[str] = set()
    for name in only:
        meant = {name} & set(names) or set(fnmatch.filter(names, name))
        wanted |= meant
        if not meant:
            near = difflib.get_close_matches(name, names, n=1, cutoff=0)[0]
            raise CommandError(
                f"--only {name!r} is no arm of the study, expected one of "
                f"{', '.join(map(repr, names))}; did you mean {near!r}?"
            )
    return [cell for cell in study.cells() if not only or cell.arm.name in wanted]


def _list_text(cells: "Sequence[Cell]") -> str:
    width = max(len(cell.arm.name) for cell in cells)
    return "\n".join(
        f"{cell.arm.name:<{width}}  seed {cell.seed}  {cell.file_name}" for cell in cells
    )
