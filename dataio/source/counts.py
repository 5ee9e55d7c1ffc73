"""What each shard holds, kept on the node so that the next start opens none."""

import json
import logging
import os
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import xxhash

from dataio.base.errors import CacheError
from dataio.base.own import check_own_file, own_subdirectory

log = logging.getLogger(__name__)

RULES = "2"
"""Changes with what is a sample: what was counted by others counts for nothing."""


class Surveyed(NamedTuple):
    """A shard: the samples of its pieces, its bytes and time of change; its marks, flat.

    ``beside`` are bytes and time of change of the file that lies beside it, if it has one;
    ``costs`` a byte for each sample, where they cost differently, in base 64; ``hint`` are bytes
    and time of change of what the counts were taken from, if that was not the shard.
    """

    counts: list[int]
    num_bytes: int
    mtime_ns: int
    marks: list[int]
    beside: Sequence[int] = ()
    costs: str = ""
    hint: Sequence[int] = ()


def own_directory(root: Path) -> Path | None:
    """Choose where this user keeps counts in a cache root that several users may share.

    Returns:
        A directory that is this user's alone, made where it was not there; None where others have
        put theirs in its place, whose counts nobody believes.
    """
    names = ("indexes", f"indexes-{os.getuid()}")
    found = own_subdirectory(root, names)
    if found is None:
        log.warning(
            "%s: is not this user's own, or others may write there: counts of shards are not read "
            "from it, nor kept; remove it, or give another cache directory (cache=..., "
            "TONARI_CACHE)",
            root / names[-1],
        )
    return found


def read_counts(directory: Path, paths: Sequence[str]) -> list[Surveyed] | None:
    """Read what an earlier start found in these shards; None if there is nothing, or it is damaged.

    Whoever uses an entry compares bytes and time with the shard's.
    """
    file = _file(directory, paths)
    try:
        check_own_file(file)
        digest, _, text = file.read_bytes().partition(b"\n")
    except FileNotFoundError:
        return None
    except (CacheError, OSError) as error:
        log.warning(
            "%s: the counts of %d shards cannot be read (%s); they are counted again: make the "
            "directory readable, or remove it",
            file,
            len(paths),
            error,
        )
        return None
    if digest.decode(errors="replace") != xxhash.xxh3_64_hexdigest(text):
        log.warning(
            "%s: damaged, expected the counts of %d shards; they are counted again",
            file,
            len(paths),
        )
        return None
    return [Surveyed(*entry) for entry in json.loads(text)]


def write_counts(directory: Path, paths: Sequence[str], found: Sequence[Surveyed]) -> None:
    """Keep what was found, atomically. A disk that takes no more only costs the next start."""
    text = json.dumps(found).encode()
    try:
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        # Several jobs of a node may write it at once: no name is shared.
        descriptor, partial = tempfile.mkstemp(prefix=".partial-", dir=directory)
        try:
            with open(descriptor, "wb") as file:
                file.write(f"{xxhash.xxh3_64_hexdigest(text)}\n".encode() + text)
            os.replace(partial, _file(directory, paths))
        except OSError:
            Path(partial).unlink()
            raise
    except OSError as error:
        log.warning(
            "%s: the counts of %d shards could not be kept (%s); the next start counts them again: "
            "make the directory writable and free some space",
            directory,
            len(paths),
            error,
        )


def _file(directory: Path, paths: Sequence[str]) -> Path:
    # A relative path means another shard in another working directory.
    names = [RULES, *(path if "://" in path else str(Path(path).absolute()) for path in paths)]
    return directory / f"{xxhash.xxh3_64_hexdigest(json.dumps(names).encode())}.survey"
