"""Agree on which ranks go on after some were lost, by files of a directory that all nodes see.

Ranks that have lost others cannot send each other messages, and a store may have died with its
node. Each writes a file of its own again and again; one of them lists those that still do in a file
that only one can make. So of two halves that do not see each other one alone goes on.
"""

import contextlib
import json
import os
import time
from collections.abc import Callable, Collection
from pathlib import Path

from dataio.base.atomic import write_file
from dataio.base.errors import WorldError

POLL_S = 0.02
APART_S = 1.0
"""How much longer than the rank before it a rank waits before it makes the list."""
BEAT_S, SILENT_S = 0.25, 3.0
"""How often a rank that waits says so; one that has not for so long is lost: as when `torchrun`
ends those that a lost rank leaves on its node."""


class Meeting:
    """One agreement among the ranks of a job.

    Args:
        directory: Of this meeting alone, on a filesystem that every node sees.
        rank: This rank's number when the job began.
        patience_s: How long the first of those that came waits for others. It must be longer than
            a rank takes to notice `is_called`.
        clock: Seconds.
        sleep: Waits for seconds.
    """

    def __init__(
        self,
        directory: Path,
        rank: int,
        *,
        patience_s: float,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self._directory, self._rank, self._patience_s = directory, rank, patience_s
        self._clock, self._sleep = clock, sleep
        self._count = 0

    @property
    def is_called(self) -> bool:
        """Whether a rank has come to it."""
        return self._directory.exists()

    def announce(self) -> None:
        """Say that this rank is alive and will come: it is waited for. From any thread.

        Raises:
            FileNotFoundError: If the job's directory is gone: it has ended.
        """
        self._directory.mkdir(exist_ok=True)
        (self._directory / f"alive-{self._rank}").touch()

    def come(self) -> None:
        """Come, or say that this rank still waits; after `announce`."""
        self._count += 1
        write_file(self._directory / f"rank-{self._rank}", b"%d" % self._count)

    def agree(self, expected: Collection[int], *, timeout_s: float) -> tuple[int, ...]:
        """Wait until it is known who goes on: their numbers, ascending. By every rank that came.

        Args:
            expected: Who may come; when all have, nobody waits any longer.
            timeout_s: Longest wait, also for a rank that was announced and does not come.

        Raises:
            WorldError: If this rank is left out.
        """
        begun_s, beat_s = self._clock(), -BEAT_S
        # Of each rank what it said last, and when that was new here.
        heard: dict[int, tuple[bytes, float]] = {}
        while (met := self._read()) is None:
            waited_s = self._clock() - begun_s
            if waited_s >= beat_s + BEAT_S:
                self.come()
                beat_s = waited_s
                for rank in self._named("rank-"):
                    said = (self._directory / f"rank-{rank}").read_bytes()
                    if said != heard.get(rank, (b"", 0.0))[0]:
                        heard[rank] = said, waited_s
            lately = {rank for rank, (_, at_s) in heard.items() if waited_s - at_s < SILENT_S}
            here = sorted(lately | {self._rank})
            are_due = self._named("alive-") - heard.keys() and waited_s < timeout_s
            patience_s = self._patience_s + APART_S * here.index(self._rank)
            if {*here} >= {*expected} or (waited_s >= patience_s and not are_due):
                self._publish(here)
            else:
                self._sleep(POLL_S)
        if self._rank not in met:
            raise WorldError(
                f"[rank {self._rank}] the others go on without this rank, which came too late or "
                f"did not reach them ({self._directory} has who they are); start it again to join"
            )
        return tuple(met)

    def _named(self, prefix: str) -> set[int]:
        names = [path.name for path in self._directory.iterdir()]
        parts = [name.rpartition("-") for name in names]
        return {int(rank) for name, dash, rank in parts if name + dash == prefix and rank.isdigit()}

    def _read(self) -> list[int] | None:
        with contextlib.suppress(FileNotFoundError):
            return list(json.loads((self._directory / "members").read_bytes()))
        return None

    def _publish(self, ranks: list[int]) -> None:
        mine = self._directory / f"list-{self._rank}"
        write_file(mine, json.dumps(ranks).encode())
        with contextlib.suppress(FileExistsError):  # another rank's list counts
            os.link(mine, self._directory / "members")
