"""What a directory lies on: by recorded mount tables, and on this machine's own mounts."""

import json
import os
from pathlib import Path

import msgspec
import pytest

from dataio.base.filesystem import filesystem_of
from tonari.bench.errors import BenchError
from tonari.bench.storage.site.kernel import statfs_magic
from tonari.bench.storage.site.site import Site, describe_site, name_of, server_of

TABLE = """\
27 1 254:0 / / rw,relatime shared:1 - ext4 /dev/vda1 rw,discard
40 27 0:40 / /home rw,relatime shared:9 - nfs4 nas:/export/home rw,vers=4.2,addr=10.0.0.1
41 27 0:41 / /scratch rw,flock - lustre 10.0.0.2@tcp:10.0.0.3@tcp:/scratch rw,lazystatfs
42 27 0:42 / /gpfs/data\\040set rw,relatime - gpfs work rw
43 27 0:43 / /mnt/mfs rw,nosuid - fuse mfs#10.77.0.100:9421 rw,user_id=0
44 27 0:44 / /mnt/ssh rw,nosuid - fuse.sshfs me@pfs:/data rw,user_id=0
46 27 0:46 / /mnt/glu rw,nosuid - fuse.glusterfs pfs:pfsvol rw
47 27 0:47 / /mnt/bee rw - beegfs beegfs_nodev rw,cfgFile=/etc/beegfs/beegfs-client.conf
48 27 0:48 / /mnt/ceph rw - ceph tonari@abc.fs=/ rw,mon_addr=10.0.0.5:6789/10.0.0.6:6789
49 27 0:49 / /mnt/oldceph rw - ceph 10.0.0.5:6789,10.0.0.6:6789:/set rw
50 27 0:50 / /mnt/win rw - cifs //files/set rw,cache=none
51 27 0:51 / /mnt/nine rw - 9p set rw,trans=virtio
52 27 0:52 / /mnt/plain rw - fuse SlowFS rw
53 27 0:53 / /mnt/oci rw - fuse.rclone bucket: rw
"""


@pytest.mark.parametrize(
    ("path", "magic", "name", "server"),
    [
        ("/opt", 0xEF53, "ext4", None),
        ("/home/me", 0x6969, "nfs4", "nas"),
        ("/scratch/set", 0x0BD00BD0, "lustre", "10.0.0.2@tcp:10.0.0.3@tcp"),
        ("/gpfs/data set/a", 0x47504653, "gpfs", None),
        ("/mnt/mfs/a", 0x65735546, "moosefs", "10.77.0.100:9421"),
        ("/mnt/ssh/a", 0x65735546, "fuse.sshfs", "pfs"),
        ("/mnt/glu/a", 0x65735546, "fuse.glusterfs", "pfs"),
        ("/mnt/bee/a", 0x19830326, "beegfs", None),
        ("/mnt/ceph", 0x00C36400, "ceph", "10.0.0.5:6789,10.0.0.6:6789"),
        ("/mnt/oldceph", 0x00C36400, "ceph", "10.0.0.5:6789,10.0.0.6:6789"),
        ("/mnt/win", 0xFE534D42, "cifs", "files"),
        ("/mnt/nine", 0x01021997, "9p", None),
        ("/mnt/plain", 0x65735546, "fuse", None),
        ("/mnt/plain", 0x12345678, "fuse", None),
    ],
)
def test_a_filesystem_is_named_by_its_number_and_its_table_entry(path, magic, name, server):
    found = filesystem_of(Path(path), mountinfo=TABLE)
    assert name_of(found, magic) == (name, ())
    assert server_of(found) == server


@pytest.mark.parametrize(
    ("path", "magic", "name"),
    [("/opt", 0x0BD00BD0, "lustre"), ("/opt", 0x65735546, "fuse"), ("/mnt/ssh", 0xEF53, "ext4")],
)
def test_where_table_and_statfs_differ_statfs_is_believed_and_it_is_said(path, magic, name):
    named, notes = name_of(filesystem_of(Path(path), mountinfo=TABLE), magic)
    assert named == name
    assert "statfs is believed" in notes[0]


def test_without_a_mount_table_statfs_names_the_filesystem():
    named, notes = name_of(filesystem_of(Path("/opt"), mountinfo=""), 0x47504653)
    assert named == "gpfs"
    assert notes == ("no mount table has this path: the name is from statfs",)


