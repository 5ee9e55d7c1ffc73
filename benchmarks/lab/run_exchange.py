"""Run `tonari bench exchange` on the nodes of a lab, over links of a given rate.

    python -m benchmarks.lab.run_exchange --nodes 4 --rate 1gbit [--sets 100k --exchanges 0.1 ...]

What is not named here goes to the benchmark as it is; see `tonari bench exchange --help`. Without
--rate, every link carries twice the mean rate of the exchange: Q of a rank's bytes, over the time
of an epoch's steps; one Q is measured at a time then, since each has its own rate.
"""

import argparse
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import tyro

from tests.lab.cluster import Lab, what_is_missing
from tonari.bench.exchange.command import Exchange, jobs_of, run
from tonari.bench.exchange.exchange import SETS

HEADROOM = 2.0


def main(arguments: Sequence[str] | None = None) -> int:
    """Run it; exit status as the benchmark's, 2 where no lab can be made."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.lab.run_exchange",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--nodes", type=int, default=4, help="one rank on each")
    parser.add_argument("--rate", default="", help="of every link, as tc writes it: 1gbit, 200mbit")
    chosen, rest = parser.parse_known_args(arguments)
    options = tyro.cli(Exchange, args=rest, prog="python -m benchmarks.lab.run_exchange")
    if reason := what_is_missing():
        parser.error(reason)
    if chosen.rate:
        return measure(options, chosen.nodes, chosen.rate)
    statuses = []
    for name in options.sets:
        for fraction in options.settings.exchanges:
            # The others would be measured over a link of this one's rate.
            settings = replace(options.settings, exchanges=(fraction,), get=0, shared_rate=0)
            alone = replace(options, sets=(name,), settings=settings, bandwidth=False)
            statuses.append(measure(alone, chosen.nodes, fitting_rate(alone)))
    return max(statuses)


def fitting_rate(options: Exchange) -> str:
    """Twice the mean rate of an exchange, as tc writes it; not limited where nothing moves."""
    spec, (fraction,) = SETS[options.sets[0]], options.settings.exchanges
    bytes_per_s = fraction * spec.batch_size * spec.row_bytes / options.settings.step_s
    return f"{round(HEADROOM * 8 * bytes_per_s)}bit" if fraction else ""


def measure(options: Exchange, num_nodes: int, rate: str) -> int:
    """Measure in a lab of its own."""
    with tempfile.TemporaryDirectory(prefix="tonari-lab-", dir=options.directory) as parent:
        with Lab(Path(parent) / "lab", num_nodes, rate) as lab:
            sys.stderr.write(f"{num_nodes} nodes, links of {rate or 'no limit'} each way\n")
            jobs = jobs_of(options, Path(parent))
            jobs = replace(jobs, ranks=(num_nodes,), directory=lab.scratch, launch=lab.mpiexec)
            return run(options, jobs)


if __name__ == "__main__":
    sys.exit(main())
