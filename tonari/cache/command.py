"""`tonari cache ...`: fill this node's caches, look at them, repair them, remove them."""

import tyro

from tonari.cache.export import Export
from tonari.cache.list import Inspect, Ls
from tonari.cache.prune import Prune
from tonari.cache.stage import Stage, parse_field, parse_fields
from tonari.cache.verify import Verify

__all__ = ["main", "parse_field", "parse_fields"]

ABOUT = """Fill this node's caches, look at them, repair them, remove them.

A job keeps its node's part of a dataset in a cache on the node's own disk: TONARI_CACHE, else a
directory in the job's scratch space, else /tmp/tonari-<uid>. Jobs that only read share one; a job
that exchanges rows with other nodes has one to itself. Nothing here reads or changes the dataset's
own files but `stage`, which reads them."""


def main(argv: list[str]) -> int:
    """Run the command."""
    command: Ls | Inspect | Stage | Verify | Prune | Export = tyro.extras.subcommand_cli_from_dict(
        {
            "ls": Ls,
            "inspect": Inspect,
            "stage": Stage,
            "verify": Verify,
            "prune": Prune,
            "export": Export,
        },
        args=argv,
        prog="tonari cache",
        description=ABOUT,
        config=(tyro.conf.FlagCreatePairsOff,),
    )
    return command.run()
