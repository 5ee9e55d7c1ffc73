"""Train on when ranks are lost: those that are left begin again where all had counted a step.

A restart without a restart. The training function is called again in the same processes, in a
world of the ranks that are left; model, optimizer and place come from memory, rows from the caches.

A step counts if one of those left has taken it. It may be taken when the gradients' sum is there:
then all ranks have given their part, and who lacks the sum takes over weights from one who has it.
So no vote is needed beside the sum.
"""

import contextlib
import copy
import gc
import io
import os
import shutil
import socket
import stat
import threading
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch.distributed import TCPStore  # type: ignore[attr-defined]

from dataio.base.atomic import write_file
from dataio.base.errors import WorldError
from dataio.job.faults import find_cause, is_of_a_peer
from dataio.job.meeting import Meeting
from dataio.loader import Loader
from dataio.plan.segment import Position
from dataio.world import World
from dataio.world.discover import torch_world

Result = TypeVar("Result")
LOOK_S = 0.5
"""Between two looks whether another rank has called a meeting."""


@dataclass(frozen=True)
class Counted:
    """What all ranks have in common after a step that counts.

    Attributes:
        number: Steps counted so far.
        position: Of the loader.
        values: What is not a weight and not of the optimizer's tensors, by the object's name.
        random: Of torch's generator.
    """

    number: int
    position: Position
    values: Mapping[str, Any]
    random: torch.Tensor


class LiveJob:
    """This process among the ranks that are there, for one call of the training function.

    Attributes:
        world: All ranks.
        number: Steps counted so far.
        ranks: Their numbers when the job began.
    """

    def __init__(self, world: World, ranks: tuple[int, ...], before: "LiveJob | None") -> None:
        self.world, self.ranks = world, ranks
        self._before = before
        self._objects: dict[str, Any] = {}
        self._loader: Loader | None = None
        self.counted: Counted | None = before.counted if before is not None else None
        self.most = self.number

    @property
    def number(self) -> int:
        return self.counted.number if self.counted is not None else 0

    def keep(self, loader: Loader, **objects: Any) -> None:
        """Name what a step changes; where ranks were lost, it gets what it had. Collective.

        Args:
            loader: Made in this call of the training function, and not iterated yet.
            objects: Modules, optimizers, schedulers: all with ``state_dict``, made as before.

        Raises:
            WorldError: If the loader keeps scores: those of lost ranks are lost.
        """
        if loader.needs_scores:
            raise WorldError(
                "live: the loader's importance goes by scores, and those of a lost rank are lost; "
                "leave importance out, or train without live"
            )
        self._loader, self._objects = loader, objects
        numbers = [int(said) for said in self._tell(str(self.number))]
        self.most = max(numbers)
        if not self.most:
            return
        state = self._state() if self.number == self.most else {}
        if min(numbers) < self.most:
            state = self._take_over(state, donor=numbers.index(self.most))
        for name, its in objects.items():
            its.load_state_dict(state[name])
        loader.load_state_dict(state["loader"])
        torch.set_rng_state(state["random"])
        self._count(self.most, Position.from_json(state["loader"]), state["random"])
        self._before = None

    @contextlib.contextmanager
    def step(self) -> Iterator[None]:
        """Change weights and all else that a step changes, within; the step counts at its end."""
        yield
        assert self._loader is not None, "keep was called"
        self._count(self.number + 1, self._loader._run.position, torch.get_rng_state())

    def average(self, parameters: Iterable[torch.nn.Parameter]) -> None:
        """Average gradients over all ranks, those that are None as zeros. Collective."""
        given = [each for each in parameters if each.requires_grad]
        grads = [torch.zeros_like(p) if p.grad is None else p.grad for p in given]
        flat = torch._utils._flatten_dense_tensors(grads)
        dist.all_reduce(flat)
        flat /= self.world.world_size
        for parameter, grad in zip(
            given, torch._utils._unflatten_dense_tensors(flat, grads), strict=True
        ):
            parameter.grad = grad

    def _count(self, number: int, position: Position, random: torch.Tensor) -> None:
        values = {name: _values(its) for name, its in self._objects.items()}
        self.counted = Counted(number, position, values, random)

    def _state(self) -> dict[str, Any]:
        """Collect what the call before had, as of the last step that it counted."""
        before, counted = self._before, self.counted
        assert before is not None and counted is not None
        loader = before._loader
        assert loader is not None
        state = {
            name: _whole(its, counted.values[name]) for name, its in before._objects.items()
        }
        place = loader._session.identity.to_state(counted.position, num_hidden=0)
        return {**state, "loader": place, "random": counted.random}

    def _take_over(self, state: dict[str, Any], *, donor: int) -> dict[str, Any]:
        """Send what one rank has to all. Collective."""
        stored = io.BytesIO()
        if self.world.rank == donor:
            torch.save(state, stored)
        sizes = [int(said) for said in self._tell(str(stored.tell()))]
        data = torch.frombuffer(bytearray(stored.getvalue() or bytes(sizes[donor])), dtype=torch.uint8)
        dist.broadcast(data, src=donor)
        return dict(torch.load(io.BytesIO(data.numpy().tobytes()), weights_only=True))

    def _tell(self, said: str) -> list[str]:
        heard = self.world.allgather(said.encode(), doing="comparing counted steps")
        return [each.decode() for each in heard]


