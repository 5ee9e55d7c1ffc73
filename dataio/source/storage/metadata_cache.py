"""What formats keep of files, so as not to read it again: bounded, and never of a changed file."""

import threading
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:
    from dataio.source.storage.files import StorageFile

T = TypeVar("T")

KEPT_BYTES = 64 << 20


class Kept:
    """By path, the values that were made last. Thread-safe.

    The newest is kept whatever its size: whoever made it holds it all the same. Two threads that
    ask for the same file at once may both make its value.

    Args:
        most_bytes: Of all values together.
    """

    def __init__(self, most_bytes: int = KEPT_BYTES) -> None:
        self._most_bytes = most_bytes
        # Guards the three below; ordered by their last use.
        self._lock = threading.Lock()
        self._values: dict[str, tuple[tuple[int, int], Any]] = {}
        self._sizes: dict[str, int] = {}

    @property
    def num_bytes(self) -> int:
        """Of all that is kept."""
        return sum(self._sizes.values())

    def get(self, file: "StorageFile", make: Callable[[], T], *, size_of: Callable[[T], int]) -> T:
        """Return what was made of this file, or make it.

        Args:
            file: It is open; a value of another length or time of change counts for nothing.
            make: Reads the file. Called by one kind of format alone for each path.
            size_of: Bytes in memory of what was made.
        """
        state = (file.size, file.mtime_ns)
        with self._lock:
            then, found = self._values.get(file.path, (None, None))
            if then == state:
                self._put(file.path, state, found, self._sizes[file.path])
                kept: T = found  # type: ignore[assignment]
                return kept
        made = make()
        with self._lock:
            self._put(file.path, state, made, size_of(made))
            for path in list(self._values)[:-1]:
                if self.num_bytes <= self._most_bytes:
                    break
                del self._values[path], self._sizes[path]
        return made

    def _put(self, path: str, state: tuple[int, int], value: object, num_bytes: int) -> None:
        self._values.pop(path, None)
        self._values[path], self._sizes[path] = (state, value), num_bytes
