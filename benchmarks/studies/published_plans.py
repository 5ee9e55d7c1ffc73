r"""How far are the search's prices from steps that others timed on machines we do not have?

Megatron-LM's table of GPT models of 1.7 to 1,008 thousand million parameters on up to 3,072 A100:
each row is priced by `tonari.oracle.search.search.estimate` on ``examples/clusters/selene.toml``.
One number is fitted, once: the share of the peak that large products attain, so that the row of
18.4 thousand million parameters (the largest without a pipeline) comes out right. It is left out of
the comparison. Attention is priced as the authors had it, as products and a softmax whose scores
lie in memory; and below that by the kernel that keeps them out of it, which came later. A step's
time follows from the published operations a second by the paper's formula.

    python -m benchmarks.studies.published_plans [--json-file out.json]

Sources: Narayanan et al., Efficient large-scale language model training on GPU clusters using
Megatron-LM, SC 2021, Table 1; batches, microbatches, recomputation and stages a rank from
``examples/sc21/run_table_1.sh`` in NVIDIA/Megatron-LM; the operations a second are those of the
table in its README of April 2021 (``images/cases_april2021.png`` at 50a4b5fa).
"""

import argparse
import json
import statistics
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
from torch.nn.attention import SDPBackend, sdpa_kernel

from tonari.names import EXAMPLES
from tonari.oracle.cluster.cluster import Cluster, load_cluster
from tonari.oracle.search.search import Candidate, estimate
from tonari.trainer.config.config import Config, load_config

CLUSTER = EXAMPLES / "clusters/selene.toml"
SEQUENCE_LENGTH, VOCABULARY = 2048, 51200
FITTED = "18.4B"
BITS = 10
"""Of the efficiency that is fitted."""

ATTENTION = {"in products": SDPBackend.MATH, "in one kernel": SDPBackend.FLASH_ATTENTION}
"""How it was computed in 2021, and how it is now."""

TEXT = f"""
[data]
kind = "text"
train = "absent.txt"
sequence_length = {SEQUENCE_LENGTH}
[shuffle]
exchange = 0.1
[model]
kind = "gpt"
vocabulary = {VOCABULARY}
[optimizer]
kind = "adamw"
[mesh]
dtype = "bfloat16"
loss_parallel = true
checkpointing = "full"
"""


@dataclass(frozen=True, kw_only=True)
class PublishedRow:
    """A row of the table."""

    name: str
    heads: int
    width: int
    depth: int
    tp: int
    pp: int
    gpus: int
    rows: int
    microbatch_rows: int
    virtual: int
    tflops: float

    @property
    def step_s(self) -> float:
        """Seconds of a step, from the published operations a second of a GPU."""
        flops = 96.0 * self.rows * SEQUENCE_LENGTH * self.depth * self.width**2
        flops *= (
            1 + SEQUENCE_LENGTH / (6 * self.width) + VOCABULARY / (16 * self.depth * self.width)
        )
        return flops / (self.gpus * self.tflops * 1e12)

    def config(self, directory: Path) -> Config:
        """Make the settings that come nearest to what was run."""
        path = directory / "run.toml"
        path.write_text(TEXT)
        replicas = self.gpus // (self.tp * self.pp)
        batch_size = self.rows // replicas
        schedule = "interleaved" if self.virtual > 1 else "1f1b"
        return load_config(
            path,
            (
                f"model.width={self.width}", f"model.depth={self.depth}",
                f"model.heads={self.heads}", f"mesh.tp={self.tp}", f"mesh.pp={self.pp}",
                f"mesh.schedule={schedule}", f"mesh.virtual={max(self.virtual, 2)}",
                f"mesh.microbatches={batch_size // self.microbatch_rows}",
                f"data.batch_size={batch_size}",
            ),
        )  # fmt: skip


def _row(
    name: str, sizes: tuple[int, int, int], mesh: tuple[int, int, int], batch: tuple[int, int],
    virtual: int, tflops: float,
) -> PublishedRow:  # fmt: skip
    return PublishedRow(
        name=name, heads=sizes[0], width=sizes[1], depth=sizes[2], tp=mesh[0], pp=mesh[1],
        gpus=mesh[2], rows=batch[0], microbatch_rows=batch[1], virtual=virtual, tflops=tflops,
    )  # fmt: skip


