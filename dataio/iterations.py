"""What iterating means next: go on with the epoch, begin the next one, or a mistake."""

import threading
import weakref
from collections.abc import Generator, Iterator
from contextlib import contextmanager
from typing import Any, Generic, Literal, TypeVar

from dataio.base.errors import StateError

Start = Literal["go on", "again", "next epoch"]
T = TypeVar("T")


class OneLoop:
    """Lets one loop at a time take batches of something whose loops share one place.

    A loop that begins breaks off the one before: going on with that one is an error, as what would
    be its next batch is the new loop's.

    Args:
        of: What is iterated, for messages.

    Attributes:
        taking: Held by the loop that takes a batch; whoever holds it alone changes `newest`.
        newest: The loop under way. Weak: a loop that nobody holds ends at once, and what it has
            made ahead is freed.
    """

    def __init__(self, of: str) -> None:
        self._of = of
        self.taking = threading.Lock()
        self.newest: weakref.ref[Loop[Any]] | None = None

    def break_off(self) -> None:
        """End the loop under way, if any, as the place that it goes by changes.

        Raises:
            StateError: If another thread is taking a batch.
        """
        if self.newest is None:  # so it is too while a loop's first batch begins an epoch
            return
        if not self.taking.acquire(blocking=False):
            raise self.error("another loop was to begin, or the place to change, meanwhile")
        try:
            self.end_newest()
        finally:
            self.taking.release()

    def end_newest(self) -> None:
        """Break off the loop under way, if any. By whoever holds `taking`."""
        loop = self.newest() if self.newest is not None else None
        self.newest = None
        if loop is not None:
            loop.break_off()

    def error(self, found: str) -> StateError:
        """Make the error of a batch that may not be taken now."""
        return StateError(
            f"{self._of}: a batch was asked for, and {found}; expected one loop at a time, as all "
            f"loops over one {self._of.lower()} share its place; take batches in one loop and "
            f"thread, or make another {self._of.lower()} for the other"
        )


class Loop(Iterator[T], Generic[T]):
    """Yields batches until another loop over the same place begins.

    Args:
        one: Lets one loop at a time take batches.
        batches: The batches.
    """

    def __init__(self, one: OneLoop, batches: Generator[T, None, None]) -> None:
        self._one, self._batches = one, batches
        self.state: Literal["new", "begun", "ended", "broken off"] = "new"

    def __next__(self) -> T:
        """Take the next batch.

        Raises:
            StateError: If another loop has begun since, the place was changed, or another thread
                takes a batch now.
        """
        one = self._one
        if not one.taking.acquire(blocking=False):
            raise one.error("another thread or a transform is taking one")
        try:
            if self.state == "broken off":
                raise one.error(
                    "its loop was broken off, as another loop began, or refresh, skip, set_epoch "
                    "or a restore changed the place"
                )
            if self.state == "begun":
                return next(self._batches)
            if self.state == "new":
                one.end_newest()
            batch = next(self._batches)
            self.state = "begun"
            one.newest = weakref.ref(self)
            return batch
        except StopIteration:
            self.state = "ended"
            raise
        finally:
            one.taking.release()

    def break_off(self) -> None:
        """End it: to go on with it is an error."""
        self._batches.close()
        if self.state != "ended":
            self.state = "broken off"


class Iterations(OneLoop):
    """Follows who begins the epochs of something that is iterated.

    Args:
        of: What it is, for messages.
    """

    def __init__(self, of: str) -> None:
        super().__init__(of)
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
        self.break_off()
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
