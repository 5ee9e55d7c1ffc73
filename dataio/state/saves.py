"""Directories of saves: each appears whole or not at all, and takes the place of nothing else.

A save is written into ``NAME.partial``; what it replaces stays as ``NAME.previous`` until it has
its name. Each has a file MARKER, made before all others and removed after them, by which it is
known: whoever writes holds a lock on it, which dies with the process. What somebody else has put
under these names is never removed. Only rank 0 looks and decides.
"""

import contextlib
import fcntl
import json
import os
import re
import socket
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from dataio.base.atomic import read_record, sync_directory
from dataio.base.errors import DamagedFileError, StateError
from dataio.world import World
from dataio.world.agree import together

MARKER, REPLACED = "tonari-save", "tonari-replaced"
FILE = re.compile(rf"{REPLACED}|(state\.json|mixture\.json|node-\d+\.arrow)(\.partial)?")
PARTIAL, PREVIOUS = ".partial", ".previous"
ELSEWHERE_S = 86400.0
"""Age from which a save that another host was writing is over, whatever the locks say there: some
filesystems' hold on one host alone."""

CURE = "restore an older save, or begin anew"


@contextlib.contextmanager
def replacing(path: Path, world: World, *, parts: Sequence[str] = ()) -> Iterator[Path]:
    """Give a directory to write into, which gets its name when all is written. Collective.

    What earlier saves left beside it when they were killed is removed.

    Args:
        path: Its name; a link is followed.
        world: All ranks.
        parts: Names of the saves that it is to hold.

    Raises:
        StateError: On all ranks, before anything is changed: if something lies there that no save
            wrote. Later: if it cannot be written.
    """
    path = path.resolve()
    partial = _beside(path, PARTIAL)
    with contextlib.ExitStack() as held:

        def begin() -> None:
            _check_free(path)
            with named(path):
                clear(path.parent)
                _remove(partial)
                held.enter_context(_marked(partial, parts))

        def end() -> None:
            with named(path):
                _replace(partial, path)

        together(world, lambda: begin() if world.rank == 0 else None, doing="begin to save")
        yield partial
        together(world, lambda: end() if world.rank == 0 else None, doing="finish saving")


@contextlib.contextmanager
def named(path: Path) -> Iterator[None]:
    """Make an error of writing one that names the directory.

    Raises:
        StateError: If something in it cannot be written.
    """
    try:
        yield
    except OSError as error:
        raise StateError(
            f"{path}: the loader's state cannot be written ({error}), what was saved before is "
            f"still whole; free some space, or give a directory that can be written and that "
            f"every node sees"
        ) from error


def find_save(path: Path, name: str) -> Path:
    """Find the newest whole directory with this file: ``path``, or the one before it after a kill.

    Raises:
        StateError: If neither is there.
    """
    for candidate in (path, path.with_name(path.name + PREVIOUS) if path.name else path):
        if (candidate / name).exists():
            return candidate
    raise StateError(
        f"{path}: no saved loader state here ({name} is missing); give the directory that was "
        f"saved to, on a filesystem that every node sees, or {CURE}"
    )


def read_saved(path: Path) -> dict[str, Any]:
    """Read a record of a save.

    Raises:
        StateError: If it is missing or damaged.
    """
    try:
        return read_record(path)
    except (OSError, DamagedFileError) as error:
        raise lost(path, error) from error


def lost(path: Path, error: OSError | DamagedFileError) -> StateError:
    """Say that a file of a save cannot be used, and what to do."""
    words = str(error)
    if isinstance(error, OSError):
        words = f"{path}: cannot be read ({error}), expected what was saved"
    return StateError(f"{words}; {CURE}")


def clear(directory: Path) -> None:
    """Remove what killed saves left in a directory; errors leave it for the next."""
    with contextlib.suppress(OSError):
        for path in sorted(directory.iterdir()):
            by = path.with_name(path.name.removesuffix(PREVIOUS))
            replaced = path != by and (by / MARKER).exists() and _is_replaced(path)
            over = replaced or path.name.endswith(PARTIAL)
            if over and not _foreign(path) and _is_dead(path):
                _remove(path)


def _beside(path: Path, suffix: str) -> Path:
    return path.with_name(path.name + suffix) if path.name else path


