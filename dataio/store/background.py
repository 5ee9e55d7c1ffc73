"""What need not be waited for, done beside training: flush, seal and commit, in this order."""

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor

from dataio.store.files.row_files import RowFiles


class Background:
    """One thread that brings a cache's changes to the disk.

    Args:
        files: What is flushed.
    """

    def __init__(self, files: RowFiles) -> None:
        self._files = files
        self._thread: ThreadPoolExecutor | None = None
        self._seals: list[Future[None]] = []
        self._unsynced = False
        self._commit: Future[None] | None = None

    @property
    def seals(self) -> list[Future[None]]:
        """Flushes and deltas that were asked for since the last were waited for."""
        return self._seals

    def sync(self) -> None:
        """Flush what was written until now."""
        # A flush serves all that was written before it began: those asked for meanwhile are one.
        if not self._unsynced:
            self._unsynced = True
            self._seals.append(self._later(self._sync))

    def seal(self, write: Callable[[], None]) -> None:
        """Write a delta, after all flushes that were asked for."""
        self._seals.append(self._later(write))

    def await_seals(self) -> None:
        """Wait until all of it is durable.

        Raises:
            OSError: If it could not be written.
        """
        seals, self._seals = self._seals, []
        for seal in seals:
            seal.result()

    def commit(self, write: Callable[[], None]) -> None:
        """Write a manifest, after all that was asked for."""
        assert not self.is_committing, "the commit before must be durable first"
        self._commit = self._later(write)

    @property
    def is_committing(self) -> bool:
        """Whether a manifest is being written that nobody has waited for."""
        return self._commit is not None

    def await_commit(self) -> None:
        """Wait until the last commit is durable; raise, once, if it could not be written."""
        commit, self._commit = self._commit, None
        if commit is not None:
            commit.result()

    def close(self) -> None:
        """End the thread, when all that was asked for is done."""
        if self._thread is not None:
            self._thread.shutdown()
            self._thread = None

    def _later(self, work: Callable[[], None]) -> Future[None]:
        if self._thread is None:
            self._thread = ThreadPoolExecutor(1, thread_name_prefix="tonari-cache")
        return self._thread.submit(work)

    def _sync(self) -> None:
        if self._unsynced:
            self._unsynced = False
            self._files.sync()
