"""Read a file's layout on GPFS (Storage Scale): pool, replicas, fileset, from ``mmlsattr -L``."""

from pathlib import Path

from tonari.bench.storage.site.layouts import RunTool, StripeLayout


def gpfs_layout(path: Path, *, block_bytes: int, run: RunTool) -> StripeLayout | None:
    """Find how a file or directory lies on GPFS; None where ``mmlsattr`` does not print it.

    Args:
        block_bytes: The filesystem's block, as statvfs gives it: no tool for it is a user's.
    """
    printed = run(["mmlsattr", "-L", str(path)])
    return parse_mmlsattr(printed, block_bytes=block_bytes) if printed else None


def parse_mmlsattr(printed: str, *, block_bytes: int) -> StripeLayout | None:
    """Read what ``mmlsattr -L`` prints; None if no pool is in it."""
    lines = (line.partition(":") for line in printed.splitlines())
    entries = {name.strip(): value.strip() for name, _, value in lines}
    if "storage pool name" not in entries:
        return None
    replicas = entries.get("data replication", "").split(" ")[0]
    return StripeLayout(
        kind="gpfs", said_by="mmlsattr", block_bytes=block_bytes,
        pool=entries["storage pool name"] or None,
        data_replicas=int(replicas) if replicas.isdigit() else None,
        fileset=entries.get("fileset name") or None,
    )  # fmt: skip
