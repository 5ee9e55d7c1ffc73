"""Train epochs with an exchange on the nodes of a lab; each rank reports what it was given.

Arguments: report directory, cache directory, samples, exchange fraction, epochs, time limit.
"""

import json
import socket
import sys
from pathlib import Path

from dataio import Loader, Reports, Workers, discover_world
from shuffle import Partial
from tests.memory_source import FIELDS, MemorySource


def main():
    out, cache = Path(sys.argv[1]), Path(sys.argv[2])
    num_samples, exchange, epochs = int(sys.argv[3]), float(sys.argv[4]), int(sys.argv[5])
    world = discover_world(timeout_s=float(sys.argv[6]))
    source = MemorySource(num_samples)
    given = []
    with Loader(
        source, batch_size=8, fields=FIELDS, cache=cache, shuffle=Partial(exchange), world=world,
        workers=Workers(threads=0), reports=Reports(progress=False),
    ) as loader:  # fmt: skip
        for epoch in loader.epochs(epochs):
            ids = [i for batch in loader for i in batch["sample_id"].tolist() if i >= 0]
            given.append(ids)
            del given[:-50]
            if epoch == 1:
                (out / f"{world.rank}.running").touch()
        report = {
            "host": socket.gethostname(),
            "layout": list(world.replicas_per_node),
            "given": given,
            "read_from_source": len(source.rows_read),
            "rows_here": loader.stats()["exchanged_rows"],
            "nodes_in_cache": sorted(p.name for p in cache.glob("*/node*")),
            "shared_memory": Path("/dev/shm").stat().st_dev,
        }
    (out / f"{world.rank}.json").write_text(json.dumps(report))
    world.close()


main()
