"""Train the cells of `benchmarks.studies.cost_aware` on nodes with slow links and a quota.

    python -m tests.lab.cost_aware --images cifar10-train.parquet --test cifar10-test.parquet \
        --cells cells.json --out found.jsonl

Two nodes of the lab, one rank each, read shards from a store of objects on a third machine; only
the nodes' links have a rate. What the nodes keep lasts for all cells.
"""

import argparse
import contextlib
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from tests.lab.cluster import Lab
from tests.multirank import ROOT

STORE, ADDRESS, PORT = "store", "10.77.0.200", 9000
NUM_NODES = 2


@contextlib.contextmanager
def serve(lab: Lab, directory: Path) -> Iterator[None]:
    """Serve a directory's files as a store of objects. Blocks until it answers."""
    lab.add(STORE, ADDRESS)
    command = [*lab.enter(STORE), sys.executable, "-m", "tests.lab.object_store"]
    store = subprocess.Popen([*command, str(directory), str(PORT)], cwd=ROOT, env=_environment())
    try:
        _await(lab)
        yield
    finally:
        store.kill()
        store.wait()


def _await(lab: Lab) -> None:
    probe = f"import socket; socket.create_connection(('{ADDRESS}', {PORT}), 1)"
    deadline = time.monotonic() + 30
    while True:
        try:
            lab.run("node0", sys.executable, "-c", probe)
            return
        except RuntimeError:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.1)


def train(lab: Lab, shards: Path, args: argparse.Namespace) -> None:
    """Train all cells on the lab's nodes."""
    names = sorted(path.name for path in shards.glob("*.tar"))
    pattern = f"s3://shards/train-{{000..{len(names) - 1:03d}}}.tar"
    node_bytes = sum((shards / name).stat().st_size for name in names) // NUM_NODES
    command = [
        *lab.mpiexec(NUM_NODES), sys.executable, "-m", "benchmarks.studies.cost_aware", "train",
        "--shards", pattern, "--test", str(args.test), "--cells", str(args.cells),
        "--cache", str(lab.scratch), "--quota-bytes", str(round(args.quota * node_bytes)),
        "--out", str(args.out),
    ]  # fmt: skip
    subprocess.run(command, cwd=ROOT, env=_environment(), check=True)


def _environment() -> dict[str, str]:
    store = {
        "AWS_ENDPOINT_URL": f"http://{ADDRESS}:{PORT}", "AWS_ACCESS_KEY_ID": "reader",
        "AWS_SECRET_ACCESS_KEY": "secret", "AWS_EC2_METADATA_DISABLED": "true",
    }  # fmt: skip
    return {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", **store}


def main() -> None:
    """Make shards where there are none, bring up a lab, and train."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--images", type=Path, required=True)
    parser.add_argument("--test", type=Path, required=True)
    parser.add_argument("--cells", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--shards", type=Path, help="kept there; by default they are removed")
    parser.add_argument("--samples", type=int, default=2000)
    parser.add_argument("--rate", default="80mbit", help="of each node's link, as tc writes it")
    parser.add_argument("--quota", type=float, default=0.5, help="share of a node's part")
    args = parser.parse_args()
    for name in ("images", "test", "cells", "out"):
        setattr(args, name, getattr(args, name).resolve())
    with tempfile.TemporaryDirectory() as directory:
        shards = (args.shards or Path(directory) / "shards").resolve()
        if not shards.exists():
            command = [sys.executable, "-m", "benchmarks.studies.cost_aware", "make"]
            given = ["--images", str(args.images), "--out", str(shards)]
            made = subprocess.run(
                [*command, *given, "--samples", str(args.samples)],
                cwd=ROOT, check=True, capture_output=True, text=True,
            )  # fmt: skip
            print(json.dumps(json.loads(made.stdout)), flush=True)
        with Lab(Path(directory) / "lab", NUM_NODES, args.rate) as lab:
            with serve(lab, shards):
                train(lab, shards, args)


if __name__ == "__main__":
    main()
