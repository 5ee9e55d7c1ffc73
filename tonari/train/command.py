"""`tonari train`: train by a TOML file, in one process or in each of a job's."""

import argparse
import os
from pathlib import Path

from tonari.names import EXAMPLES

INTERRUPTED = 130


def main(argv: list[str]) -> int:
    """Run the command. Collective under mpiexec and torchrun.

    Args:
        argv: Its arguments, without the command's name.

    Returns:
        The exit status: 130 where Ctrl-C ended a run of one process.

    Raises:
        ConfigError: If the settings are wrong.
        DataioError: If the data or the cache cannot be used.
    """
    parser = _parser()
    # Options may stand between the config and its overrides.
    given = parser.parse_intermixed_args(argv)
    asked = given.json or given.trace or given.world > 1 or given.nodes > 1
    if asked and not given.dry_run:
        parser.error("--world, --nodes, --trace and --json are for --dry-run; give it too")
    if given.plan and given.dry_run:
        parser.error("--plan is held against a run, and --dry-run starts none; leave one out")
    # Only now: `--help` and wrong arguments should not wait for torch.
    from tonari.trainer.config.config import load_config
    from tonari.trainer.run.skips import parse_skips

    config = load_config(given.config, given.overrides)
    if given.dry_run:
        from dataio.world.launchers import mpi_claim, torchrun_claim
        from tonari.train.dry_run import show_dry_run

        # Under a launcher of all ranks the first one looks, for as many as there are.
        started = mpi_claim(os.environ) or torchrun_claim(os.environ)
        if started is not None and started.rank:
            return 0
        num_started = (started.world_size if started is not None else None) or 1
        show_dry_run(
            config, world_size=given.world if given.world > 1 else num_started,
            num_nodes=given.nodes, traced=given.trace, as_json=given.json,
        )  # fmt: skip
        return 0
    from tonari.trainer.run.loop import train

    summary = train(
        config, resume=given.resume, metrics_path=given.metrics, plan=given.plan,
        skip_steps=parse_skips(given.skip_steps),
    )  # fmt: skip
    if summary.finished and summary.rank == 0 and config.data.workers.feeders is not None:
        from dataio.batch.feeders.directory import end_run

        end_run(Path(config.data.workers.feeders))
    # What a shell goes by, as after any Ctrl-C: the next command of a script is not run. Of several
    # ranks launchers would report it as a failure.
    return INTERRUPTED if summary.stopped_by == "SIGINT" and summary.world_size == 1 else 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="tonari train",
        description="Train by a TOML file: alone, under `mpiexec -n 4 tonari train ...`, or under "
        "`torchrun --nproc-per-node 4 -m tonari train ...`. Relative paths, in the file too, count "
        "from the current directory.",
    )
    parser.add_argument("config", type=Path, metavar="CONFIG.toml")
    parser.add_argument(
        "overrides", nargs="*", metavar="SECTION.KEY=VALUE",
        help="instead of the file's, such as run.epochs=3 shuffle.kind=global shuffle.moves=true; "
        f"{EXAMPLES / 'cifar10.toml'} names what there is",
    )  # fmt: skip
    parser.add_argument(
        "--resume", default="auto", metavar="auto|never|PATH",
        help="auto (the default): go on from the newest checkpoint of run.directory, if there is "
        "one; never: start anew; PATH: go on from this checkpoint",
    )  # fmt: skip
    parser.add_argument(
        "--skip-steps", action="append", default=[], metavar="A:B",
        help="pass over the rows of optimizer steps A up to and without B, as metrics.jsonl counts "
        "them: go on from the newest checkpoint before A, or from --resume PATH, and train no row "
        "of these steps in their epoch. They count as steps, so all later ones have the rows and "
        "the learning rate that they would have had. May be given several times",
    )  # fmt: skip
    parser.add_argument(
        "--metrics", type=Path, metavar="FILE",
        help="where JSON lines go (default: metrics.jsonl in run.directory)",
    )  # fmt: skip
    parser.add_argument(
        "--plan", type=Path, metavar="FILE",
        help="what `tonari plan --json` printed for this run: each epoch is put beside it, on the "
        "terminal and in the metrics, and the part that was off most is named",
    )  # fmt: skip
    parser.add_argument(
        "--dry-run", action="store_true",
        help="print the mesh, who holds what, memory and delivery, in one process; start nothing",
    )  # fmt: skip
    parser.add_argument(
        "--world", type=int, default=1, metavar="N",
        help="with --dry-run: ranks (default: those that a launcher started, or 1)",
    )  # fmt: skip
    parser.add_argument(
        "--nodes", type=int, default=1, metavar="M", help="with --dry-run: nodes (default: 1)"
    )
    parser.add_argument(
        "--trace", action="store_true",
        help="with --dry-run: make a step as a rank of each coordinate of pp, on no data, and "
        "print the most memory at a time, the FLOPs and what is sent along which axis; takes "
        "seconds a rank, more for many layers and microbatches",
    )  # fmt: skip
    parser.add_argument("--json", action="store_true", help="with --dry-run: one JSON document")
    return parser
