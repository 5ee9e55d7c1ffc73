"""What does it take to leave out 100 million samples of a billion?

The ids are random, in no order, given as an array or as a Parquet list, and left out by what a
loader calls. The list is written first, if it is not there: call again to measure.

    python -m benchmarks.studies.exclude_many [--parquet list.parquet]
"""

import argparse
import json
import resource
import time
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from dataio.excluding import read_list
from dataio.plan.exclusion import exclude_ids
from tonari.report.machine import describe_machine

NUM_SAMPLES, NUM_IDS, PARTS = 10**9, 10**8, 100


def write_list(path: Path) -> None:
    """Write the list, a part at a time."""
    rng = np.random.default_rng(0)
    with pq.ParquetWriter(path, pa.schema([("sample_id", pa.int64())])) as writer:
        for _ in range(PARTS):
            ids = rng.integers(0, NUM_SAMPLES, NUM_IDS // PARTS)
            writer.write_table(pa.table({"sample_id": ids}))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--parquet", type=Path)
    path: Path | None = parser.parse_args().parquet
    if path is not None and not path.exists():
        write_list(path)
        print(f"{path} is written: call again to measure")
        return
    ids = np.empty(0, np.int32)
    if path is None:
        ids = np.random.default_rng(0).integers(0, NUM_SAMPLES, NUM_IDS, dtype=np.int32)
    started, used = time.perf_counter(), time.process_time()
    parts = [ids] if path is None else read_list(path)["sample_id"]
    exclusion = exclude_ids(parts, NUM_SAMPLES)
    line = {
        "question": "exclude_many", "machine": describe_machine(Path.cwd()),
        "num_samples": NUM_SAMPLES, "num_ids": NUM_IDS, "list": "array" if path is None else "file",
        "num_excluded": exclusion.num_excluded, "cpu_s": time.process_time() - used,
        "wall_s": time.perf_counter() - started,
        "peak_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
    }  # fmt: skip
    print(json.dumps(line))


if __name__ == "__main__":
    main()
