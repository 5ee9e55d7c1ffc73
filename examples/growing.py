"""Train while shards are written: each epoch is of those that are there when it begins.

Run: python examples/growing.py
"""

import logging
import os
import tempfile
from pathlib import Path

import webdataset as wds

import dataio


def write_shard(path: Path, keys: range) -> None:
    """Write a shard under another name, and rename it into place when it is whole."""
    partial = str(path.with_suffix(".partial"))
    with wds.TarWriter(partial) as writer:
        for key in keys:
            writer.write({"__key__": f"{key:06d}", "cls": str(key % 10)})
    os.replace(partial, path)


def main() -> None:
    """Train three epochs; behind each another shard is written."""
    logging.basicConfig(level=logging.INFO)
    shards = Path(tempfile.mkdtemp())
    write_shard(shards / "000.tar", range(64))
    with dataio.Loader(
        dataio.Shards(shards / "*.tar", grows=True),
        batch_size=16,
        fields={"label": dataio.Int("cls")},
        cache=shards / "cache",
    ) as loader:
        for epoch in loader.epochs(3):
            rows = sum(int((batch["weight"] > 0).sum()) for batch in loader)
            print(f"epoch {epoch}: {rows} samples")
            write_shard(shards / f"{epoch + 1:03d}.tar", range(rows, rows + 32))


if __name__ == "__main__":
    main()
