"""Each rule of the verdict: cold and warm only where shown, else unknown with the reason."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from tonari.bench.storage.site.counters import Moved
from tonari.bench.storage.site.evidence import (
    CacheVerdict,
    Evidence,
    Residency,
    judge,
    judge_nodes,
    merge,
)
from tonari.bench.storage.site.site import ClientCache, Mount, Site

MIB = 1 << 20


def site_of(name: str, *, cache: ClientCache = "page cache", server: str | None = None) -> Site:
    fstype = "fuse" if name == "moosefs" else name
    shared = name not in ("ext4", "xfs", "overlay", "tmpfs")
    return Site(
        path="/", name=name, magic=0,
        mount=Mount(point="/", fstype=fstype, source="", server=server, options=()),
        total_bytes=1, free_bytes=1, free_files=1, block_bytes=4096, is_shared=shared,
        client_cache=cache, layout=None, notes=(),
    )  # fmt: skip


def seen(
    before: float | None, *, after: float | None = 1.0, asked: int = 100 * MIB,
    files: int = 100 * MIB, direct: bool = False, **moved: float | None,
) -> Evidence:  # fmt: skip
    """Evidence by shares: resident of the files, moved of what was asked."""

    def residency(share: float | None) -> Residency:
        resident = None if share is None else int(share * files)
        return Residency(
            bytes_in_files=files, bytes_resident=resident,
            said_by="none" if share is None else "cachestat",
        )  # fmt: skip

    by = {f"{name}_bytes": None if s is None else int(s * asked) for name, s in moved.items()}
    return Evidence(
        asked_bytes=asked, resident_before=residency(before), resident_after=residency(after),
        moved=Moved(**by), direct=direct,
    )  # fmt: skip


EXT4, LUSTRE, NFS = map(site_of, ("ext4", "lustre", "nfs4"))
MOOSEFS = site_of("moosefs", server="mfsmaster:9421")
GPFS, ZFS = site_of("gpfs", cache="pagepool"), site_of("zfs", cache="unknown")
PLAIN_FUSE, TMPFS, OVERLAY = site_of("fuse"), site_of("tmpfs"), site_of("overlay")
SSHFS = site_of("fuse.sshfs", server="pfs")

TABLE = {
    # Cold: nothing in memory, and fetched by a counter that sees it.
    "evicted and fetched": (EXT4, seen(0, process_read=1.0), "cold"),
    "one percent in memory": (EXT4, seen(0.01, process_read=1.0), "cold"),
    "two percent in memory": (EXT4, seen(0.02, process_read=1.0), "unknown"),
    "ninety percent fetched": (EXT4, seen(0, process_read=0.9), "cold"),
    "less was fetched": (EXT4, seen(0, process_read=0.89), "unknown"),
    "holes": (EXT4, seen(0, process_read=0), "unknown"),
    "no counter": (EXT4, seen(0), "unknown"),
    "others' links do not fetch from a disk": (EXT4, seen(0, network_received=9), "unknown"),
    "the lustre client fetched": (LUSTRE, seen(0, client_read=1), "cold"),
    "its own counter comes before links": (
        LUSTRE, seen(0, client_read=0.5, network_received=2), "unknown",
    ),
    "links of lustre": (LUSTRE, seen(0, network_received=1.02), "cold"),
    "infiniband of lustre": (LUSTRE, seen(0, network_received=0, rdma_received=1), "cold"),
    "links of moosefs": (MOOSEFS, seen(0, network_received=1.03), "cold"),
    "links of sshfs": (SSHFS, seen(0, network_received=1.03), "cold"),
    "no links for sshfs": (SSHFS, seen(0), "unknown"),
    "a fuse client of this node": (PLAIN_FUSE, seen(0), "cold"),
    "whose pages did not stay": (PLAIN_FUSE, seen(0, after=0.5), "unknown"),
    "or cannot be seen": (PLAIN_FUSE, seen(0, after=None), "unknown"),
    "overlay": (OVERLAY, seen(0, process_read=1), "cold"),
    "part of the files, none of it in memory": (
        EXT4, seen(0.001, asked=10 * MIB, process_read=1), "cold",
    ),
    "part of the files, perhaps in memory": (
        EXT4, seen(0.01, asked=2 * MIB, process_read=0.95), "unknown",
    ),
    "read twice over": (EXT4, seen(0, asked=200 * MIB, process_read=0.5), "unknown"),
    "links do not fetch from memory": (TMPFS, seen(0, network_received=1), "unknown"),
    # O_DIRECT.
    "direct past all caches": (LUSTRE, seen(1, direct=True, client_read=1), "cold"),
    "direct without a counter": (NFS, seen(None, direct=True), "cold"),
    "direct, yet nothing fetched": (EXT4, seen(1, direct=True, process_read=0), "unknown"),
    "direct where caches are not known": (MOOSEFS, seen(1, direct=True), "unknown"),
    "direct on plain fuse": (PLAIN_FUSE, seen(0, after=1, direct=True), "unknown"),
    "direct on memory": (TMPFS, seen(1, direct=True), "unknown"),
    # Warm.
    "all in memory": (EXT4, seen(1, process_read=0), "warm"),
    "all but one percent": (EXT4, seen(0.99, process_read=0.01), "warm"),
    "all but two": (EXT4, seen(0.98, process_read=0.02), "unknown"),
    "in memory, no counter": (MOOSEFS, seen(1), "warm"),
    "in memory, yet fetched": (EXT4, seen(1, process_read=0.2), "unknown"),
    "in memory, others on the links": (LUSTRE, seen(1, network_received=0.5), "warm"),
    "in memory, as much came over the links": (LUSTRE, seen(1, network_received=1), "unknown"),
    "tmpfs": (TMPFS, seen(1), "warm"),
    "tmpfs with holes": (TMPFS, seen(0), "unknown"),
    "a part in memory, and nothing fetched": (
        EXT4, seen(0.1, asked=10 * MIB, process_read=0), "warm",
    ),
    "the same with links": (LUSTRE, seen(0.5, network_received=0), "unknown"),
    "over an overlay's unknown layer": (OVERLAY, seen(0.5, process_read=0), "unknown"),
    "half in memory": (EXT4, seen(0.5, process_read=0.5), "unknown"),
    # Memory that cannot be seen into.
    "unseen, nothing fetched": (NFS, seen(None, client_read=0), "warm"),
    "unseen, nothing over links": (NFS, seen(None, network_received=0), "unknown"),
    "unseen, all fetched": (NFS, seen(None, client_read=1), "unknown"),
    "unseen, no counter": (NFS, seen(None), "unknown"),
    # Caches elsewhere.
    "pagepool, evicted": (GPFS, seen(0, network_received=1), "unknown"),
    "pagepool, in memory": (GPFS, seen(1, network_received=0), "unknown"),
    "pagepool, direct": (GPFS, seen(0, direct=True, network_received=1), "unknown"),
    "zfs": (ZFS, seen(0, process_read=1), "unknown"),
    "no cache at all": (site_of("9p", cache="none"), seen(0, network_received=1), "cold"),
    # Nothing to judge.
    "nothing asked": (EXT4, replace(seen(1), asked_bytes=0), "unknown"),
    "empty files": (EXT4, replace(seen(0, files=0, process_read=1), asked_bytes=5), "unknown"),
}  # fmt: skip


@pytest.mark.parametrize("case", TABLE)
def test_the_verdict_follows_the_table(case):
    site, evidence, state = TABLE[case]
    verdict = judge(evidence, site)
    assert (verdict.state, bool(verdict.why)) == (state, True), verdict.why


@pytest.mark.parametrize(
    ("site", "evidence", "why"),
    [
        (GPFS, seen(0), "pagepool"),
        (ZFS, seen(0), "zfs's client keeps data is not known"),
        (EXT4, seen(0, process_read=0.5), "50.0% of what was asked for was fetched"),
        (EXT4, seen(0), "no counter here sees"),
        (EXT4, seen(0.5, process_read=0.5), "50.0% of the files was in the page cache"),
        (NFS, seen(None, client_read=1), "what was in memory cannot be seen"),
        (LUSTRE, seen(0, client_read=1), "the server's cache cannot be seen"),
        (PLAIN_FUSE, seen(0), "nor one in the client's process"),
        (EXT4, replace(seen(0), asked_bytes=0), "no data was asked for"),
        (
            LUSTRE, replace(seen(0, client_read=1), written_by_another=True),
            "another node wrote the files",
        ),
        (LUSTRE, replace(seen(0, client_read=1), larger_than_memory=True), "more than this node's"),
    ],
)  # fmt: skip
def test_a_verdict_gives_its_reason(site, evidence, why):
    assert why in judge(evidence, site).why


def test_a_servers_cache_is_not_spoken_of_where_there_is_no_server():
    assert "server" not in judge(seen(0, process_read=1), EXT4).why


share = st.none() | st.floats(0, 3)
moved = st.fixed_dictionaries({name: share for name in (
    "process_read", "device_read", "network_received", "rdma_received", "client_read",
)})  # fmt: skip


@given(
    site=st.sampled_from([EXT4, LUSTRE, NFS, MOOSEFS, GPFS, ZFS, PLAIN_FUSE, TMPFS, OVERLAY]),
    before=st.none() | st.floats(0, 1), after=st.none() | st.floats(0, 1),
    direct=st.booleans(), asked=st.integers(0, 300 * MIB), moved=moved,
)  # fmt: skip
def test_any_evidence_gets_a_verdict_and_none_is_cold_that_was_in_memory(
    site, before, after, direct, asked, moved
):
    verdict = judge(seen(before, after=after, asked=asked, direct=direct, **moved), site)
    assert verdict.why
    if verdict.state == "cold" and not direct:
        assert before is not None
        assert before <= 0.01
    if verdict.state == "warm" and before is not None:
        assert before * 100 * MIB > 0.01 * min(asked, 100 * MIB)


def test_ranks_of_a_node_are_judged_by_the_nodes_counters_together():
    # Each saw both ranks' bytes on the links, and its own alone in its own counter.
    rank = seen(0, network_received=2.0, process_read=1.0)
    node = merge([rank, rank])
    assert node.asked_bytes == 200 * MIB
    assert node.resident_before.bytes_in_files == 200 * MIB
    assert node.moved.network_received_bytes == 200 * MIB
    assert node.moved.process_read_bytes == 200 * MIB
    assert judge(node, LUSTRE).state == "cold"


def test_a_node_is_not_cold_because_half_its_ranks_were():
    cold = seen(0, network_received=1.0)
    warm = replace(seen(1), moved=cold.moved)
    assert judge(cold, LUSTRE).state == "cold"
    assert judge(merge([cold, warm]), LUSTRE).state == "unknown"


def test_what_one_rank_cannot_see_its_node_cannot_see():
    node = merge([seen(0, network_received=1), seen(None)])
    assert node.resident_before.bytes_resident is None
    assert node.moved.network_received_bytes is None


def test_a_phase_is_cold_or_warm_only_where_all_nodes_are():
    cold, warm = CacheVerdict("cold", "so"), CacheVerdict("warm", "so")
    assert judge_nodes({"node0": cold, "node1": cold}).state == "cold"
    mixed = judge_nodes({"node0": cold, "node1": warm})
    assert mixed == CacheVerdict("unknown", "nodes differ: node0 cold, node1 warm")
