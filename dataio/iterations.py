"""What iterating means next: go on with the epoch, begin the next one, or a mistake."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Literal

from dataio.base.errors import StateError

Start = Literal["go on", "again", "next epoch"]


class Iterations:
    """Follows who begins the epochs of something that is iterated.

    Args:
        of: What it is, for messages.
    """

    def __init__(self, of: str) -> None:
        self._of = of
        self._leader: object | None = None
        self._is_asked = self._has_ended = False

    @contextmanager
    def led(self) -> Iterator[None]:
        """Have epochs begun by a loop of their own, for as long as it runs."""
        me = self._leader = object()
        try:
            yield
        finally:
            # One that is left later than another began does not lead any more.
            if self._leader is me:
                self._leader = None

    def ask(self) -> None:
        """Take notice that the running epoch was asked for by its number."""
        self._is_asked = True

    def begin_epoch(self) -> None:
        """Take notice that an epoch begins, or goes on after a restore."""
        self._has_ended = False

    def end(self) -> None:
        """Take notice that an iteration came to the epoch's end."""
        self._has_ended = True

    def start(self, epoch: int, *, is_used_up: bool) -> Start:
        """Decide how an iteration starts.

        Args:
            epoch: The running epoch.
            is_used_up: Whether all its batches were delivered.

        Raises:
            StateError: If it has none left, and another loop begins the epochs.
        """
        is_asked, self._is_asked = self._is_asked, False
        if not is_used_up:
            return "go on"
        if self._leader is None:
            return "again" if is_asked else "next epoch"
        if self._has_ended:
            raise StateError(
                f"{self._of}: epoch {epoch} has no batch left, and epochs() begins the next one; "
                f"expected one loop over the {self._of.lower()} in each epoch; take out the other, "
                "or leave epochs() out: each loop is then the next epoch"
            )
        return "go on"
