"""`tonari probe`: time this node, and the steps of a job on it, for `tonari plan`."""

import argparse
import re
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from tonari.errors import CommandError
from tonari.outputs import check_output, make_directory
from tonari.sizes import format_bytes

if TYPE_CHECKING:
    from tonari.oracle.probe.data import DataTimes
    from tonari.oracle.probe.probe import Probe

MOST_LETTERS = 200
"""Of a file's name, without its end."""


def main(argv: list[str]) -> int:
    """Run the command. Collective under mpiexec and srun.

    Args:
        argv: Its arguments, without the command's name.

    Returns:
        The exit status.

    Raises:
        ConfigError: If the settings are wrong, or do not fit the job's number of ranks.
    """
    parser = _parser()
    given = parser.parse_intermixed_args(argv)
    if given.nodes < 0:
        parser.error(f"--nodes is {given.nodes}, expected at least 1")
    for flag in ("steps", "rounds"):
        if getattr(given, flag) < 1:
            parser.error(f"--{flag} is {getattr(given, flag)}, expected at least 1")
    tries = [tuple(words.split()) for words in given.tries] or [()]
    if given.tries:
        outputs = [given.out / f"{_name(words)}.json" for words in tries]
        if len(set(outputs)) < len(outputs):
            parser.error("--try was given the same settings twice; leave one out")
        make_directory("--out", given.out)
    else:
        outputs = [given.out]
        check_output("--out", given.out)
    from dataio.world import discover_world
    from tonari.oracle.probe.probe import joined, probe, probe_messages, save_probe
    from tonari.trainer.config.config import load_config
    from tonari.trainer.run.build import lay_out

    with discover_world() as world:
        rank, started, nodes = world.rank, world.world_size, world.num_nodes
    if given.nodes and given.nodes != nodes:
        per_node = max(started // given.nodes, 1)
        raise CommandError(
            f"--nodes {given.nodes}: {started} ranks were started on {nodes} "
            f"node{'s' * (nodes > 1)}; start them by a launcher, as many on each of "
            f"{given.nodes} nodes: srun -N{given.nodes} --ntasks-per-node={per_node} tonari probe "
            f"..., or mpiexec -n {per_node * given.nodes} -ppn {per_node} tonari probe ..."
        )
    world_size = given.world or started
    overrides = [(*given.overrides, *words) for words in tries]
    configs = [load_config(given.config, each) for each in overrides]
    for config in configs:
        # Before anything is timed
        lay_out(config, world_size)
    rounds: list[list[Probe]] = [[] for _ in configs]
    for number in range(given.rounds):
        if not rank:
            what = "the loader and steps" if given.data and not number else "steps"
            said = f"timing {what}, round {number + 1} of {given.rounds}; minutes for a large job"
            print(said, file=sys.stderr, flush=True)
        for config, words, out, found in zip(configs, overrides, outputs, rounds, strict=True):
            found.append(
                probe(
                    config, world_size=world_size, steps=given.steps, sizes=(),
                    data=given.data and not number,
                )
            )  # fmt: skip
            if not rank and number < given.rounds - 1:
                # One that is stopped leaves what the rounds before it timed
                save_probe(replace(joined(found), overrides=words), out)
                print(f"{out}: round {number + 1} of {given.rounds}", flush=True)
    if not rank:
        print("timing messages between ranks", file=sys.stderr, flush=True)
    messages = probe_messages(device="cuda" if rounds[0][0].gpu else "cpu")
    for words, out, found in zip(overrides, outputs, rounds, strict=True):
        whole = replace(joined(found), overrides=words, messages=messages)
        if not rank:
            save_probe(whole, out)
            print(f"{out}: {_words(whole)}", flush=True)
    return 0


def _name(words: Sequence[str]) -> str:
    """Name a file by settings, which may hold paths."""
    return re.sub(r"[^\w.=,+-]+", "-", "_".join(words))[:MOST_LETTERS]


def _words(found: "Probe") -> str:
    alone_s = max(timed.computing_s for timed in found.steps)
    slowdowns = "".join(
        f", {factor:.2f} times as long where {count} compute"
        for count, factor in found.slowdowns[1:]
    )
    return "\n".join([
        f"{len(found.inside)} kinds of messages among up to {found.ranks} ranks; a step computes "
        f"{alone_s:.3f} s on a rank alone{slowdowns}",
        *([_gpu_words(found)] if found.gpu else []),
        *([_link_words(found)] if found.between else []),
        *([_data_words(found.data)] if found.data else []),
    ])  # fmt: skip


def _gpu_words(found: "Probe") -> str:
    longest = max(found.steps, key=lambda timed: timed.core_s)
    return (
        f"{found.gpu}: so long do kernels take; the host issues a step's in {longest.core_s:.4f} s,"
        f" and its batches are copied in {max(timed.copy_s for timed in found.steps):.4f} s"
    )


def _link_words(found: "Probe") -> str:
    from tonari.oracle.cluster.probed import measure_link
    from tonari.oracle.probe.messages import EXCHANGE

    gbyte_s, latency_us = measure_link(found.between)
    (rows,) = (each for each in found.between if each.kind == EXCHANGE)
    return (
        f"{found.nodes} nodes: the link of each carries {gbyte_s:.4g} GB/s each way, a message "
        f"waits {latency_us:,.0f} us; rows are exchanged at "
        f"{rows.num_bytes[-1] / rows.seconds[-1] / 1e9:.4g} GB/s by a rank each way"
    )


def _data_words(data: "DataTimes") -> str:
    return (
        f"{data.num_rows:,} rows of {format_bytes(round(data.row_bytes))}; a rank makes a batch "
        f"in {data.batch_s:.4f} s, a node stages {format_bytes(round(data.staging_bytes_per_s))} "
        f"a second, an epoch ends in {data.epoch_end_s:.3f} s"
    )


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="tonari probe",
        description="Time the messages of this node's ranks, and what the ranks of a job compute "
        "in a step: with the trainer's own step, real tensors, and nobody at the other end. Start "
        "as many ranks as the job has on a node: `mpiexec -n 4 tonari probe TRAIN.toml`; on two "
        "nodes or more, `srun -N2 --ntasks-per-node=4 tonari probe TRAIN.toml`, messages between "
        "nodes are timed too, and `tonari plan` needs no file of the machine. The "
        "loader stages at most 1 GB of the data in a directory of its own, and makes batches. The "
        "nodes must be otherwise idle. Takes some 60 steps for each stage of a pipeline, and about "
        "half a minute for messages. Of a job on GPUs (run.device), kernels are timed there.",
    )
    parser.add_argument("config", type=Path, metavar="CONFIG.toml", help="as of tonari train")
    parser.add_argument(
        "overrides", nargs="*", metavar="SECTION.KEY=VALUE", help="instead of the file's"
    )
    parser.add_argument(
        "--world", type=int, default=0, metavar="N",
        help="ranks of the whole job (default: as many as are started)",
    )  # fmt: skip
    parser.add_argument(
        "--nodes", type=int, default=0, metavar="N",
        help="nodes that the ranks must be on; refused on others (default: any)",
    )  # fmt: skip
    parser.add_argument(
        "--steps", type=int, default=10, metavar="N",
        help="to time each way, in each round (default: 10)",
    )  # fmt: skip
    parser.add_argument(
        "--rounds", type=int, default=1, metavar="N",
        help="in which all that is tried is timed: a slower minute of the node then meets them all "
        "(default: 1)",
    )  # fmt: skip
    parser.add_argument(
        "--no-data", dest="data", action="store_false",
        help="leave the loader out: then a plan is of steps alone",
    )  # fmt: skip
    parser.add_argument(
        "--try", dest="tries", action="append", default=[], metavar="'KEY=VALUE ...'",
        help="settings to choose among, such as 'mesh.pp=2 mesh.microbatches=4'; give it once for "
        "each: all are timed one after another, messages once",
    )  # fmt: skip
    parser.add_argument(
        "--out", type=Path, default=Path("probe.json"), metavar="FILE",
        help="where the figures go (default: probe.json); with --try a directory, with a file for "
        "each",
    )  # fmt: skip
    return parser
