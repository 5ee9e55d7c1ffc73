"""Work that the ranks share: all get every part, or all the first error."""

from collections.abc import Callable

from dataio.errors import FieldError, SourceError
from dataio.world import World

ERRORS = {b"S": SourceError, b"F": FieldError}


def agree(world: World, work: Callable[[], bytes], *, doing: str) -> list[bytes]:
    """Gather what the ranks found; if one failed, all raise its error instead of waiting for it.

    Collective.

    Raises:
        SourceError: If the work of any rank raised it.
        FieldError: Likewise.
    """
    try:
        part = b"+" + work()
    except SourceError as error:
        part = b"S" + str(error).encode(errors="replace")
    except FieldError as error:
        part = b"F" + str(error).encode(errors="replace")
    parts = world.allgather(part, doing=doing)
    for found in parts:
        if found[:1] in ERRORS:
            everyones = ERRORS[found[:1]](found[1:].decode())
            everyones.all_ranks = True
            raise everyones
    return [found[1:] for found in parts]
