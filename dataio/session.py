"""One dataset open on one node: its source, the node's rows of it, and the batches made of them.

A `Loader`, an `Evaluation` and a replay hold one each. The number of its samples never changes:
data that grows ends one session and begins the next.
"""

import contextlib

from dataio.batch.gather import Gather
from dataio.store.checked_source import AreExcluded, no_rows
from dataio.store.open import NodeRows
from dataio.store.pool import Pool


class Session:
    """Rows and batches of a source. Construction is collective; nothing is staged by it.

    Args:
        rows: Which.
        pinned: Make batches in memory that a GPU copies from without waiting.
        are_excluded: int64[n] samples -> bool[n]: whether no epoch shows them, so that nobody minds
            what is wrong with them.
        replica: Whose batches are made; None: this rank's.
        earlier: The session of the same source while it had fewer samples, closed before.

    Attributes:
        source: The source.
        fields: The fields.
        pool: The node's rows.
        gather: Makes batches.

    Raises:
        DataioError: If the cache cannot be used.
    """

    def __init__(
        self,
        rows: NodeRows,
        *,
        pinned: bool = False,
        are_excluded: AreExcluded = no_rows,
        replica: int | None = None,
        earlier: "Session | None" = None,
    ) -> None:
        self.source = rows.source
        self.fields = rows.fields
        self.arguments = rows.arguments
        self.world = rows.world
        # Whoever catches an error may try again in this process: the cache must not stay locked.
        with contextlib.ExitStack() as undo:
            self.pool: Pool = Pool(
                rows, are_excluded, earlier=earlier.pool if earlier is not None else None
            )
            undo.callback(self.pool.close)
            self.gather = Gather(self.pool, rows.arguments, pinned=pinned, replica=replica)
            undo.pop_all()

    def close(self) -> None:
        """Stop threads and processes, and let go of the cache; idempotent."""
        self.gather.close()
        self.pool.close()