def live(
    train: Callable[[LiveJob], Result],
    *,
    directory: str | os.PathLike[str],
    least: int = 1,
    patience_s: float = 3.0,
    timeout_s: float = 300.0,
) -> Result:
    """Call a training function, and again on the ranks that are left whenever some are lost.

    Args:
        train: Makes loader, model and optimizer, gives them to `LiveJob.keep`, and trains as if it
            went on from a checkpoint.
        directory: On a filesystem that every node sees; files of this job lie in it.
        least: Fewer ranks end the job.
        patience_s: How long ranks that lost others wait for more of them.
        timeout_s: Longest wait for another rank, > 0.

    Returns:
        What the function returns.

    Raises:
        WorldError: If fewer than ``least`` ranks are left, this one is left out, or another failed
            by an error of its own.
    """
    ranks = _Generations(Path(directory), patience_s=patience_s, timeout_s=timeout_s)
    try:
        job = ranks.first()
        while True:
            try:
                result = train(job)
                job.world.barrier(doing="ending together")
                ranks.end()
                return result
            except Exception as error:
                if not ranks.are_lost(error):
                    ranks.fail(error)
                    raise
                said = str(find_cause(error))
                traceback.clear_frames(error.__traceback__)
            gc.collect()
            job = ranks.regroup(job, said, least=least)
    finally:
        ranks.close()


