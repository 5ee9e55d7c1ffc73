"""The worlds of a job that goes on when ranks are lost, one after the other.

Gloo lets go of a rank that waits for a lost one only when the connection ends. So a rank that goes
to a meeting shuts all its own: whoever waits for it fails, and comes too.

Newcomers, and ranks that leave, call a meeting as those do that have lost others. So no collective
is needed for them, and nothing is sent while neither comes.
"""

import contextlib
import logging
import os
import shutil
import threading
from collections.abc import Callable, Collection
from datetime import timedelta
from pathlib import Path
from typing import TypeVar

import torch.distributed as dist

from dataio.base.atomic import write_file
from dataio.base.errors import CacheBusyError, WorldError
from dataio.job.connect import connect
from dataio.job.faults import find_cause, is_of_a_peer
from dataio.job.launch import share_cores
from dataio.job.meeting import LeftOutError, Meeting
from dataio.job.numbers import JOIN, begin_job, count_numbers, find_job, making, take_numbers
from dataio.job.sockets import Sockets
from dataio.world import World
from dataio.world.agree import agree
from dataio.world.discover import torch_world
from dataio.world.launchers import Claim, outliving_claim

Result = TypeVar("Result")
log = logging.getLogger(__name__)

LOOK_S = 0.25
"""Between two looks whether another rank has called a meeting."""
NUM_TRIES = 4
"""Meetings that a newcomer calls at most: each disturbs the others."""

AGAIN = "start the same command again"
LEAVES = "[rank %d] live: leaves the job, as it was asked to"


class EndedError(WorldError):
    """The job has ended, without this rank or when it had done its part."""


