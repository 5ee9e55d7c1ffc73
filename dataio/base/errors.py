"""What can go wrong outside, one class per thing a caller could handle differently."""

from pathlib import Path
from typing import NamedTuple

from dataio.base.location import shown


def install_command(extras: str) -> str:
    """Give the command that adds extras of Tonari to this Python, as it was installed.

    No package index has Tonari. pip takes the one that a wheel installed; a checkout may only lie
    on PYTHONPATH.
    """
    root = Path(__file__).parents[2]
    where = f"-e '{root}" if (root / "pyproject.toml").exists() else "'tonari"
    return f"pip install {where}[{extras}]'"


class About(NamedTuple):
    """The sample that an error is about.

    Attributes:
        sample_id: Its number in the source.
        key: Its key or path, where that is one of its fields; else "".
    """

    sample_id: int
    key: str = ""


class DataioError(Exception):
    """Root of every error that dataio raises for something outside the program.

    Args:
        message: The four parts that a message has: where, found, expected, what to do. URLs in it
            lose what may be a secret.
        on_all_ranks: Whether every rank raises the same error. Then rank 0 alone prints it.
        about: The sample that it is about; None where the message says where the source has it.
    """

    def __init__(
        self, *message: object, on_all_ranks: bool = False, about: About | None = None
    ) -> None:
        super().__init__(*(shown(part) if isinstance(part, str) else part for part in message))
        self.on_all_ranks = on_all_ranks
        self.about = about

    def knowing(self, about: About) -> "DataioError":
        """Make the same error, which knows its sample."""
        return self._made_again(str(self), about)

    def placed(self, place: str) -> "DataioError":
        """Make the same error, whose message begins with where the source has its sample."""
        return self._made_again(f"{place}: {self}", None)

    def _made_again(self, message: str, about: About | None) -> "DataioError":
        # A class of a user's may be made of other arguments: then it is ours that it stands on.
        mine = (each for each in type(self).__mro__ if each.__module__.startswith("dataio."))
        kind: type[DataioError] = next(mine)
        made = kind(message, on_all_ranks=self.on_all_ranks, about=about)
        made.__cause__ = self.__cause__
        return made.with_traceback(self.__traceback__)


class DamagedFileError(DataioError, ValueError):
    """A file of Tonari's own does not match its checksum."""


class SourceError(DataioError):
    """The source is missing, unreadable, truncated or not what its name says."""


class FieldError(DataioError):
    """A sample lacks a field, or a field does not decode to what was declared."""


class CacheError(DataioError):
    """The cache directory cannot be used: not writable, full, or of an unknown format."""


class DamagedCacheError(CacheError):
    """Files of a cache are missing, or not what was written."""


class QuotaError(CacheError):
    """The bytes that a cache may take are too few for what is asked of it."""


class CacheBusyError(CacheError):
    """Another process holds the cache."""


class CacheStagingError(CacheBusyError):
    """Another process has the cache for a while: it stages it, and will share it, or tidies up.

    Attributes:
        directory: The cache.
    """

    def __init__(self, message: str, directory: Path) -> None:
        super().__init__(message)
        self.directory = directory


class OtherDatasetError(CacheError):
    """The cache holds another dataset, or another version of this one."""


class SharedFilesystemError(CacheError):
    """The cache directory lies on a shared filesystem."""


class CorruptRowError(DataioError):
    """The bytes of a row do not match its checksum."""


class ExchangeError(DataioError):
    """Rows that travel between nodes did not arrive, or not as they were sent."""


class WorkerError(DataioError):
    """A user's function raised, or a process that transforms samples ended or cannot be started."""


class StateError(DataioError):
    """A checkpoint cannot be restored into this loader."""


class WorldError(DataioError):
    """The ranks cannot be found, or disagree about who they are."""


class StallError(WorldError):
    """Another rank did not answer within the time limit."""