# Heads, width, blocks; tp, pp, GPUs; rows of a step and of a microbatch; stages a rank; TFLOP/s
TABLE = (
    _row("1.7B", (24, 2304, 24), (1, 1, 32), (512, 16), 1, 137),
    _row("3.6B", (32, 3072, 30), (2, 1, 64), (512, 16), 1, 138),
    _row("7.5B", (32, 4096, 36), (4, 1, 128), (512, 16), 1, 142),
    _row("18.4B", (48, 6144, 40), (8, 1, 256), (1024, 8), 1, 135),
    _row("39.1B", (64, 8192, 48), (8, 2, 512), (1536, 4), 1, 138),
    _row("76.1B", (80, 10240, 60), (8, 4, 1024), (1792, 2), 3, 140),
    _row("145.6B", (96, 12288, 80), (8, 8, 1536), (2304, 2), 2, 148),
    _row("310.1B", (128, 16384, 96), (8, 16, 1920), (2160, 1), 2, 155),
    _row("529.6B", (128, 20480, 105), (8, 35, 2520), (2520, 1), 3, 163),
    _row("1008.0B", (160, 25600, 128), (8, 64, 3072), (3072, 1), 1, 163),
)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--json-file", type=Path, default=None, help="where the figures go")
    given = parser.parse_args()
    cluster = load_cluster(CLUSTER)
    documents = []
    with tempfile.TemporaryDirectory() as name:
        for kind, kernel in ATTENTION.items():
            with sdpa_kernel(kernel):
                documents.append({"attention": kind, **study(cluster, Path(name), kind)})
    if given.json_file:
        given.json_file.write_text(json.dumps(documents, indent=1))


def study(cluster: Cluster, directory: Path, attention: str) -> dict[str, Any]:
    """Fit one row, and compare all."""
    (fitted,) = (row for row in TABLE if row.name == FITTED)
    cluster = fit(cluster, fitted, directory)
    assert cluster.device is not None
    efficiency = cluster.device.efficiency
    print(f"attention {attention}: efficiency {efficiency:.3f}, fitted to the row of {FITTED}")
    results = [compare(row, price(row, cluster, directory)) for row in TABLE]
    errors = [abs(each["error"]) for each in results if each["model"] != FITTED]
    print(
        f"off by {statistics.median(errors):.1%} in the median of {len(errors)} rows, "
        f"at most {max(errors):.1%}; within 15 %: {sum(error <= 0.15 for error in errors)}"
    )
    return {"efficiency": efficiency, "rows": results}


def price(row: PublishedRow, cluster: Cluster, directory: Path) -> Candidate:
    """Price a row's settings."""
    return estimate(row.config(directory), cluster, world_size=row.gpus)


def fit(cluster: Cluster, row: PublishedRow, directory: Path) -> Cluster:
    """Choose the efficiency by which a row comes out right, by halving."""
    assert cluster.device is not None
    low, high = 0.0, 1.0
    for _ in range(BITS):
        middle = (low + high) / 2
        device = msgspec.structs.replace(cluster.device, efficiency=middle)
        tried = msgspec.structs.replace(cluster, device=device)
        is_slow = price(row, tried, directory).step_s > row.step_s
        low, high = (middle, high) if is_slow else (low, middle)
    return tried


def compare(row: PublishedRow, found: Candidate) -> dict[str, Any]:
    """Print a row beside its price."""
    error = found.step_s / row.step_s - 1
    parts = ", ".join(
        f"{name} {seconds / found.step_s:.1%}"
        for name, seconds in sorted(found.parts_s.items(), key=lambda part: -part[1])
        if seconds > 1e-3 * found.step_s
    )
    print(
        f"{row.name:>8}  published {row.step_s:6.2f} s  priced {found.step_s:6.2f} s  "
        f"{error:+6.1%}{' (fitted)' if row.name == FITTED else ''}  "
        f"{found.memory_bytes / 2**30:5.1f} GiB: {parts}"
    )
    return {
        "model": row.name, "gpus": row.gpus, "published_s": row.step_s, "priced_s": found.step_s,
        "error": error, "parts_s": found.parts_s, "memory_bytes": found.memory_bytes,
    }  # fmt: skip


if __name__ == "__main__":
    main()
