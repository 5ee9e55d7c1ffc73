"""Counters of the process, the node and the client, from recorded files of the kernel."""

import os
from pathlib import Path

import pytest
from msgspec.structs import asdict, replace

from tonari.bench.storage.site.counters import Counters, Moved
from tonari.bench.storage.site.site import Mount, Site

RECORDED = Path(__file__).parent / "recorded"


def site_of(name: str, *, path: str = "/", point: str = "/", source: str = "source") -> Site:
    mount = Mount(point=point, fstype=name, source=source, server=None, options=())
    return Site(
        path=path, name=name, magic=0, mount=mount, total_bytes=1, free_bytes=1, free_files=1,
        block_bytes=4096, is_shared=True, client_cache="page cache", layout=None, notes=(),
    )  # fmt: skip


@pytest.fixture
def trees(tmp_path: Path) -> tuple[Path, Path]:
    """Where the kernel tells, /proc and /sys, with nothing in them."""
    for name in ("proc/self", "proc/net", "sys"):
        (tmp_path / name).mkdir(parents=True)
    return tmp_path / "proc", tmp_path / "sys"


def write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


def test_a_machine_that_tells_nothing_has_counters_of_none(trees):
    proc, sys = trees
    assert Counters.read(site_of("ext4"), proc=proc, sys=sys).totals == Moved()


def test_a_processes_own_reads_are_told_apart_from_what_was_fetched_for_it(trees):
    proc, sys = trees
    write(proc / "self/io", "rchar: 500\nwchar: 1\nsyscr: 20\nsyscw: 1\nread_bytes: 400\n")
    totals = Counters.read(site_of("ext4"), proc=proc, sys=sys).totals
    assert (totals.asked_read_bytes, totals.read_calls, totals.process_read_bytes) == (500, 20, 400)


def test_links_are_counted_once_and_only_those_to_other_nodes(trees):
    proc, sys = trees
    write(proc / "net/dev", (RECORDED / "net_dev.txt").read_text())
    write(proc / "net/bonding/bond0", "")
    totals = Counters.read(site_of("lustre"), proc=proc, sys=sys).totals
    assert (totals.network_received_bytes, totals.network_sent_bytes) == (21000, 4300)


def test_ports_of_remote_direct_memory_access_count_words(trees):
    proc, sys = trees
    for port, words in (("mlx5_0/ports/1", 10), ("mlx5_1/ports/1", 5)):
        write(sys / f"class/infiniband/{port}/counters/port_rcv_data", f"{words}\n")
    assert Counters.read(site_of("lustre"), proc=proc, sys=sys).totals.rdma_received_bytes == 60


def test_a_block_device_counts_sectors(trees):
    proc, sys = trees
    device = Path("/").stat().st_dev
    write(
        sys / f"dev/block/{os.major(device)}:{os.minor(device)}/stat", " 10 0 4 1 2 0 900 1 0 5 6\n"
    )
    assert Counters.read(site_of("ext4"), proc=proc, sys=sys).totals.device_read_bytes == 2048


@pytest.mark.parametrize("root", ["proc/fs/lustre", "sys/kernel/debug/lustre"])
def test_lustres_clients_of_data_and_metadata_servers_are_summed_for_this_filesystem(trees, root):
    proc, sys = trees
    base = proc.parent / root
    stats = (RECORDED / "osc_stats.txt").read_text()
    write(base / "osc/scratch-OST0000-osc-ffff/stats", stats)
    write(base / "osc/scratch-OST0001-osc-ffff/stats", stats)
    write(base / "mdc/scratch-MDT0000-mdc-ffff/stats", "read_bytes 1 samples [bytes] 5 5 5 25\n")
    write(base / "osc/home-OST0000-osc-ffff/stats", stats)
    write(base / "osc/scratch-OST0002-osc-ffff/stats", "req_active 1 samples [reqs] 1 1 1 1\n")
    for source in ("10.0.0.2@tcp:/scratch", "10.0.0.2@tcp:/scratch/project"):
        site = site_of("lustre", source=source)
        totals = Counters.read(site, proc=proc, sys=sys).totals
        assert totals.client_read_bytes == 2 * (1 << 30) + 5


def test_an_nfs_client_tells_what_came_from_the_server_of_this_mount(trees):
    proc, sys = trees
    write(proc / "self/mountstats", (RECORDED / "mountstats.txt").read_text())
    for point, fetched in (("/home", 70000000), ("/sets", 4096), ("/set", None)):
        site = site_of("nfs4", point=point)
        totals = Counters.read(site, proc=proc, sys=sys).totals
        assert totals.client_read_bytes == fetched


def test_what_moved_is_the_difference_and_unknown_where_a_counter_is_absent_or_began_anew():
    earlier = Counters(Moved(asked_read_bytes=10, read_calls=9, network_received_bytes=5))
    later = Counters(Moved(asked_read_bytes=30, read_calls=2, device_read_bytes=7))
    assert later.since(earlier) == Moved(asked_read_bytes=20)


def test_nothing_moved_between_a_moment_and_itself():
    now = Counters(replace(Moved(), asked_read_bytes=3, network_sent_bytes=4))
    moved = asdict(now.since(now))
    assert moved["asked_read_bytes"] == moved["network_sent_bytes"] == 0


def test_this_processes_counter_sees_its_reads(tmp_path):
    file = tmp_path / "file"
    file.write_bytes(bytes(100_000))
    site = site_of("ext4", path=str(tmp_path))
    before = Counters.read(site)
    file.read_bytes()
    asked = Counters.read(site).since(before).asked_read_bytes
    assert asked is not None
    assert 100_000 <= asked < 200_000
