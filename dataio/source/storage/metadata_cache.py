"""What formats keep of files, so as not to read it again: bounded, and gone with its storage."""

import threading
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:
    from dataio.source.storage.files import StorageFile

T = TypeVar("T")
State = tuple[int, int] | None
"""Length and time of change of a file; None where nobody looks for a change."""

KEPT_BYTES = 64 << 20


class MetadataCache:
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
        self._values: dict[str, tuple[State, Any]] = {}
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
        return self._get(file.path, (file.size, file.mtime_ns), make, size_of)

    def once(self, path: str, make: Callable[[], T], *, size_of: Callable[[T], int]) -> T:
        """Return what was made of a path, or make it; nobody looks whether the file changed."""
        return self._get(path, None, make, size_of)

    def _get(
        self, path: str, state: State, make: Callable[[], T], size_of: Callable[[T], int]
    ) -> T:
        with self._lock:
            if path in self._values and self._values[path][0] == state:
                kept: T = self._values[path][1]
                self._put(path, state, kept, self._sizes[path])
                return kept
        made = make()
        with self._lock:
            self._put(path, state, made, size_of(made))
            for other in list(self._values)[:-1]:
                if self.num_bytes <= self._most_bytes:
                    break
                del self._values[other], self._sizes[other]
        return made

    def _put(self, path: str, state: State, value: object, num_bytes: int) -> None:
        self._values.pop(path, None)
        self._values[path], self._sizes[path] = (state, value), num_bytes
