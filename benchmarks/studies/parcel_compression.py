"""Does it pay to compress the rows of an exchange: tokens, grids of floats, JPEG, over slow links?

Two nodes of the lab (`tests/lab/cluster.py`: network namespaces, links shaped by `tc tbf`; needs
root) each hold half of a file's rows and exchange a half of them in every epoch, by
`shuffle.Partial`, while steps sleep, which leaves the core to the exchange. The ways take turns,
each a job with a loader of its own. An epoch is from its first batch until the next one can begin;
the first of a job, in which the link's rate is found, counts nowhere.

Tokens are bytes of a text as uint16; grids are float32 fields of smoothed noise, and the same
with the last 12 bits of each number cut off, as archives of measured fields are; small JPEG rows
are the pictures of CIFAR-10, large ones mosaics of 64 of them.

    python -m benchmarks.studies.parcel_compression --parquet DIRECTORY --text FILE [--megabytes 48]
"""

import argparse
import io
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from PIL import Image

import dataio
from shuffle import Partial
from tests.lab.cluster import Lab
from tests.multirank import ROOT
from tonari.report.machine import describe_machine

NODES, EXCHANGE, STEPS, STEP_S = 2, 0.5, 20, 0.01
WAYS = ("none", "auto", "zstd")
TOKENS, SIDE = 2048, 64


def rows_of(kind: str, args: argparse.Namespace) -> list[bytes]:
    """Make the rows of both nodes."""
    wanted = args.megabytes << 20
    if kind == "large jpeg":
        files = pq.read_table(args.parquet / "cifar10-train.parquet")["jpg"].to_pylist()
        return [_mosaic(files[at : at + 64]) for at in range(0, wanted // 420, 64)]
    if kind == "small jpeg":
        files = pq.read_table(args.parquet / "cifar10-train.parquet")["jpg"].to_pylist()
        return list(files[: wanted // (sum(map(len, files)) // len(files))])
    if kind == "tokens":
        text = np.frombuffer(args.text.read_bytes(), np.uint8).astype("<u2")
        starts = np.random.default_rng(0).integers(0, len(text) - TOKENS, wanted // (2 * TOKENS))
        return [text[start : start + TOKENS].tobytes() for start in starts.tolist()]
    rng, found = np.random.default_rng(0), []
    for _ in range(wanted // (4 * SIDE**2)):
        field = rng.standard_normal((SIDE, SIDE)).astype("<f4")
        for _ in range(8):
            field = (field + np.roll(field, 1, 0) + np.roll(field, 1, 1)) / 3
        bits = (280 + 20 * field).astype("<f4").view("<u4")
        found.append((bits & np.uint32(0xFFFFF000) if kind == "rounded grids" else bits).tobytes())
    return found


def _mosaic(files: list[bytes]) -> bytes:
    """Make one picture of 256 x 256 of 64 small ones."""
    whole, made = Image.new("RGB", (256, 256)), io.BytesIO()
    for place, each in enumerate(files):
        whole.paste(Image.open(io.BytesIO(each)), (place % 8 * 32, place // 8 * 32))
    whole.save(made, "JPEG", quality=90)
    return made.getvalue()


def train(how: str, path: str, cache: str, epochs: int, out: str) -> None:
    """Be a rank: run epochs; write the time and the bytes of each."""
    found: list[dict[str, float]] = []
    batch = pq.ParquetFile(path).metadata.num_rows // NODES // STEPS
    with dataio.Loader(
        path, batch_size=batch, fields={"row": dataio.Bytes("row")}, cache=cache, seed=0,
        shuffle=Partial(EXCHANGE, compress=how),  # type: ignore[arg-type]
        reports=dataio.Reports(progress=False),
    ) as loader:  # fmt: skip
        before, began = loader.stats(), time.perf_counter()
        for _ in loader.epochs(epochs + 1):
            now, stats = time.perf_counter(), loader.stats()
            found.append({"epoch_s": now - began} | {
                name: stats[name] - before[name]
                for name in ("exchanged_bytes", "exchanged_raw_bytes", "exchange_cpu_s")
            })  # fmt: skip
            before, began = stats, now
            for _ in loader:
                time.sleep(STEP_S)
        rank = loader.world.rank
    Path(out, f"{rank}.json").write_text(json.dumps(found[2:]))


def run(lab: Lab, scratch: Path, how: str, path: Path, args: argparse.Namespace) -> list[Any]:
    """Run one job; the epochs of its first rank."""
    name = f"{how} {time.monotonic_ns()}"
    given = [how, str(path), str(lab.scratch / name), str(args.epochs), str(scratch)]
    env = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    command = [*lab.mpiexec(NODES), sys.executable, "-m", __spec__.name, "--rank", *given]
    ended = subprocess.run(command, env=env, capture_output=True, text=True)
    if ended.returncode:
        raise SystemExit(f"the job of {given} ended with {ended.returncode}: {ended.stderr}")
    return list(json.loads((scratch / "0.json").read_text()))


def measure(lab: Lab, scratch: Path, args: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Time each kind of rows at each rate, the ways in turns."""
    for kind in args.kinds:
        path = scratch / f"{kind}.parquet"
        rows = rows_of(kind, args)
        table = pa.table({"row": pa.array(rows, pa.binary())})
        pq.write_table(table, path, compression="none", use_dictionary=False)
        for rate in args.rates:
            lab.shape(rate)
            taken: dict[str, list[dict[str, float]]] = {how: [] for how in WAYS}
            for _ in range(args.turns):
                for how in WAYS:
                    taken[how] += run(lab, scratch, how, path, args)
            for how, epochs in taken.items():
                low, middle, high = statistics.quantiles([e["epoch_s"] for e in epochs], n=4)
                figures = {
                    name: round(statistics.median(e[name] for e in epochs), 3)
                    for name in ("exchanged_bytes", "exchanged_raw_bytes", "exchange_cpu_s")
                }
                yield {
                    "question": "epoch with compressed parcels", "rows": kind, "rate": rate,
                    "compress": how, "epoch_s": round(middle, 3),
                    "quarters_s": [round(low, 3), round(high, 3)], **figures,
                }  # fmt: skip


def main() -> None:
    """Print a line of JSON for each way."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rank", nargs=5, help=argparse.SUPPRESS)
    parser.add_argument("--parquet", type=Path)
    parser.add_argument("--text", type=Path)
    parser.add_argument(
        "--kinds",
        nargs="*",
        default=["tokens", "grids", "rounded grids", "small jpeg", "large jpeg"],
    )
    parser.add_argument("--rates", nargs="*", default=["100mbit", "1gbit"])
    for name, value in (("megabytes", 48), ("epochs", 5), ("turns", 2)):
        parser.add_argument(f"--{name}", type=int, default=value)
    args = parser.parse_args()
    if args.rank:
        how, path, cache, epochs, out = args.rank
        train(how, path, cache, int(epochs), out)
        return
    with tempfile.TemporaryDirectory() as made, Lab(Path(made) / "lab", NODES) as lab:
        for figures in measure(lab, Path(made), args):
            print(json.dumps(figures | describe_machine(Path(made))), flush=True)


if __name__ == "__main__":
    main()
