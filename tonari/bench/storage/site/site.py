"""Describe what a directory lies on: filesystem, server, mount options, room, layout, cache."""

import os
from pathlib import Path
from typing import Literal

from dataio.base.filesystem import Filesystem, filesystem_of, is_shared
from tonari.bench.errors import BenchError
from tonari.bench.storage.site.gpfs import gpfs_layout
from tonari.bench.storage.site.kernel import statfs_magic
from tonari.bench.storage.site.layouts import RunTool, StripeLayout, run_tool
from tonari.bench.storage.site.lustre import lustre_layout
from tonari.bench.storage.site.record import JsonRecord, Natural

ClientCache = Literal["page cache", "pagepool", "none", "unknown"]

FUSE_MAGIC = 0x65735546

TYPES_BY_MAGIC: dict[int, tuple[str, ...]] = {
    0x0BD00BD0: ("lustre",),
    0x47504653: ("gpfs",),
    0x19830326: ("beegfs", "fhgfs"),
    0x6969: ("nfs", "nfs4"),
    0x00C36400: ("ceph",),
    0xFF534D42: ("cifs", "smb3"),
    0xFE534D42: ("smb3", "cifs"),
    0x01021997: ("9p",),
    0xAAD7AAEA: ("panfs",),
    0x20030528: ("pvfs2", "orangefs"),
    0x7461636F: ("ocfs2",),
    0x01161970: ("gfs2",),
    0x01021994: ("tmpfs", "devtmpfs"),
    0x858458F6: ("ramfs",),
    0xEF53: ("ext4", "ext3", "ext2"),
    0x58465342: ("xfs",),
    0x9123683E: ("btrfs",),
    0x2FC12FC1: ("zfs",),
    0xF2F52010: ("f2fs",),
    0xCA451A4E: ("bcachefs",),
    0x73717368: ("squashfs",),
    0x794C7630: ("overlay",),
}
"""What mount tables call a filesystem that has this number; the first where no table names it."""

PAGE_CACHED = frozenset(
    "lustre nfs nfs4 ceph cifs smb3 gfs2 ocfs2 tmpfs devtmpfs ramfs ext2 ext3 ext4 xfs btrfs f2fs "
    "bcachefs squashfs overlay moosefs virtiofs fuse fuse.sshfs fuseblk".split()
)
"""Types whose client keeps file data in the page cache and nowhere else."""

FUSE_PREFIXES = {"mfs": "moosefs", "sshfs": "fuse.sshfs", "glusterfs": "fuse.glusterfs"}
"""Clients that mount as plain ``fuse`` and name themselves before a # in the source."""


class Mount(JsonRecord, frozen=True, kw_only=True):
    """An entry of the mount table.

    Attributes:
        server: The server of the files, if the entry names it.
        options: Options of the mount, then of the filesystem.
    """

    point: str
    fstype: str
    source: str
    server: str | None
    options: tuple[str, ...]


class Site(JsonRecord, frozen=True, kw_only=True):
    """What a directory lies on.

    Attributes:
        name: Name of the filesystem: ``"lustre"``, ``"moosefs"``, ``"fuse.sshfs"``, ``"ext4"``.
        magic: Its number, as statfs gives it.
        free_bytes: Room for this user, without regard to quotas.
        free_files: Inodes; None on filesystems that do not count them.
        block_bytes: Size of transfers that the filesystem prefers.
        is_shared: Whether other nodes see the same files.
        client_cache: Where this node keeps data of the filesystem that it has read.
        layout: How files are striped, on Lustre and GPFS; None if unknown.
        notes: What a reader should know, each a sentence.
    """

    path: str
    name: str
    magic: int
    mount: Mount
    total_bytes: Natural
    free_bytes: Natural
    free_files: int | None
    block_bytes: Natural
    is_shared: bool
    client_cache: ClientCache
    layout: StripeLayout | None
    notes: tuple[str, ...]