@pytest.mark.parametrize(
    ("fs_type", "magic", "options", "cache"),
    [
        ("gpfs", 0x47504653, "rw", "pagepool"),
        ("lustre", 0x0BD00BD0, "rw", "page cache"),
        ("beegfs", 0x19830326, "rw", "unknown"),
        ("zfs", 0x2FC12FC1, "rw", "unknown"),
        ("cifs", 0xFE534D42, "rw,cache=none", "none"),
        ("9p", 0x01021997, "rw", "none"),
        ("9p", 0x01021997, "rw,cache=mmap", "page cache"),
        ("fuse.sshfs", 0x65735546, "rw", "page cache"),
        ("fuse.rclone", 0x65735546, "rw", "unknown"),
    ],
)
def test_where_a_client_keeps_data_follows_from_its_kind(
    monkeypatch, tmp_path, fs_type, magic, options, cache
):
    monkeypatch.setattr("tonari.bench.storage.site.site.statfs_magic", lambda path: magic)
    table = f"27 1 0:27 / / rw,noatime - {fs_type} source {options}\n"
    site = describe_site(tmp_path, mountinfo=table, run=lambda command: None)
    assert (site.name, site.client_cache) == (fs_type, cache)


def test_moosefs_is_shared_under_its_own_name(monkeypatch, tmp_path):
    monkeypatch.setattr("tonari.bench.storage.site.site.statfs_magic", lambda path: 0x65735546)
    site = describe_site(tmp_path, mountinfo="27 1 0:27 / / rw - fuse mfs#master:9421 rw\n")
    assert (site.name, site.is_shared, site.client_cache) == ("moosefs", True, "page cache")


def test_lustre_without_its_tools_is_described_with_an_unknown_layout(monkeypatch, tmp_path):
    monkeypatch.setattr("tonari.bench.storage.site.site.statfs_magic", lambda path: 0x0BD00BD0)
    table = "27 1 0:27 / / rw - lustre 10.0.0.2@o2ib:/scratch rw,flock\n"
    site = describe_site(tmp_path, mountinfo=table, run=lambda command: None)
    assert (site.name, site.layout, site.is_shared) == ("lustre", None, True)
    assert site.mount.server == "10.0.0.2@o2ib"
    assert any("layout unknown" in note for note in site.notes)


def test_data_on_the_metadata_server_is_noted(monkeypatch, tmp_path):
    printed = (Path(__file__).parent / "recorded" / "getstripe_progressive.txt").read_text()
    monkeypatch.setattr("tonari.bench.storage.site.site.statfs_magic", lambda path: 0x0BD00BD0)
    table = "27 1 0:27 / / rw - lustre 10.0.0.2@o2ib:/scratch rw,flock\n"
    site = describe_site(tmp_path, mountinfo=table, run=lambda command: printed)
    assert "the first 262144 bytes of a file lie on the metadata server" in site.notes
    assert msgspec.json.decode(msgspec.json.encode(site), type=Site) == site


def test_this_machines_own_directory_is_described_in_json(tmp_path):
    site = describe_site(tmp_path)
    described = json.loads(msgspec.json.encode(site))
    room = os.statvfs(tmp_path)
    assert described["total_bytes"] == room.f_blocks * room.f_frsize
    assert described["magic"] == statfs_magic(tmp_path)
    assert described["mount"]["options"][0] in ("rw", "ro")
    assert tmp_path.resolve().is_relative_to(site.mount.point)


@pytest.mark.skipif(not Path("/dev/shm").is_dir(), reason="no /dev/shm")
def test_memory_is_told_from_a_disk():
    site = describe_site(Path("/dev/shm"))
    assert (site.name, site.magic, site.is_shared) == ("tmpfs", 0x01021994, False)


def test_a_path_through_a_link_is_described_where_it_leads(tmp_path):
    (tmp_path / "link").symlink_to("/proc")
    assert describe_site(tmp_path / "link").path == "/proc"


def test_a_path_that_is_not_there_is_one_message(tmp_path):
    with pytest.raises(BenchError, match=r"absent: .*No such file.*expected.*check the name"):
        describe_site(tmp_path / "absent")
