"""What reads the bytes of one open file, and of all files behind a kind of URL."""

from typing import NamedTuple, Protocol

from dataio.base.errors import SourceError


class MissingError(SourceError):
    """The server says that there is no such file."""


class DeniedError(SourceError):
    """The server refuses this node's credentials, or what the URL holds of them."""


class ServerError(Exception):
    """A server's answer that is none.

    Attributes:
        status: Of HTTP.
    """

    def __init__(self, status: int, reason: str | None) -> None:
        super().__init__(" ".join(filter(None, [str(status), reason])))
        self.status = status


class Status(NamedTuple):
    """By what a changed file is known."""

    size: int
    mtime_ns: int
    """Time of the last change; 0 where the storage does not know."""
    tag: str = ""
    """The storage's own name for this version of the bytes."""


class FileHandle(Protocol):
    """An open file. Any thread may read. What may pass is raised as in `retry`."""

    @property
    def opened(self) -> Status:
        """What it was when it was opened."""
        ...

    @property
    def watched(self) -> bool:
        """Whether a request may hang."""
        ...

    @property
    def changes_in_place(self) -> bool:
        """Whether its bytes may change under the reader, and asking for its status is cheap."""
        ...

    def status(self) -> Status:
        """Ask for what it is now."""
        ...

    def pread(self, offset: int, length: int) -> bytes:
        """Read, one byte at least where there is one: the caller asks for what is left."""
        ...

    def renew(self) -> None:
        """Open it again, if that helps, before a request is repeated."""
        ...

    def close(self) -> None: ...


class Remote(Protocol):
    """All files behind URLs of one kind."""

    def canonical(self, url: str) -> str:
        """Write a URL so that its last part is the name of the file."""
        ...

    def open(self, url: str) -> FileHandle: ...

    def is_file(self, url: str) -> bool: ...

    def children(self, url: str) -> list[str]:
        """List a directory, as URLs."""
        ...

    def glob(self, url: str) -> list[str]: ...
