"""A FUSE filesystem of one file, ``data``: ``one_file.py MOUNT_POINT BYTES [option ...]``."""

import errno
import importlib
import stat
import sys

# Optional, and without types.
fuse = importlib.import_module("mfusepy")

NUM_BYTES = int(sys.argv[2])


def getattr_(self, path, fh=None):
    if path == "/":
        return {"st_mode": stat.S_IFDIR | 0o755, "st_nlink": 2}
    if path != "/data":
        raise fuse.FuseOSError(errno.ENOENT)
    return {"st_mode": stat.S_IFREG | 0o644, "st_nlink": 1, "st_size": NUM_BYTES, "st_mtime": 1}


def readdir(self, path, fh):
    return [".", "..", "data"]


def read(self, path, size, offset, fh):
    return bytes(min(size, max(NUM_BYTES - offset, 0)))


if __name__ == "__main__":
    operations = type(
        "OneFile", (fuse.Operations,), {"getattr": getattr_, "readdir": readdir, "read": read}
    )
    options = dict.fromkeys(sys.argv[3:], True)
    fuse.FUSE(operations(), sys.argv[1], foreground=True, fsname="one_file", **options)
