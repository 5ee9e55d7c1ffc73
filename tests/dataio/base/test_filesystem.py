"""A path's filesystem by recorded mount tables; a cache directory is the node's own, or refused."""

import os
import stat
from pathlib import Path

import pytest

import dataio.base.filesystem
from dataio.base.errors import CacheError, SharedFilesystemError
from dataio.base.filesystem import (
    cache_directory,
    filesystem_of,
    find_directory,
    room_for,
    scratch_directories,
)

CLUSTER = """\
22 27 0:21 / /proc rw,relatime shared:5 - proc proc rw
27 1 254:0 / / rw,relatime shared:1 - ext4 /dev/vda1 rw,discard
30 27 0:27 / /dev/shm rw,nosuid - tmpfs tmpfs rw,size=24684092k
40 27 0:40 / /home rw,relatime shared:9 - nfs4 nas:/export/home rw,vers=4.2,addr=10.0.0.1
41 27 0:41 / /lustre rw,flock shared:10 master:2 - lustre 10.0.0.2@o2ib:/scratch rw,lazystatfs
42 27 0:42 / /gpfs/data\\040set rw,relatime - gpfs data rw
43 27 0:43 / /mnt/mfs rw,nosuid - fuse mfs#10.77.0.100:9421 rw,user_id=0
44 27 0:44 / /mnt/ssh rw,nosuid - fuse.sshfs pfs:/data rw,user_id=0
45 27 0:45 / /mnt/box ro,nosuid - fuse.squashfuse box.sqsh rw,user_id=0
46 41 253:3 / /lustre/local rw - xfs /dev/nvme0n1 rw
47 27 0:47 / /over rw - nfs nas:/old rw
48 47 253:4 / /over rw - xfs /dev/nvme1n1 rw
49 27 0:49 / /mnt/site rw,nosuid - fuse.site-pfs pfs rw
50 27 0:50 / /var/lib/box rw - overlay overlay rw,lowerdir=/a
"""


@pytest.mark.parametrize(
    ("path", "fs_type", "is_shared"),
    [
        ("/opt/absent/deep", "ext4", False),
        ("/home/somebody/x", "nfs4", True),
        ("/homeless", "ext4", False),
        ("/lustre/project", "lustre", True),
        ("/lustre/local/cache", "xfs", False),
        ("/gpfs/data set/a", "gpfs", True),
        ("/mnt/mfs", "fuse", True),
        ("/mnt/ssh/a", "fuse.sshfs", True),
        ("/mnt/site/a", "fuse.site-pfs", True),
        ("/mnt/box/a", "fuse.squashfuse", False),
        ("/over/a", "xfs", False),
        ("/var/lib/box/a", "overlay", False),
    ],
)
def test_the_deepest_latest_mount_decides(path: str, fs_type: str, is_shared: bool) -> None:
    found = filesystem_of(Path(path), mountinfo=CLUSTER)
    assert (found.type, found.is_shared) == (fs_type, is_shared)


