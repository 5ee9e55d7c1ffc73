"""Train a case of `benchmarks.lab.plan_of_epochs`, or probe; rank 0 writes figures.

Arguments: what to do, as JSON; the file to which the answer is added.
"""

import json
import os
import sys
import time
from pathlib import Path
from typing import Any

from tonari.oracle.probe.probe import probe, save_probe
from tonari.trainer import train
from tonari.trainer.config.config import load_config

RANKS = 2


def do(job: dict[str, Any]) -> dict[str, Any]:
    """Do one thing; what rank 0 saw."""
    config = load_config(Path(job["settings"]), job["overrides"])
    if not job["case"]:
        found = probe(config, world_size=RANKS, data=True)
        if not int(os.environ.get("PMI_RANK", "0")):
            save_probe(found, Path(job["out"]))
        return {}
    if job["pretends"]:
        os.environ["TONARI_RANKS_PER_NODE"] = "1"
    lines: list[dict[str, Any]] = []
    train(
        config, resume="never", quiet=True,
        on_epoch=lambda line: lines.append(
            {**line, "read_bytes": read_bytes(), "own_bytes": own_bytes()}
        ),
    )  # fmt: skip
    # A job that was ended early is trained again
    return {"epochs": lines} if len(lines) == config.run.epochs else {}


def read_bytes() -> int:
    """Count what this process has had disks read, pages of mapped files included."""
    counts = Path("/proc/self/io").read_text().split()
    return int(counts[counts.index("read_bytes:") + 1])


def own_bytes() -> int:
    """Count what this process holds in memory, files aside."""
    status = Path("/proc/self/status").read_text().split()
    return int(status[status.index("RssAnon:") + 1]) * 1024


def busy_s() -> float:
    """Read the processor time that this machine has used, by anybody."""
    user, nice, system, _, _, irq, softirq, *_ = map(
        int, Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:]
    )
    return (user + nice + system + irq + softirq) / os.sysconf("SC_CLK_TCK")


def main() -> None:
    """Do it."""
    job, out = json.loads(sys.argv[1]), Path(sys.argv[2])
    began_s, began_cpu_s = time.perf_counter(), busy_s()
    found = do(job)
    if found and not int(os.environ.get("PMI_RANK", "0")):
        busy = (busy_s() - began_cpu_s) / (time.perf_counter() - began_s)
        line = {"case": job["case"], "round": job["round"], "busy": busy, **found}
        with out.open("a") as file:
            file.write(json.dumps(line) + "\n")


if __name__ == "__main__":
    main()
