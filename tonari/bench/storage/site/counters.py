"""Read the counters of this process, its node and the filesystem's client: bytes really moved."""

import os
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from msgspec.structs import asdict
from typing_extensions import Self

from tonari.bench.storage.site.record import JsonRecord, Natural
from tonari.bench.storage.site.site import Site

SECTOR_BYTES = 512
"""Of a block device's statistics, whatever its sectors are."""
RDMA_WORD_BYTES = 4

NOT_LINKS = ("lo", "dummy", "ifb")
"""Interfaces whose bytes come from no other node, or are counted at another one already."""

LUSTRE_ROOTS = ("fs/lustre", "kernel/debug/lustre")
"""Below /proc and /sys, in older and newer versions."""


class Moved(JsonRecord, frozen=True, kw_only=True):
    """Bytes that each counter saw go by; None where there is no such counter for this user.

    Attributes:
        asked_read_bytes: That this process's read calls returned, wherever they came from.
        read_calls: How many there were.
        process_read_bytes: Fetched from block devices for this process; children count once they
            have ended and been waited for.
        device_read_bytes: By the path's block device, for everybody.
        network_received_bytes: By all links of this network namespace, for everybody.
        network_sent_bytes: As above.
        rdma_received_bytes: By this node's InfiniBand and Omni-Path ports, for everybody.
        client_read_bytes: From the servers of this very filesystem, by its client, for everybody.
    """

    asked_read_bytes: Natural | None = None
    read_calls: int | None = None
    process_read_bytes: Natural | None = None
    device_read_bytes: Natural | None = None
    network_received_bytes: Natural | None = None
    network_sent_bytes: Natural | None = None
    rdma_received_bytes: Natural | None = None
    client_read_bytes: Natural | None = None


@dataclass(frozen=True)
class Counters:
    """What the counters showed at one moment.

    Attributes:
        totals: Since the machine, or the process, began.
    """

    totals: Moved

    @classmethod
    def read(cls, site: Site, *, proc: Path = Path("/proc"), sys: Path = Path("/sys")) -> Self:
        """Read all counters that this user may see; one that is absent is None, never an error."""
        own = _pairs(_text(proc / "self/io"))
        received, sent = _network(proc)
        return cls(
            Moved(
                asked_read_bytes=own.get("rchar"),
                read_calls=own.get("syscr"),
                process_read_bytes=own.get("read_bytes"),
                device_read_bytes=_device(Path(site.path), sys),
                network_received_bytes=received,
                network_sent_bytes=sent,
                rdma_received_bytes=_rdma(sys),
                client_read_bytes=_client(site, proc, sys),
            )
        )

    def since(self, earlier: "Counters") -> Moved:
        """Find what moved from then to now; None also of a counter that began anew between."""
        before, now = asdict(earlier.totals), asdict(self.totals)
        moved = {
            name: None if before[name] is None or now[name] is None else now[name] - before[name]
            for name in now
        }
        return Moved(**{name: None if (by or 0) < 0 else by for name, by in moved.items()})


def join_moved(parts: Sequence[Moved], *, added: Collection[str]) -> Moved:
    """Put together what several ranks or nodes counted; None where one of them lacks a counter.

    Args:
        parts: At least one.
        added: Names of the counters that each counted bytes of its own. Of the others, which all
            counted the same bytes, the largest is taken.
    """
    rows = [asdict(part) for part in parts]
    joined: dict[str, int | None] = {}
    for name in Moved.__struct_fields__:
        seen = [row[name] for row in rows]
        together = sum if name in added else max
        joined[name] = None if None in seen else together(seen)
    return Moved(**joined)


def add_nodes(parts: Sequence[Moved]) -> Moved:
    """Add up what several nodes counted; None where one of them lacks a counter."""
    return join_moved(parts, added=Moved.__struct_fields__)


def _text(path: Path) -> str:
    try:
        return path.read_text(errors="replace")
    except OSError:
        return ""


def _pairs(text: str) -> dict[str, int]:
    lines = (line.partition(":") for line in text.splitlines())
    return {name: int(value) for name, _, value in lines if value.strip().isdigit()}


def _network(proc: Path) -> tuple[int | None, int | None]:
    # A bond's or a VLAN's bytes are those of the links below it.
    above = [*_names(proc / "net/bonding"), *_names(proc / "net/vlan")]
    links = []
    for line in _text(proc / "net/dev").splitlines():
        name, colon, counts = line.partition(":")
        name = name.strip()
        if colon and not name.startswith(NOT_LINKS) and name not in above:
            links.append([int(count) for count in counts.split()])
    if not links:
        return None, None
    return sum(link[0] for link in links), sum(link[8] for link in links)


def _names(directory: Path) -> list[str]:
    return [path.name for path in directory.iterdir()] if directory.is_dir() else []


def _device(path: Path, sys: Path) -> int | None:
    try:
        device = path.stat().st_dev
    except OSError:
        return None
    fields = _text(sys / f"dev/block/{os.major(device)}:{os.minor(device)}/stat").split()
    return int(fields[2]) * SECTOR_BYTES if len(fields) > 2 else None


def _rdma(sys: Path) -> int | None:
    ports = sorted((sys / "class/infiniband").glob("*/ports/*/counters/port_rcv_data"))
    words = [_text(port).strip() for port in ports]
    return _sum_known(int(word) * RDMA_WORD_BYTES for word in words if word.isdigit())


def _client(site: Site, proc: Path, sys: Path) -> int | None:
    if site.name == "lustre":
        return _sum_known(_lustre(site, proc, sys))
    if site.name in ("nfs", "nfs4"):
        return _nfs(site, _text(proc / "self/mountstats"))
    return None


def _lustre(site: Site, proc: Path, sys: Path) -> Iterator[int]:
    # llite's own statistics count what was asked of the client, cached or not: those of the clients
    # of each OST, and of each MDT for data kept there, count what came over the network.
    fs_name = site.mount.source.rpartition(":/")[2].partition("/")[0]
    for root in (proc / LUSTRE_ROOTS[0], sys / LUSTRE_ROOTS[1]):
        found = [
            *_globbed(root, f"osc/{fs_name}-*/stats"),
            *_globbed(root, f"mdc/{fs_name}-*/stats"),
        ]
        for path in found:
            text = _text(path)
            if text:
                yield _lustre_read(text)
        if found:
            return


def _globbed(root: Path, pattern: str) -> list[Path]:
    try:
        return sorted(root.glob(pattern))
    except OSError:
        # Only root may look below debugfs.
        return []


def _lustre_read(text: str) -> int:
    for line in text.splitlines():
        fields = line.split()
        if len(fields) > 6 and fields[0] == "read_bytes":
            return int(fields[6])
    # The line comes with the first read.
    return 0


def _nfs(site: Site, mountstats: str) -> int | None:
    ours = False
    for line in mountstats.splitlines():
        if line.startswith("device "):
            ours = f" mounted on {site.mount.point} with fstype nfs" in line
        fields = line.split()
        # Read and written by calls, the same with O_DIRECT, then read from the server.
        if ours and len(fields) > 5 and fields[0] == "bytes:":
            return int(fields[5])
    return None


def _sum_known(values: Iterator[int]) -> int | None:
    known = list(values)
    return sum(known) if known else None
