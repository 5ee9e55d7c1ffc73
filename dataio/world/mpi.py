"""Ranks as MPI processes: the only file that imports mpi4py."""

import faulthandler
import os
from typing import NoReturn

from mpi4py import MPI

from dataio.base.errors import WorldError
from dataio.world.abort import print_last
from dataio.world.base import Bytes, Request
from dataio.world.collectives import DOWN_BODY

ABORT_S = 5.0
"""How long the launcher may take to end this rank, once it was asked to end all."""


def library_words() -> str:
    """Name the MPI library and what its messages go through, for reports."""
    lines = [line.strip() for line in MPI.Get_library_version().splitlines() if line.strip()]
    # MPICH writes a table, others one line.
    table = dict(line.split(":", 1) for line in lines if ":" in line)
    if "MPICH Version" not in table:
        return lines[0].rstrip("\0")
    return f"MPICH {table['MPICH Version'].strip()}, {table.get('MPICH Device', '').strip()}"


class _MPIRequest:
    """Holds the buffer too: MPI writes into it until the request is done."""

    def __init__(self, request: MPI.Request, buffer: Bytes, *, source: int | None) -> None:
        self._request, self._buffer, self._source = request, buffer, source
        self._status = MPI.Status()
        self._done = False

    def test(self) -> bool:
        if self._done:
            return True
        try:
            self._done = self._request.Test(self._status)
        except MPI.Exception as error:
            raise WorldError(
                f"MPI: a message failed: {error}; both ranks must agree on sizes, and both must be "
                "alive: look at the other ranks' messages"
            ) from error
        if self._done and self._source is not None:
            self._check_bytes(self._status.Get_count(MPI.BYTE))
        return self._done

    def _check_bytes(self, found: int) -> None:
        if found != len(self._buffer):
            raise WorldError(
                f"MPI: received {found} bytes from rank {self._source}, expected "
                f"{len(self._buffer)}; both ranks must agree on sizes beforehand"
            )


def watch_os_exit(transport: "MPITransport") -> None:
    """End the whole job, with a message, if this process leaves by ``os._exit(0)`` amid it.

    MPICH's launcher would kill the other ranks in silence, and report success.
    """
    leave, own = os._exit, os.getpid()
    if leave.__module__ == __name__:
        return  # For an earlier world of this process.

    def watched(status: int) -> NoReturn:
        # Children by fork leave this way too, and any rank may once MPI is finalised.
        if status == 0 and os.getpid() == own and not MPI.Is_finalized():
            transport.abort(
                f"[rank {transport.rank}] left by os._exit(0) while MPI runs; ending all "
                f"{transport.world_size} ranks; end the program by sys.exit(0) or at its last "
                "line, or call mpi4py.MPI.Finalize() first"
            )
        leave(status)

    os._exit = watched


class MPITransport:
    """One rank of a private copy of an MPI communicator. Construction is collective.

    Args:
        communicator: Which ranks; defaults to all of the job.
    """

    def __init__(self, communicator: MPI.Intracomm | None = None) -> None:
        # A copy of its own: no message of ours can meet one of the program's.
        self._communicator = (communicator or MPI.COMM_WORLD).Dup()
        largest_tag = self._communicator.Get_attr(MPI.TAG_UB)
        if not isinstance(largest_tag, int) or largest_tag < DOWN_BODY:
            raise WorldError(
                f"MPI: {MPI.Get_library_version().splitlines()[0]} offers tags up to "
                f"{largest_tag}, Tonari needs {DOWN_BODY}; give it more tag bits (see its provider "
                "settings) or use another MPI"
            )

    @property
    def rank(self) -> int:
        return self._communicator.Get_rank()

    @property
    def world_size(self) -> int:
        return self._communicator.Get_size()

    @property
    def threaded(self) -> bool:
        return bool(MPI.Query_thread() == MPI.THREAD_MULTIPLE)

    def isend(self, data: Bytes, *, dest: int, tag: int) -> Request:
        return _MPIRequest(self._communicator.Isend([data, MPI.BYTE], dest, tag), data, source=None)

    def irecv(self, into: Bytes, *, source: int, tag: int) -> Request:
        request = self._communicator.Irecv([into, MPI.BYTE], source, tag)
        return _MPIRequest(request, into, source=source)

    def abort(self, message: str) -> NoReturn:
        print_last(message)
        # A launcher that waits for a node behind a cut link never ends this rank. MPI_Abort keeps
        # the interpreter, so a Python timer would not run.
        faulthandler.dump_traceback_later(ABORT_S, exit=True, file=os.open(os.devnull, os.O_WRONLY))
        # Not the copy: MPICH ends the ranks of that by messages, each of which calls exit() in the
        # thread that happens to receive it, and so under the feet of the thread that trains.
        MPI.COMM_WORLD.Abort(1)
        # MPICH comes back where it cannot reach its launcher. The end of the interpreter would wait
        # in MPI_Finalize for that, and has no timer any more.
        os._exit(1)

    def close(self) -> None:
        # Freeing a communicator is collective and may wait for a rank that has failed: MPI does it
        # at its end.
        return None