def _check_free(path: Path) -> None:
    """Refuse a place with anything in it that no save wrote.

    Raises:
        StateError: It names the first such thing.
    """
    if path.name.endswith((PARTIAL, PREVIOUS)):
        raise StateError(
            f"{path}: ends in {path.suffix}, as what is left of a killed save does, which the next "
            f"one removes; give it a name of its own, such as {path.with_suffix('')}"
        )
    for place in (path, _beside(path, PARTIAL), _beside(path, PREVIOUS)):
        with named(path):
            other = _foreign(place)
            if not other and place.name.endswith(PREVIOUS) and not _is_replaced(place):
                other = place
        if other is not None:
            raise StateError(
                f"{path}: {other} is of no earlier save, and a save replaces all that lies under "
                "its name; expected a new name, an empty directory or an earlier save alone: give "
                f"it a directory of its own, such as {path / 'loader'}"
            )


def _foreign(place: Path) -> Path | None:
    """Find what no save wrote, in a place that a save may take; None: it is free, or ours."""
    if not os.path.lexists(place):
        return None
    if place.is_symlink() or not place.is_dir():
        return place
    names = sorted(entry.name for entry in place.iterdir() if entry.name != MARKER)
    parts = _owner(place).get("parts")
    if not isinstance(parts, list):
        return place / names[0] if names else None
    for name in names:
        entry = place / name
        if re.sub(r"\.(partial|previous)$", "", name) in parts:
            other = _foreign(entry)
            if other is not None:
                return other
        elif entry.is_symlink() or not entry.is_file() or not FILE.fullmatch(name):
            return entry
    return None


def _is_replaced(directory: Path) -> bool:
    """Whether a save has put it aside, if it holds anything; somebody may have kept one there."""
    names = {entry.name for entry in directory.iterdir()} if directory.exists() else set()
    return REPLACED in names or names <= {MARKER}


def _owner(directory: Path) -> dict[str, object]:
    """Read who began to write a directory; empty: nobody that is known."""
    try:
        return dict(json.loads((directory / MARKER).read_bytes()))
    except (OSError, ValueError, TypeError):
        return {}


@contextlib.contextmanager
def _marked(directory: Path, parts: Sequence[str]) -> Iterator[None]:
    """Make a directory that is known for ours, and locked until this is left."""
    directory.mkdir(parents=True)
    descriptor = os.open(directory / MARKER, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
    try:
        # Before it is known for ours: nobody may find it unlocked. Without locks it is never dead.
        with contextlib.suppress(OSError):
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        written = {"about": "written by save of Tonari", "host": socket.gethostname()}
        os.write(descriptor, json.dumps({**written, "parts": list(parts)}).encode())
        os.fsync(descriptor)
        sync_directory(directory)
        yield
    finally:
        os.close(descriptor)


def _is_dead(directory: Path) -> bool:
    """Whether nobody writes it any more."""
    try:
        descriptor = os.open(directory / MARKER, os.O_RDWR | os.O_CLOEXEC)
    except FileNotFoundError:
        # Empty: its save was killed before it could mark it, or is about to.
        return time.time() - directory.stat().st_mtime > ELSEWHERE_S and not any(
            directory.iterdir()
        )
    except OSError:
        return False
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        age_s = time.time() - os.fstat(descriptor).st_mtime
        return _owner(directory).get("host") == socket.gethostname() or age_s > ELSEWHERE_S
    except OSError:
        return False
    finally:
        os.close(descriptor)


def _replace(partial: Path, path: Path) -> None:
    """Put a whole directory in the place of an older one, which stays beside it until then."""
    older = _beside(path, PREVIOUS)
    if path.exists():
        _remove(older)
        (path / REPLACED).touch()
        # After a power cut nobody would know it for ours, and each later save be refused.
        sync_directory(path)
        os.replace(path, older)
    os.replace(partial, path)
    sync_directory(path.parent)
    _remove(older)


def _remove(directory: Path) -> None:
    """Remove a directory of ours, its marker last. Somebody else may be removing it too."""
    with contextlib.suppress(FileNotFoundError):
        known_by = [directory / REPLACED, directory / MARKER]
        for entry in [each for each in directory.iterdir() if each not in known_by]:
            if entry.is_dir():
                _remove(entry)
            else:
                entry.unlink(missing_ok=True)
        # After a power cut nobody would know what is left without its marker for ours.
        sync_directory(directory)
        for entry in known_by:
            entry.unlink(missing_ok=True)
        directory.rmdir()
