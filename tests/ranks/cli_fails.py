"""Run `tonari cache stage` on every rank; the last rank's cache directory cannot be made."""

import os
import sys
from pathlib import Path

from tonari import cli

out, shards = Path(sys.argv[1]), sys.argv[2]
rank, size = int(os.environ["PMI_RANK"]), int(os.environ["PMI_SIZE"])
# A node of its own for each rank: every rank opens a cache.
os.environ["TONARI_RANKS_PER_NODE"] = "1"
cache = out / "cache"
if rank == size - 1:
    (out / "file").write_text("in the way")
    cache = out / "file" / "cache"
sys.argv = ["tonari", "cache", "stage", shards, "--fields", "label=int:cls", "--cache", str(cache)]
cli.run()