class Generations:
    """Joins the ranks of a job, and again those that are left and those that come.

    Args:
        directory: That every node sees.
        patience_s: How long ranks that lost others wait for more of them.
        timeout_s: Longest wait for another rank.
        choose: See `dataio.job.live.live`.
        asked: See there.

    Attributes:
        ranks: Those that are there, by their numbers: when the job began, or new ones later.
        num_began: Ranks with which the job began.
        why: They are no longer those that were.
        sockets: Connections that are shut when ranks are lost.
    """

    def __init__(
        self,
        directory: Path,
        *,
        patience_s: float,
        timeout_s: float,
        choose: Callable[[tuple[int, ...], int], tuple[int, ...]],
        asked: Callable[[], bool],
    ) -> None:
        self._choose, self._asked = choose, asked
        self._root = self._directory = directory
        self._patience_s, self._timeout_s = patience_s, timeout_s
        self.ranks: tuple[int, ...] = ()
        self.num_began = 0
        self.why = ""
        self._rank = self._number = 0
        self._meeting: Meeting | None = None
        self.sockets = Sockets()
        self._watched = threading.Event()
        self._reacting = threading.Lock()
        self._is_new = self._is_connecting = self._is_ending = self._is_asked = False
        self._leaves = False

    def first(self) -> World:
        """Join the ranks that the launcher started, and with them the job that runs. Collective.

        Raises:
            StateError: On all ranks, if the job's directory cannot be made, or no job is in it.
            WorldError: If the launcher ends all ranks with the first, not all come, or the job
                does not let them in.
            SystemExit: If the job has ended meanwhile.
        """
        claim, start = outliving_claim(os.environ)
        with self.sockets.noting(watched=True):
            if start:
                world = self._first_of(start, claim)
            else:
                dist.init_process_group("gloo", timeout=timedelta(seconds=self._timeout_s))
                world = torch_world(timeout_s=self._timeout_s)
        self._is_new = bool(os.environ.get(JOIN))
        claims = agree(world, lambda: self._claim(world), doing="naming the job")
        name, first = claims[0].decode().split()
        self._directory, self._rank = self._root / name, int(first) + world.rank
        if self._is_new:
            self._leave()
            return self._join_job(range(int(first), int(first) + world.world_size))
        self.num_began = world.world_size
        self.ranks = tuple(range(self.num_began))
        self._watch()
        return world

    def _first_of(self, start: str, claim: Claim) -> World:
        """Connect ranks that a launcher started without a store."""
        assert claim.world_size is not None, "ranks that outlive others know how many there are"
        with making(self._root):
            world = connect(
                self._root / f"start-{start}", rank=claim.rank, world_size=claim.world_size,
                timeout_s=self._timeout_s, soon_s=self._timeout_s,
            )  # fmt: skip
        share_cores(world)
        return world

    def _claim(self, world: World) -> bytes:
        """Give the job's directory and the first number of these ranks, on the first of them."""
        if world.rank:
            return b""
        if not self._is_new:
            return f"{begin_job(self._root, world.world_size).name} 0".encode()
        directory = find_job(self._root)
        return f"{directory.name} {take_numbers(directory, world.world_size)}".encode()

    def _join_job(self, unit: range) -> World:
        """Come to the next meeting of the job that runs; again if that was just over."""
        members: list[int] = []
        for tries in range(NUM_TRIES):
            try:
                self.num_began = count_numbers(self._directory, 0)
                members = members or [*range(self.num_began)]
                while (met := self._next_meeting(unit).read()) is not None:
                    self._number, members = self._number + 1, met
                self.ranks, self._meeting = tuple(members), self._next_meeting(unit)
                world, self.why = self.go_on("they come", least=1), ""
                log.warning("[rank %d] live: joins ranks %s", self._rank, [*self.ranks])
                return world
            except LeftOutError:
                if tries == NUM_TRIES - 1:
                    raise
            except (EndedError, FileNotFoundError):
                break
        log.warning("[rank %d] live: the job has ended before this rank came", self._rank)
        raise SystemExit(0)

    def _next_meeting(self, unit: range | None = None) -> Meeting:
        return Meeting(
            self._directory / f"meeting-{self._number + 1}", self._rank,
            patience_s=self._patience_s, unit=unit, asked=self._asked, are_enough=self._are_enough,
        )  # fmt: skip

    def _are_enough(self, ranks: Collection[int]) -> bool:
        with contextlib.suppress(WorldError):
            return bool(self._choose(tuple(sorted(ranks)), self.num_began))
        return False

    def are_lost(self, error: BaseException) -> bool:
        """Whether an error means that ranks are lost, rather than that this one is wrong."""
        meeting = self._meeting
        return is_of_a_peer(find_cause(error)) or (meeting is not None and meeting.is_called)

    def fail(self, error: BaseException, *, has_state: bool) -> None:
        """Tell the others that this rank ends by an error of its own: they end too.

        They do not where it is a newcomer that has no state yet: its node may lack what they have.
        Nor where ranks were lost, and one that stands still holds the cache of this node.
        """
        is_locked_out = self._number > 0 and isinstance(error, CacheBusyError)
        with contextlib.suppress(OSError):
            if (self._is_new and not has_state) or is_locked_out:
                self._next_meeting().leave()
                return
            words = f"rank {self._rank} failed: {type(error).__name__}: {error}"
            write_file(self._directory / "failed", words.encode())

    def ask_to_leave(self) -> None:
        """Have this rank leave the job at the end of its step. From a signal's handler, too."""
        self._is_asked = True

    def leave_if_asked(self) -> None:
        """Leave the job if `ask_to_leave` was called; raises what `leave` does."""
        if self._is_asked:
            self.leave()

    def leave(self) -> None:
        """Leave the job: the others go on as `close` is called, and wait for nothing then.

        Raises:
            SystemExit: With status 0. What it closes on its way ends before another takes it up.
        """
        log.warning(LEAVES, self._rank)
        self._leaves = True
        raise SystemExit(0)

    def go_on(self, why: str, *, least: int) -> World:
        """Meet those that are left and those that come, and join them. By all of them.

        Args:
            why: What this rank saw, for messages.
            least: Fewer ranks do not go on.

        Raises:
            LeftOutError: If they go on without this rank.
            EndedError: If the job has ended.
            WorldError: If they do not go on, or cannot connect.
            SystemExit: If this rank was asked to leave.
        """
        before = {*self.ranks}
        failed: tuple[int, ...] = ()
        while True:
            self.leave_if_asked()
            self._check_failed(why)
            met = self._meet(why)
            self._check_failed(why)
            self.ranks = self._choose(met, self.num_began)
            if self._rank not in self.ranks:
                log.warning(
                    "[rank %d] live: ranks %s go on without this one, for which they have no part; "
                    "it ends (%s)", self._rank, [*self.ranks], why,
                )  # fmt: skip
                # torchrun would end the other ranks of this node after any other status.
                raise SystemExit(0)
            if len(self.ranks) < least:
                raise WorldError(
                    f"[rank {self._rank}] live: {len(self.ranks)} ranks are left, expected {least} "
                    f"at least ({why}); {AGAIN}"
                )
            came = {*self.ranks} - before
            self.why = f"ranks {sorted(came)} have come" if came else self._why_fewer(why)
            self._number += 1
            self._is_connecting = True
            self._watch()
            try:
                with self.sockets.noting(watched=True):
                    world = connect(
                        self._directory / f"store-{self._number}",
                        rank=self.ranks.index(self._rank), world_size=len(self.ranks),
                        timeout_s=self._timeout_s,
                    )  # fmt: skip
                self._is_connecting = False
                return world
            except (WorldError, RuntimeError) as error:
                # The others go on without newcomers that cannot connect: those give up.
                if self.ranks == failed and (not came or self._rank not in before):
                    raise WorldError(
                        f"[rank {self._rank}] live: ranks {[*failed]} have met and cannot "
                        f"connect to one another ({error}); {AGAIN}"
                    ) from error
                failed, why = self.ranks, str(error)

    def _meet(self, why: str) -> tuple[int, ...]:
        """Leave the ranks that were, and agree on those that go on."""
        meeting = self._meeting
        assert meeting is not None, "the first world was made, or a job was found"
        is_member = self._rank in self.ranks
        try:
            if is_member:
                meeting.announce()
            self._leave()
            return meeting.agree(self.ranks, timeout_s=self._timeout_s)
        except LeftOutError:
            if not self._asked():
                raise
            log.warning(LEAVES, self._rank)
            raise SystemExit(0) from None
        except FileNotFoundError as error:
            raise EndedError(
                f"[rank {self._rank}] live: the others have ended without this rank ({why})"
            ) from error
        except OSError as error:
            raise WorldError(
                f"[rank {self._rank}] live: ranks were lost ({why}), and those that are left "
                f"cannot meet in {self._directory} ({error}); mend that, and {AGAIN}"
            ) from error

    def _why_fewer(self, why: str) -> str:
        left = self._next_meeting().named("left-")
        return f"ranks {sorted(left)} have left" if left else why

    def end(self, world: World, result: Result) -> Result:
        """End together with all that are left, and return the result. Collective."""
        with self._reacting:
            self._is_ending = True
        world.barrier(doing="ending together")
        if self._rank == self.ranks[0]:
            self._remove()
        return result

    def _remove(self) -> None:
        """Remove the job's directory; renamed, so that nobody who comes writes into it."""
        with contextlib.suppress(OSError):
            ended = self._directory.rename(self._root / f".ended-{self._directory.name}")
            shutil.rmtree(ended, ignore_errors=True)

    def close(self) -> None:
        """Let go of the others, without them."""
        if self._leaves:
            with contextlib.suppress(OSError):
                if self._next_meeting().leave() >= {*self.ranks}:
                    self._remove()
        self._watched.set()
        self._leave()

    def _leave(self) -> None:
        self.sockets.shut()
        if dist.is_initialized():
            dist.destroy_process_group()

    def _check_failed(self, why: str) -> None:
        with contextlib.suppress(FileNotFoundError):
            words = (self._directory / "failed").read_text()
            raise WorldError(f"[rank {self._rank}] live: {words}; the job ends ({why})")

    def _watch(self) -> None:
        """Watch for the next meeting in a thread: its main one may wait for a lost rank."""
        with self._reacting:
            self._watched.set()
            self._watched = watched = threading.Event()
            self._meeting = meeting = self._next_meeting()
            self._is_ending = False

        def look() -> None:
            while not watched.wait(LOOK_S):
                with contextlib.suppress(OSError), self._reacting:
                    # Who waits for a rank at a store does not see that it has gone.
                    is_cut = self.sockets.are_cut()
                    if watched.is_set() or not (is_cut or meeting.is_called):
                        continue
                    # For newcomers alone a job that comes to its end does not begin again, and
                    # ranks that connect go on: they may come again and again.
                    if (not self._is_ending and (is_cut or not self._is_connecting)) or (
                        meeting.named("alive-") | meeting.named("left-")
                    ):
                        # Again and again: more may be made meanwhile.
                        self.sockets.shut()
                        meeting.announce()

        threading.Thread(target=look, daemon=True, name="tonari-live").start()
