"""`tonari feed`: decode and transform for ranks that train on other nodes."""

import logging
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro

from tonari.errors import CommandError


@dataclass(frozen=True, kw_only=True)
class FeedCommand:
    """Decode and transform samples for ranks that train, on a node whose cores have nothing to do.

    Give the ranks the same directory: Workers(feeders="DIR") in Python, data.workers.feeders=DIR
    for tonari train. They send samples as their caches have them, and get back what a batch is made
    of: the same bytes as without. Feeders may come and go at any time. What one has when it ends is
    made by the ranks.

    On Slurm, with a first group of nodes that train and a second one that feeds:

        srun --het-group=1 tonari feed $PWD/feeders &
        srun --het-group=0 tonari train run.toml data.workers.feeders=$PWD/feeders

    It serves until tonari train has ended its run, until a file named "over" is made in DIR, or
    until it is ended (SIGTERM, Ctrl-C). Its Python, packages and modules must be those of the
    ranks: others are refused.
    """

    directory: Annotated[Path, tyro.conf.Positional]
    """On a filesystem that all nodes see; made if it is not there, for you alone (mode 0700)."""
    cores: int | None = None
    """Processes that decode; as many as the cores that it may use, if not given."""
    host: str | None = None
    """Name or address at which the ranks reach this node, such as that of its fast network; the
    node's own name, if not given."""


def main(argv: list[str]) -> int:
    """Run the command until it is to end.

    Args:
        argv: Its arguments, without the command's name.

    Returns:
        The exit status.

    Raises:
        CommandError: If the number of cores is not one.
        WorkerError: If the directory or the host cannot be used.
    """
    given = tyro.cli(
        FeedCommand, args=argv, prog="tonari feed", config=(tyro.conf.FlagCreatePairsOff,)
    )
    if given.cores is not None and given.cores < 1:
        raise CommandError(f"--cores is {given.cores}, expected at least 1; leave it out for all")
    # Only now: `--help` and wrong arguments should not wait for torch.
    from dataio.batch.feeders.serve import cores_here, run_feeder

    logging.basicConfig(level=logging.INFO, format="%(message)s")
    run_feeder(given.directory, num_cores=given.cores or cores_here(), host=given.host)
    return 0
