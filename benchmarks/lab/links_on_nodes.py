"""Measure and train on the nodes of a lab, noting what each node's client was asked for.

Arguments: the filesystem's mount, the node's own directory, a directory for what is found, options
of `StorageOptions` and of `PipelineOptions` as JSON. Rank 0 leaves ``found.json``; every rank,
in ``<rank>.json``, the requests of each way's epochs, and those that it began with.
"""

import itertools
import json
import sys
from pathlib import Path

from msgspec.structs import replace

from dataio import discover_world
from tonari.bench.storage.patterns.measure import measure_storage
from tonari.bench.storage.patterns.options import StorageOptions
from tonari.bench.storage.results.document import write_document
from tonari.bench.storage.training.pipeline import PipelineOptions, run_ways
from tonari.bench.storage.training.predict import WayName


def client_reads(mount: Path) -> int:
    """Count the reads that this node's client has been asked for, by its own counter."""
    for line in (mount / ".stats").read_text().splitlines():
        name, _, value = line.partition(": ")
        if name == "fuse_ops.read":
            return int(value)
    raise RuntimeError(f"{mount}/.stats: no fuse_ops.read; expected the mount of a MooseFS client")


def main() -> None:
    mount, scratch, out = (Path(argument) for argument in sys.argv[1:4])
    storage, training = (json.loads(argument) for argument in sys.argv[4:6])
    counts: dict[WayName, list[int]] = {}

    def on_epoch(way: WayName, epochs: int) -> None:
        counts.setdefault(way, []).append(client_reads(mount))

    with discover_world(timeout_s=600) as world:
        client_reads(mount)
        own = -client_reads(mount) + client_reads(mount)  # asking is reading
        results = measure_storage(world, mount, scratch, StorageOptions(**storage), print)
        options = PipelineOptions(**training)
        found = run_ways(world, mount, scratch, options, results, print, on_epoch)
        if world.rank == 0:
            write_document(replace(results, end_to_end=found), out / "found.json")
        reads = {
            way: [now - before - own for before, now in itertools.pairwise(at)]
            for way, at in counts.items()
        }
        (out / f"{world.rank}.json").write_text(json.dumps(reads))
        world.barrier(doing="leave what was found")


if __name__ == "__main__":
    main()
