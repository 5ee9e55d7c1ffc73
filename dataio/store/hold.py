"""Who may use a cache's directory, and for what: its lock, and what it says that it holds."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

from dataio.base.atomic import write_record
from dataio.base.errors import CacheBusyError, CacheStagingError, OtherDatasetError
from dataio.base.own import check_readable, make_own
from dataio.store.lock import CacheLock, Mode, owners
from dataio.store.manifest_files import Identity, read_meta


class Hold:
    """A directory held by this process, or by its node's leader for it.

    Args:
        directory: The node's own directory of this dataset.
        identity: What it must hold.
    """

    def __init__(self, directory: Path, identity: Identity) -> None:
        self._directory = directory
        self._identity = identity
        self._lock = CacheLock(directory)

    @property
    def shared(self) -> bool:
        """Whether other jobs read it too, so that nothing may be written."""
        return self._lock.shared

    def follow(self, *, shared: bool) -> None:
        """See it as the leader does, who has the lock."""
        self._lock.shared = shared

    def share(self) -> None:
        """Let other jobs read it from now on. Leader only."""
        self._lock.share()

    def upgrade(self) -> None:
        """Have it alone again. Leader only.

        Raises:
            CacheBusyError: If other jobs read it.
        """
        self._lock.upgrade("staging")

    def keep_alone(self) -> None:
        """Show other jobs that it is never shared, so that none waits for it. Leader only."""
        self._lock.sign("exchanging")

    def busy(self, why: str) -> CacheBusyError:
        """Make the error that names who uses it."""
        return self._lock.busy(why)

    def release(self) -> None:
        """Let go of it; idempotent."""
        self._lock.release()

    def enter(self, *, exchanging: bool, read_only: bool) -> None:
        """Create or adopt the directory, and lock it; see `opening.prepare`."""
        for attempt in range(3):
            try:
                if read_only:
                    check_readable(self._directory)
                else:
                    make_own(self._directory)
                self._take_lock(exchanging=exchanging, read_only=read_only)
                return
            except FileNotFoundError:
                # Somebody who tidied up removed it, unused as it was, between the two.
                if read_only or attempt == 2:
                    raise

    def _take_lock(self, *, exchanging: bool, read_only: bool) -> None:
        mode: Mode = "exchanging" if exchanging else "staging"
        if not read_only and self._lock.take(mode):
            return
        if not exchanging and self._lock.join():
            return
        busy = self._lock.busy("is in use")
        soon_free: set[Mode] = {"verifying", "pruning", "exporting"}
        if {owner.mode for owner in owners(self._directory)} <= (
            soon_free if exchanging else soon_free | {"staging"}
        ):
            raise CacheStagingError(str(busy), self._directory)
        raise busy

    def is_another(self, *, is_new: bool, holds_rows: Callable[[], bool]) -> bool:
        """Whether it was begun for something else, and holds nothing of that.

        What is new is signed; what is another's becomes this dataset's by `sign`.

        Args:
            is_new: Whether nothing was ever committed.
            holds_rows: Returns whether it holds any row.

        Raises:
            OtherDatasetError: If it holds rows of something else.
            CacheBusyError: If it is another dataset's, and other jobs read it.
        """
        expected, identity = self._identity.to_json(), self._identity
        if not (self._directory / "meta.json").exists():
            if not self.shared and is_new:
                self.sign()
                return False
            # What the rows are of is not known: those of another version would look alike.
            found: dict[str, Any] = {"source": "rows", "fingerprint": "that is lost with meta.json"}
        else:
            found = read_meta(self._directory)
        # The source's name is for messages: what it holds is in the fingerprint.
        named = {**found, "source": expected["source"]}
        if named == expected:
            return False
        is_shorter = found["fingerprint"] in identity.prefixes
        if is_shorter and {**named, "fingerprint": identity.fingerprint} == expected:
            if not self.shared:
                self.sign()
            return False
        if self.shared:
            raise self.busy(f"holds {found['fingerprint']}, not this dataset, and is in use")
        if holds_rows():
            is_changed = found["fingerprint"] != identity.fingerprint
            what = "its files have changed" if is_changed else "other fields of it are read"
            if is_changed and identity.prefixes:
                what += ", or some came after this job had listed them: then start it again"
            raise OtherDatasetError(
                f"{self._directory}: the cache holds {found['source']} with fingerprint "
                f"{found['fingerprint']}, but {identity.source} now has {identity.fingerprint}: "
                f"{what}; to stage it anew remove the directory on each node, or give another "
                f"cache directory (cache=..., data.cache.path); if files were lost or damaged "
                f"bring them back: the cache may be their last copy (`tonari cache export`)"
            )
        return True

    def sign(self) -> None:
        """Write what it holds from now on."""
        write_record(self._directory / "meta.json", self._identity.to_json())