def describe_site(path: Path, *, mountinfo: str | None = None, run: RunTool = run_tool) -> Site:
    """Find out what a directory or file lies on.

    Blocks while tools of the site answer, each for seconds at most; one that is absent leaves
    "unknown" behind.

    Args:
        path: It exists; links are followed.
        mountinfo: Text of a mount table instead of this process's.
        run: Runs the site's tools.

    Raises:
        BenchError: If the path cannot be reached.
    """
    try:
        # The first look at a path may be what mounts it, so the table is read after it.
        magic, status = statfs_magic(path), os.statvfs(path)
    except OSError as error:
        raise BenchError(
            f"{path}: no filesystem can be asked about it: {error.strerror}; expected an existing "
            "directory: check the name, and that this node has it mounted"
        ) from error
    found = filesystem_of(path, mountinfo=mountinfo)
    name, notes = name_of(found, magic)
    resolved = path.resolve()
    layout: StripeLayout | None = None
    if name == "lustre":
        layout = lustre_layout(resolved, run=run)
    elif name == "gpfs":
        layout = gpfs_layout(resolved, block_bytes=status.f_bsize, run=run)
    return Site(
        path=str(resolved), name=name, magic=magic,
        mount=Mount(
            point=str(found.mount_point), fstype=found.type, source=found.source,
            server=server_of(found), options=found.options,
        ),
        total_bytes=status.f_blocks * status.f_frsize,
        free_bytes=status.f_bavail * status.f_frsize,
        free_files=status.f_favail if status.f_files else None,
        block_bytes=status.f_bsize,
        is_shared=name == "moosefs" or is_shared(name),
        client_cache=_client_cache(name, found.options),
        layout=layout,
        notes=(*notes, *_layout_notes(name, layout), *_room_notes(status)),
    )  # fmt: skip


def name_of(found: Filesystem, magic: int) -> tuple[str, tuple[str, ...]]:
    """Name a filesystem by its mount table entry and its magic number; and what is odd about them.

    Where they differ, the number is right: it comes from the path itself, while a table may hide
    what is mounted outside its view.
    """
    if found.type == "fuse" or found.type.startswith("fuse."):
        if magic != FUSE_MAGIC and magic in TYPES_BY_MAGIC:
            return _by_magic(found, magic)
        client, _, server = found.source.partition("#")
        if server and client in FUSE_PREFIXES:
            return FUSE_PREFIXES[client], ()
        is_moosefs = found.type in ("fuse.mfs", "fuse.moosefs", "fuse.mfsmount")
        return ("moosefs" if is_moosefs else found.type), ()
    types = TYPES_BY_MAGIC.get(magic, ())
    if found.type in types or (not types and magic != FUSE_MAGIC):
        return found.type, ()
    if magic == FUSE_MAGIC and found.type in ("virtiofs", "fuseblk"):
        return found.type, ()
    return _by_magic(found, magic)


def _by_magic(found: Filesystem, magic: int) -> tuple[str, tuple[str, ...]]:
    name = "fuse" if magic == FUSE_MAGIC else TYPES_BY_MAGIC[magic][0]
    if found.type == "unknown":
        return name, ("no mount table has this path: the name is from statfs",)
    return name, (
        f"statfs says {name} ({magic:#x}), the mount table {found.type}: statfs is believed",
    )


def server_of(found: Filesystem) -> str | None:
    """Read the server out of a mount's source and options; None where neither has one."""
    source = found.source
    if source.startswith("//"):
        return source[2:].partition("/")[0]
    if "#" in source:
        return source.partition("#")[2] or None
    # Lustre lists servers and their networks, Ceph monitors and their ports: all before ":/".
    before, colon, _ = source.partition(":/")
    if colon and before:
        return before.rpartition("@")[2] if found.type == "fuse.sshfs" else before
    if found.type in ("fuse.sshfs", "fuse.glusterfs") and ":" in source:
        return source.partition(":")[0].rpartition("@")[2]
    named = [option.partition("=")[2] for option in found.options if option.startswith("addr=")]
    named += [
        option.partition("=")[2].replace("/", ",")
        for option in found.options
        if option.startswith("mon_addr=")
    ]
    return named[0] if named else None


def _client_cache(name: str, options: tuple[str, ...]) -> ClientCache:
    if name == "gpfs":
        return "pagepool"
    if name == "9p":
        cached = any(option.startswith(("cache=", "loose", "fscache")) for option in options)
        return "page cache" if cached and "cache=none" not in options else "none"
    if "cache=none" in options:
        return "none"
    # Other FUSE clients may keep data in their own memory or on disk.
    return "page cache" if name in PAGE_CACHED else "unknown"


def _layout_notes(name: str, layout: StripeLayout | None) -> tuple[str, ...]:
    if layout is None:
        asked = {"lustre": "lfs and the lustre.lov attribute", "gpfs": "mmlsattr"}.get(name)
        return (f"layout unknown: {asked} did not show it",) if asked else ()
    if layout.dom_bytes:
        return (f"the first {layout.dom_bytes} bytes of a file lie on the metadata server",)
    return ()


def _room_notes(status: os.statvfs_result) -> tuple[str, ...]:
    notes = []
    if status.f_flag & os.ST_RDONLY:
        notes.append("mounted read-only")
    if status.f_blocks and not status.f_bavail:
        notes.append("no space left for this user")
    return tuple(notes)
