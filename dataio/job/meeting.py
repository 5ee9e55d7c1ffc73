"""Agree on which ranks go on after some were lost, by files of a directory that all nodes see.

Ranks that have lost others cannot send each other messages, and a store may have died with its
node. Each writes a file of its own again and again; one of them lists those that still do in a file
that only one can make. So of two halves that do not see each other one alone goes on.

Newcomers call a meeting by coming to it, and never make the list. Who leaves calls one, too.
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
LOOK_AT_MOST_S = 1.0
"""Of a look at the directory: one that takes longer counts as this."""


class LeftOutError(WorldError):
    """The others go on without this rank."""


class Meeting:
    """One agreement among the ranks of a job.

    Args:
        directory: Of this meeting alone, on a filesystem that every node sees.
        rank: This rank's number when the job began.
        patience_s: How long the first of those that came waits for others. It must be longer than
            a rank takes to notice `is_called`.
        unit: Numbers of the newcomers, this one among them, that are listed together or not at all.
        asked: Whether this rank was asked to leave: it is listed only if the others, without all
            that were asked, are not enough.
        are_enough: Whether ranks that were there can go on; asked of one at least.
        clock: Seconds.
        sleep: Waits for seconds.
    """

    def __init__(
        self,
        directory: Path,
        rank: int,
        *,
        patience_s: float,
        unit: range | None = None,
        asked: Callable[[], bool] = lambda: False,
        are_enough: Callable[[Collection[int]], bool] = lambda ranks: True,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self._directory, self._rank, self._patience_s = directory, rank, patience_s
        self._clock, self._sleep = clock, sleep
        self._asked, self._are_enough = asked, are_enough
        self._unit = range(rank, rank + 1) if unit is None else unit
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
        """Come, or say that this rank still waits; after `announce`, unless it is a newcomer.

        Raises:
            FileNotFoundError: If the job's directory is gone: it has ended.
        """
        self._count += 1
        self._directory.mkdir(exist_ok=True)
        said = json.dumps([self._count, self._unit.start, self._unit.stop, self._asked()])
        write_file(self._directory / f"rank-{self._rank}", said.encode())

    def leave(self) -> set[int]:
        """Say that this rank does not come; return all that said so.

        Raises:
            FileNotFoundError: If the job's directory is gone: it has ended.
        """
        self._directory.mkdir(exist_ok=True)
        (self._directory / f"left-{self._rank}").touch()
        return self.named("left-")

    def agree(self, expected: Collection[int], *, timeout_s: float) -> tuple[int, ...]:
        """Wait until it is known who goes on: their numbers, ascending. By every rank that came.

        While this rank can neither read nor write the directory no time passes for it: others
        may be no better off.

        Args:
            expected: The ranks that were; when all but those that left have come, and the whole
                unit of each newcomer, nobody waits any longer, unless some alone were asked to
                leave. Who is not one of them is a newcomer.
            timeout_s: Longest wait of one rank for another. A rank that was announced and does not
                come is waited for as long, and as the patience beyond: it may be in such a wait.

        Raises:
            LeftOutError: If they go on without this rank.
            WorldError: If it is a newcomer, and none comes for as long: they may connect.
            FileNotFoundError: If the job's directory is gone: it has ended.
        """
        members, waited_s, beat_s, before_s = {*expected}, 0.0, -BEAT_S, self._clock()
        # Of each rank what it said last, and when that was new here.
        heard: dict[int, tuple[bytes, float]] = {}
        while (met := self.read()) is None:
            now_s = self._clock()
            waited_s += min(now_s - before_s, LOOK_AT_MOST_S)
            before_s = now_s
            if waited_s >= beat_s + BEAT_S:
                self.come()
                beat_s = waited_s
                for rank in self.named("rank-"):
                    said = b""
                    # NFS lets go of a file that is replaced while it is read.
                    with contextlib.suppress(OSError):
                        said = (self._directory / f"rank-{rank}").read_bytes()
                    if said and said != heard.get(rank, (b"", 0.0))[0]:
                        heard[rank] = said, waited_s
                left = self.named("left-")
                due = self.named("alive-") - heard.keys() - left
            here = {rank for rank, (_, at_s) in heard.items() if waited_s - at_s < SILENT_S}
            said_of = {rank: json.loads(heard[rank][0]) for rank in here}
            units = {rank: {*range(*said_of[rank][1:3])} for rank in here - members}
            stay = {rank for rank in here if not said_of[rank][3]}
            all_came = stay in (here, set()) and here >= members.union(*units.values()) - left
            is_late = waited_s >= self._patience_s + (timeout_s if due else 0.0)
            turn_s = self._patience_s + APART_S * len([r for r in here if r < self._rank])
            if self._rank not in members:
                if waited_s >= self._patience_s + timeout_s and not here & members:
                    raise WorldError(
                        f"[rank {self._rank}] live: no rank of the job has come to "
                        f"{self._directory} within {waited_s:.0f} s: it does not run; start it "
                        "without TONARI_LIVE_JOIN"
                    )
            elif all_came or (is_late and waited_s >= turn_s):
                # Newcomers have no weights.
                given = stay if stay & members and self._are_enough(stay & members) else here
                self._publish(sorted(r for r in given if r in members or given >= units[r]))
                continue
            self._sleep(POLL_S)
        if self._rank not in met:
            raise LeftOutError(
                f"[rank {self._rank}] the others go on without this rank, which came too late or "
                f"did not reach them ({self._directory} has who they are); start it again to join"
            )
        return tuple(met)

    def named(self, prefix: str) -> set[int]:
        """List the ranks of which there is a file."""
        names = [path.name for path in self._directory.iterdir()]
        parts = [name.rpartition("-") for name in names]
        return {int(rank) for name, dash, rank in parts if name + dash == prefix and rank.isdigit()}

    def read(self) -> list[int] | None:
        """Read who goes on; None: it is not known yet."""
        with contextlib.suppress(FileNotFoundError):
            return list(json.loads((self._directory / "members").read_bytes()))
        return None

    def _publish(self, ranks: list[int]) -> None:
        mine = self._directory / f"list-{self._rank}"
        write_file(mine, json.dumps(ranks).encode())
        try:
            os.link(mine, self._directory / "members")
        except FileExistsError:  # another rank's list counts, which this node may see late
            self._sleep(POLL_S)