def test_links_are_followed(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to("/lustre/project")
    assert filesystem_of(tmp_path / "link" / "a", mountinfo=CLUSTER).type == "lustre"


def test_without_a_mount_table_nothing_is_called_shared() -> None:
    assert filesystem_of(Path("/a"), mountinfo="")[:2] == ("unknown", False)


@pytest.fixture
def mount_all_as(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """Let everything under tmp_path/lustre lie on Lustre."""
    for name in (
        *dataio.base.filesystem.SCRATCH_VARIABLES,
        "TONARI_CACHE",
        "TONARI_ALLOW_SHARED_CACHE",
    ):
        monkeypatch.delenv(name, raising=False)
    table = tmp_path / "mountinfo"
    table.write_text(
        "27 1 254:0 / / rw - ext4 /dev/vda1 rw\n"
        f"41 27 0:41 / {tmp_path}/lustre rw - lustre mds@tcp:/scratch rw\n"
    )
    monkeypatch.setattr(dataio.base.filesystem, "MOUNTINFO", table)
    (tmp_path / "lustre").mkdir()
    return tmp_path


def test_an_explicit_directory_is_taken_and_created_private(mount_all_as: Path) -> None:
    directory = cache_directory(str(mount_all_as / "a" / "b"))
    assert directory == mount_all_as / "a" / "b"
    assert stat.S_IMODE(directory.stat().st_mode) == 0o700


def test_auto_prefers_the_variable_then_local_scratch(
    mount_all_as: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TMPDIR", str(mount_all_as / "lustre"))
    monkeypatch.setenv("SLURM_TMPDIR", str(mount_all_as))
    assert cache_directory("auto") == mount_all_as / f"tonari-{os.getuid()}"
    monkeypatch.setenv("TONARI_CACHE", str(mount_all_as / "mine"))
    assert cache_directory(None) == mount_all_as / "mine"


def test_a_schedulers_own_directory_comes_before_tmpdir(
    mount_all_as: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    paths = {name: mount_all_as / name for name in dataio.base.filesystem.SCRATCH_VARIABLES}
    for name, path in paths.items():
        monkeypatch.setenv(name, str(path))
    paths["TMPDIR"].mkdir()
    assert find_directory(None).parent == paths["TMPDIR"]
    for name in ("PBS_LOCALDIR", "T4TMPDIR", "SGE_LOCALDIR", "PJM_LOCALTMP", "SLURM_TMPDIR"):
        paths[name].mkdir()
        assert find_directory(None).parent == paths[name]
        paths[name].rmdir()


def test_each_directory_that_is_not_taken_has_its_reason(
    mount_all_as: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PBS_LOCALDIR", str(mount_all_as / "absent"))
    monkeypatch.setenv("T4TMPDIR", str(mount_all_as / "lustre"))
    monkeypatch.setenv("TMPDIR", str(mount_all_as))
    assert [(scratch.name, scratch.against) for scratch in scratch_directories()] == [
        ("PBS_LOCALDIR", "is not there"), ("T4TMPDIR", "is shared (lustre)"), ("TMPDIR", ""),
        ("", ""),
    ]  # fmt: skip
    assert find_directory(None).parent == mount_all_as


def test_a_shared_filesystem_is_refused_unless_vouched_for(
    mount_all_as: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    directory = mount_all_as / "lustre" / "cache"
    with pytest.raises(SharedFilesystemError, match=r"lies on lustre \(mds@tcp.*local disk"):
        cache_directory(str(directory))
    assert not directory.exists()
    monkeypatch.setenv("TONARI_ALLOW_SHARED_CACHE", "1")
    assert cache_directory(str(directory)).is_dir()


def test_a_directory_that_cannot_be_made_is_refused(mount_all_as: Path) -> None:
    (mount_all_as / "file").touch()
    with pytest.raises(CacheError, match=r"cannot be created: Not a directory; .*TONARI_CACHE"):
        cache_directory(str(mount_all_as / "file" / "a"))


def test_a_directory_that_cannot_be_written_is_refused(
    mount_all_as: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Root may write anywhere, so the system's answer is replaced, not the directory's mode.
    monkeypatch.setattr(os, "access", lambda *_: False)
    with pytest.raises(CacheError, match=r"is not writable for user .*make it writable"):
        cache_directory(str(mount_all_as))


def test_auto_refuses_another_users_directory(
    mount_all_as: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TMPDIR", str(mount_all_as))
    cache_directory("auto")
    uid = os.getuid()
    (mount_all_as / f"tonari-{uid}").rename(mount_all_as / f"tonari-{uid + 1}")
    monkeypatch.setattr(os, "getuid", lambda: uid + 1)
    with pytest.raises(CacheError, match=f"belongs to user {uid}, not to this one"):
        cache_directory("auto")


def test_room_is_what_is_free_less_a_reserve(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    status = os.statvfs(tmp_path)
    free = status.f_bavail * status.f_frsize
    monkeypatch.setattr(dataio.base.filesystem, "MOUNTINFO", tmp_path / "none")
    monkeypatch.setattr(os, "statvfs", lambda _: status)
    assert room_for(tmp_path, 1000, reserve_bytes=10) == free - 1010
    with pytest.raises(CacheError, match=r"needs .* MB, free .* on the filesystem, reserve .*give"):
        room_for(tmp_path, free, reserve_bytes=1)


def test_a_cache_in_memory_counts_against_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    table = tmp_path / "mountinfo"
    table.write_text(f"41 1 0:41 / {tmp_path} rw - tmpfs tmpfs rw\n")
    monkeypatch.setattr(dataio.base.filesystem, "MOUNTINFO", table)
    monkeypatch.setattr(dataio.base.filesystem, "memory_room", lambda: 5_000_000)
    assert room_for(tmp_path, 1_000_000, reserve_bytes=0) == 4_000_000
    with pytest.raises(
        CacheError, match=r"needs 6\.0 MB, free 5\.0 MB in memory, which holds tmpfs"
    ):
        room_for(tmp_path, 6_000_000, reserve_bytes=0)
    free = os.statvfs(tmp_path).f_bavail * os.statvfs(tmp_path).f_frsize
    monkeypatch.setattr(dataio.base.filesystem, "memory_room", lambda: free + 1)
    room_for(tmp_path, free * 2 // 3, reserve_bytes=0)
    assert "lies in memory (tmpfs)" in caplog.text
