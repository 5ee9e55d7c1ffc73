"""The worlds of a job that goes on when ranks are lost, one after the other.

Gloo lets go of a rank that waits for a lost one only when the connection ends. So a rank that goes
to a meeting shuts all its own: whoever waits for it fails, and comes too.
"""

import contextlib
import logging
import os
import shutil
import socket
import stat
import threading
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import TypeVar

import torch.distributed as dist
from torch.distributed import TCPStore  # type: ignore[attr-defined]

from dataio.base.atomic import write_file
from dataio.base.errors import StateError, WorldError
from dataio.job.faults import find_cause, is_of_a_peer
from dataio.job.meeting import POLL_S, Meeting
from dataio.world import World
from dataio.world.agree import together
from dataio.world.discover import torch_world

Result = TypeVar("Result")
log = logging.getLogger(__name__)
LOOK_S = 0.25
"""Between two looks whether another rank has called a meeting."""

AGAIN = "start the same command again"


class Generations:
    """Joins the ranks of a job, and again those that are left.

    Args:
        directory: That every node sees.
        patience_s: How long ranks that lost others wait for more of them.
        timeout_s: Longest wait for another rank.
        choose: See `dataio.job.live.live`.

    Attributes:
        ranks: Those that are there, by their numbers when the job began.
    """

    def __init__(
        self,
        directory: Path,
        *,
        patience_s: float,
        timeout_s: float,
        choose: Callable[[tuple[int, ...]], tuple[int, ...]],
    ) -> None:
        self._choose = choose
        self._root = self._directory = directory
        self._patience_s, self._timeout_s = patience_s, timeout_s
        self.ranks: tuple[int, ...] = ()
        self._rank = self._number = 0
        self._meeting: Meeting | None = None
        self._sockets: list[socket.socket] = []
        self._shutting = threading.Lock()
        self._watched = threading.Event()

    def first(self) -> World:
        """Join the ranks that the launcher started. Collective.

        Raises:
            StateError: On all ranks, if the job's directory cannot be made.
            WorldError: If the launcher did not start them as torchrun does.
        """
        missing = [name for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
                   if name not in os.environ]  # fmt: skip
        if missing:
            raise WorldError(
                f"live: {', '.join(missing)} are not set, expected what torchrun sets: MPI ends "
                "all ranks with the first that is lost; start the ranks by torchrun, one on each "
                "node, or leave live out"
            )
        with self.noting_sockets():
            dist.init_process_group("gloo", timeout=timedelta(seconds=self._timeout_s))
            world = torch_world(timeout_s=self._timeout_s)
        self._rank, self.ranks = world.rank, tuple(range(world.world_size))
        # Of this start alone: what an earlier one left says nothing about it.
        names = world.allgather(f"live-{os.urandom(4).hex()}".encode(), doing="naming the job")
        self._directory = self._root / names[0].decode()
        together(world, self._make_directory, doing="making the job's directory")
        self._watch()
        return world

    def _make_directory(self) -> None:
        try:
            if self._rank == 0:
                self._directory.mkdir(parents=True)
        except OSError as error:
            raise StateError(
                f"live: {self._directory} cannot be made ({error}); give a directory on a "
                "filesystem that every node sees, and that can be written"
            ) from error

    def are_lost(self, error: BaseException) -> bool:
        """Whether an error means that ranks are lost, rather than that this one is wrong."""
        meeting = self._meeting
        return is_of_a_peer(find_cause(error)) or (meeting is not None and meeting.is_called)

    def fail(self, error: BaseException) -> None:
        """Tell the others that this rank ends by an error of its own: they end too."""
        with contextlib.suppress(OSError):
            words = f"rank {self._rank} failed: {type(error).__name__}: {error}"
            write_file(self._directory / "failed", words.encode())

    def go_on(self, why: str, *, least: int) -> World:
        """Meet those that are left, and join them. By all of them.

        Args:
            why: What this rank saw, for messages.
            least: Fewer ranks do not go on.

        Raises:
            WorldError: If they do not, go on without this one, or cannot connect.
        """
        while True:
            meeting, expected = self._meeting, self.ranks
            assert meeting is not None, "the first world was made"
            self._check_failed(why)
            met = self._meet(meeting, why)
            self._check_failed(why)
            self.ranks = self._choose(met)
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
            self._number += 1
            self._watch()
            try:
                return self._join()
            except (WorldError, RuntimeError) as error:
                if self.ranks == expected:  # nobody was lost meanwhile
                    raise WorldError(
                        f"[rank {self._rank}] live: ranks {[*expected]} have met and cannot "
                        f"connect to one another ({error}); {AGAIN}"
                    ) from error
                why = str(error)

    def _meet(self, meeting: Meeting, why: str) -> tuple[int, ...]:
        """Leave the ranks that were, and agree on those that go on."""
        try:
            meeting.announce()
            self._leave()
            meeting.come()
            return meeting.agree(self.ranks, timeout_s=self._timeout_s)
        except FileNotFoundError as error:
            raise WorldError(
                f"[rank {self._rank}] live: the others have ended without this rank ({why})"
            ) from error
        except OSError as error:
            raise WorldError(
                f"[rank {self._rank}] live: ranks were lost ({why}), and those that are left "
                f"cannot meet in {self._directory} ({error}); mend that, and {AGAIN}"
            ) from error

    def end(self, world: World, result: Result) -> Result:
        """End together with all that are left, and return the result. Collective."""
        try:
            world.barrier(doing="ending together")
        except WorldError:
            if self._directory.exists():
                raise
            return result  # another rank has passed: all had come
        if self._rank == self.ranks[0]:
            shutil.rmtree(self._directory, ignore_errors=True)
        return result

    def close(self) -> None:
        """Let go of the others, without them."""
        self._watched.set()
        self._leave()

    def _leave(self) -> None:
        self._shut()
        if dist.is_initialized():
            dist.destroy_process_group()

    def _join(self) -> World:
        """Make the default group and the world of `ranks`. Collective."""
        limit, size = timedelta(seconds=self._timeout_s), len(self.ranks)
        file = self._directory / f"store-{self._number}"
        with self.noting_sockets():
            if self._rank == self.ranks[0]:
                # As at the start where all are of one node: its own name may lead nowhere.
                host = os.environ["MASTER_ADDR"]
                host = host if host in ("127.0.0.1", "localhost") else socket.gethostname()
                store = TCPStore(
                    host, 0, size, is_master=True, timeout=limit, wait_for_workers=False
                )
                write_file(file, f"{host} {store.port}".encode())
            else:
                host, port = self._read(file).split()
                store = TCPStore(host, int(port), size, timeout=limit)
            rank = self.ranks.index(self._rank)
            dist.init_process_group("gloo", store=store, rank=rank, world_size=size, timeout=limit)
            return torch_world(timeout_s=self._timeout_s)

    def _read(self, file: Path) -> str:
        until_s = time.monotonic() + self._timeout_s
        while time.monotonic() < until_s:
            with contextlib.suppress(FileNotFoundError):
                return file.read_text()
            time.sleep(POLL_S)
        raise WorldError(f"live: rank {self.ranks[0]} has not written {file}; {AGAIN}")

    def _check_failed(self, why: str) -> None:
        with contextlib.suppress(FileNotFoundError):
            words = (self._directory / "failed").read_text()
            raise WorldError(f"[rank {self._rank}] live: {words}; the job ends ({why})")

    def _watch(self) -> None:
        """Watch for the next meeting in a thread: its main one may wait for a lost rank."""
        self._watched.set()
        self._watched = watched = threading.Event()
        directory = self._directory / f"meeting-{self._number + 1}"
        self._meeting = meeting = Meeting(directory, self._rank, patience_s=self._patience_s)

        def look() -> None:
            while not watched.wait(LOOK_S):
                if meeting.is_called:
                    with contextlib.suppress(OSError):
                        meeting.announce()
                    self._shut()
                    return

        threading.Thread(target=look, daemon=True, name="tonari-live").start()

    @contextlib.contextmanager
    def noting_sockets(self) -> Iterator[None]:
        """Note the connections that are made within: they are shut when ranks are lost."""
        before = _open_sockets()
        try:
            yield
        finally:
            for descriptor, name in _open_sockets().items():
                if before.get(descriptor) != name:
                    made = socket.socket(fileno=os.dup(descriptor))
                    try:
                        made.getpeername()
                    except OSError:  # it listens: gloo ends the process where that is shut
                        made.close()
                    else:
                        self._sockets.append(made)

    def _shut(self) -> None:
        """Shut the connections to all ranks: what waits for them fails, whoever holds it."""
        with self._shutting:
            for each in self._sockets:
                with contextlib.suppress(OSError):
                    each.shutdown(socket.SHUT_RDWR)
                each.close()
            self._sockets.clear()


def _open_sockets() -> dict[int, str]:
    """List descriptors of sockets, each with what the system names it by."""
    found = {}
    for path in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(OSError):
            if stat.S_ISSOCK(os.fstat(int(path.name)).st_mode):
                found[int(path.name)] = str(path.readlink())
    return found