class _Generations:
    """The worlds of a job, one after the other."""

    def __init__(self, directory: Path, *, patience_s: float, timeout_s: float) -> None:
        self._root, self._patience_s, self._timeout_s = directory, patience_s, timeout_s
        self._directory = directory
        self._generation = 0
        self._ranks: tuple[int, ...] = ()
        self._rank = 0
        self._sockets: list[socket.socket] = []
        self._meeting: Meeting | None = None
        self._cut = threading.Lock()
        self._ended = threading.Event()

    def first(self) -> LiveJob:
        """Join the ranks that the launcher started. Collective."""
        limit = timedelta(seconds=self._timeout_s)
        with self._noting_sockets():
            dist.init_process_group("gloo", timeout=limit)
            world = torch_world(timeout_s=self._timeout_s)
        self._rank, self._ranks = world.rank, tuple(range(world.world_size))
        name = f"live-{os.urandom(4).hex()}".encode()
        names = world.allgather(name if world.rank == 0 else b"", doing="naming the job")
        self._directory = self._root / names[0].decode()
        if world.rank == 0:
            self._directory.mkdir(parents=True)
        world.barrier(doing="making the job's directory")
        self._watch()
        return LiveJob(world, self._ranks, None)

    def are_lost(self, error: BaseException) -> bool:
        """Whether an error means that others are lost, rather than that this rank is wrong."""
        meeting = self._meeting
        return is_of_a_peer(find_cause(error)) or (meeting is not None and meeting.is_called)

    def fail(self, error: BaseException) -> None:
        """Tell the others that this rank ends by an error of its own."""
        with contextlib.suppress(OSError):
            words = f"rank {self._rank}: {type(error).__name__}: {error}"
            write_file(self._directory / "failed", words.encode())

    def end(self) -> None:
        """Take notice that all have ended well."""
        if self._rank == self._ranks[0]:
            shutil.rmtree(self._directory, ignore_errors=True)

    def close(self) -> None:
        """Let go of the ranks, without them."""
        self._ended.set()
        self._shut()
        if dist.is_initialized():
            dist.destroy_process_group()

    def regroup(self, before: LiveJob, said: str, *, least: int) -> LiveJob:
        """Go on with those that are left. By all of them."""
        while True:
            self._check_failed(said)
            meeting, expected = self._meeting, self._ranks
            assert meeting is not None
            meeting.announce()
            self._shut()
            if dist.is_initialized():
                dist.destroy_process_group()
            meeting.come({"counted": before.number})
            self._ranks = meeting.agree(expected, timeout_s=self._timeout_s).ranks
            self._check_failed(said)
            if len(self._ranks) < least:
                raise WorldError(
                    f"[rank {self._rank}] {len(self._ranks)} ranks are left, expected {least} at "
                    f"least ({said}); start the same command again"
                )
            self._generation += 1
            self._watch()
            try:
                with self._noting_sockets():
                    self._form()
                    return LiveJob(torch_world(timeout_s=self._timeout_s), self._ranks, before)
            except (WorldError, RuntimeError) as error:
                # Another was lost meanwhile. If none was, they do not reach one another.
                if self._ranks == expected:
                    raise WorldError(
                        f"[rank {self._rank}] ranks {[*expected]} met and cannot connect to one "
                        f"another ({error}); start the same command again"
                    ) from error
                said = str(error)

    def _form(self) -> None:
        limit, file = timedelta(seconds=self._timeout_s), self._directory / f"store-{self._generation}"
        me, size = self._ranks.index(self._rank), len(self._ranks)
        if me == 0:
            host = socket.gethostname() if "MASTER_ADDR" in os.environ else "127.0.0.1"
            store = TCPStore(
                host, 0, size, is_master=True, timeout=limit, wait_for_workers=False
            )
            write_file(file, f"{host} {store.port}".encode())
        else:
            host, port = self._wait_for(file).split()
            store = TCPStore(host, int(port), size, timeout=limit)
        dist.init_process_group("gloo", store=store, rank=me, world_size=size, timeout=limit)

    def _wait_for(self, file: Path) -> str:
        import time

        until_s = time.monotonic() + self._timeout_s
        while time.monotonic() < until_s:
            with contextlib.suppress(FileNotFoundError):
                return file.read_text()
            time.sleep(0.02)
        raise WorldError(f"{file}: was not written in {self._timeout_s:g} s")

    def _check_failed(self, said: str) -> None:
        with contextlib.suppress(FileNotFoundError):
            words = (self._directory / "failed").read_text()
            raise WorldError(f"[rank {self._rank}] {words}; the job ends ({said})")

    def _watch(self) -> None:
        self._ended.set()
        self._ended = threading.Event()
        self._meeting = Meeting(
            self._directory / f"generation-{self._generation + 1}", self._rank,
            patience_s=self._patience_s,
        )  # fmt: skip
        threading.Thread(
            target=self._look, args=(self._meeting, self._ended), daemon=True, name="tonari-live"
        ).start()

    def _look(self, meeting: Meeting, ended: threading.Event) -> None:
        while not ended.wait(LOOK_S):
            if meeting.is_called:
                with contextlib.suppress(OSError):
                    meeting.announce()
                # Whoever waits for a rank that has left is free now.
                self._shut()
                return

    @contextlib.contextmanager
    def _noting_sockets(self) -> Iterator[None]:
        before = _open_sockets()
        yield
        for descriptor, name in _open_sockets().items():
            if before.get(descriptor) != name:
                made = socket.socket(fileno=os.dup(descriptor))
                # Not those that listen: gloo ends the process where one of them is shut.
                try:
                    made.getpeername()
                except OSError:
                    made.close()
                else:
                    self._sockets.append(made)

    def _shut(self) -> None:
        """Shut the connections to all ranks: what waits for them fails, whoever holds it."""
        with self._cut:
            for each in self._sockets:
                with contextlib.suppress(OSError):
                    each.shutdown(socket.SHUT_RDWR)
                each.close()
            self._sockets.clear()


def _open_sockets() -> dict[int, str]:
    found = {}
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            if stat.S_ISSOCK(os.fstat(int(name)).st_mode):
                found[int(name)] = os.readlink(f"/proc/self/fd/{name}")
    return found


def _values(its: Any) -> Any:
    """Copy what changes outside of steps too, or is small."""
    if isinstance(its, torch.nn.Module):
        return [buffer.clone() for buffer in its.buffers()]
    if isinstance(its, torch.optim.Optimizer):
        return [
            {name: value for name, value in group.items() if name != "params"}
            for group in its.param_groups
        ]
    return copy.deepcopy(its.state_dict())


def _whole(its: Any, values: Any) -> Any:
    """Put an object's state together, as it was when its values were copied."""
    if isinstance(its, torch.nn.Module):
        for buffer, value in zip(its.buffers(), values, strict=True):
            buffer.copy_(value)
        return its.state_dict()
    if isinstance(its, torch.optim.Optimizer):
        for group, value in zip(its.param_groups, values, strict=True):
            group.update(value)
        return its.state_dict()
    return values
