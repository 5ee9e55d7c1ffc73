"""Work that the ranks share: all get every part, or all the first error."""

from collections.abc import Callable
from typing import TypeVar

from dataio.base.errors import DataioError, FieldError, SourceError, StateError
from dataio.world import World

Result = TypeVar("Result")
ERRORS: dict[bytes, type[DataioError]] = {b"S": SourceError, b"F": FieldError, b"T": StateError}


def agree(world: World, work: Callable[[], bytes], *, doing: str) -> list[bytes]:
    """Gather what the ranks found; if one failed, all raise its error instead of waiting for it.

    Collective.

    Raises:
        SourceError: If the work of any rank raised it.
        FieldError: If the work of any rank raised it.
        StateError: If the work of any rank raised it.
    """
    try:
        part = b"+" + work()
    except tuple(ERRORS.values()) as error:
        kind = next(kind for kind, its in ERRORS.items() if isinstance(error, its))
        part = kind + str(error).encode(errors="replace")
    parts = world.allgather(part, doing=doing)
    for found in parts:
        if found[:1] in ERRORS:
            raise ERRORS[found[:1]](found[1:].decode(), on_all_ranks=True)
    return [found[1:] for found in parts]


def together(world: World, work: Callable[[], Result], *, doing: str) -> Result:
    """Work on every rank; if one failed, all raise its error. Collective.

    Raises:
        DataioError: As `agree`.
    """
    done: list[Result] = []

    def act() -> bytes:
        done.append(work())
        return b""

    agree(world, act, doing=doing)
    return done[0]
