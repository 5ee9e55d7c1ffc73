"""Forks processes that have imported everything already: they begin in milliseconds.

    python -m tests.forked.zygote LISTENER OWNER MODULES...

Takes requests of `interpreter.py` by a socket, forks a process for each, and answers with how it
ended. Has one thread, and has run nothing but imports, so a forked process is as good as a new one:
it takes over all that the asking process would have inherited, and runs its program as Python does.
Ends with its owner: when the other end of a pipe is closed.
"""

import builtins
import faulthandler
import gc
import importlib
import importlib.machinery
import io
import json
import os
import resource
import runpy
import selectors
import signal
import socket
import sys
import tempfile
import types
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

import numpy as np

from tests.forked.interpreter import EXECUTABLE, LENGTH, MOST_FILES, OWN, ignored, limits, place

READ_LATER = (
    "TONARI_", "PMI_", "PMIX_", "MPI_", "MPIR_", "MPIEXEC_", "MPICH_", "HYDRA_", "HYDI_", "OMPI_",
    "GFORTRAN_", "SLURM_", "FLUX_", "PALS_", "JSM_", "MV2_", "FI_", "UCX_", "TORCHELASTIC_",
    "TORCH_NCCL_ASYNC_", "CUBLAS_", "MASTER_", "LOCAL_", "GROUP_", "ROLE_", "NODE_RANK", "RANK",
    "WORLD_SIZE", "PYTEST_", "PYTHONPATH", "PYTHONFAULTHANDLER", "TMPDIR", "PATH", "COLUMNS",
    "LINES", "PWD", "OLDPWD", "SHLVL", "_",
)  # fmt: skip
"""Beginnings of variables that are read later than while modules are imported."""
OPTIONS = ("-u", "-m", "-c")


@dataclass
class Child:
    """A forked process, and who asked for it."""

    pid: int
    descriptor: int
    asker: socket.socket


@dataclass(frozen=True)
class Imported:
    """What a zygote was when it imported.

    Attributes:
        environ: Its variables before.
        added: Those that imports have set.
        paths: Where it looked for modules, beyond its program's directory and PYTHONPATH.
        place: As `interpreter.place`.
    """

    environ: dict[str, str]
    added: dict[str, str]
    paths: list[str]
    place: dict[str, Any]

    @property
    def first_paths(self) -> list[str]:
        """What PYTHONPATH holds."""
        return _split_path(self.environ)


def import_all(modules: Sequence[str]) -> Imported:
    """Import modules, once and for all."""
    environ = dict(os.environ)
    paths = [path for path in sys.path[1:] if path not in _split_path(environ)]
    for module in modules:
        importlib.import_module(module)
    gc.freeze()
    added = {name: value for name, value in os.environ.items() if environ.get(name) != value}
    return Imported(environ, added, paths, place())


def refusal(request: Mapping[str, Any], imported: Imported) -> str | None:
    """Say why a process has to begin anew; None: it can be forked."""
    environ, theirs = imported.environ, request["environ"]
    for name in sorted({*environ, *theirs}):
        known = (environ.get(name), imported.added.get(name))
        if not name.startswith(READ_LATER) and name not in OWN and theirs.get(name) not in known:
            return f"{name} may have been read by imports"
    if not set(imported.first_paths) <= set(_split_path(theirs)):
        return "PYTHONPATH lacks what the imports were found by"
    if request["place"] != imported.place or request["nice"] < os.nice(0):
        return "it runs elsewhere"
    option = next(iter(request["arguments"]), "-")
    return "Python's options" if option.startswith("-") and option not in OPTIONS else None


def _split_path(environ: Mapping[str, str]) -> list[str]:
    return [path for path in environ.get("PYTHONPATH", "").split(os.pathsep) if path]


def serve(
    listener: socket.socket, owner: int, imported: Imported
) -> tuple[dict[str, Any], list[int]] | None:
    """Answer requests until the owner is gone; in a forked process, hand back what it is to be."""
    with selectors.DefaultSelector() as selector:
        selector.register(listener, selectors.EVENT_READ)
        selector.register(owner, selectors.EVENT_READ)
        children: list[Child] = []
        while True:
            for key, _ in selector.select():
                if key.fileobj == owner:
                    _kill_all(children)
                    return None
                if key.data is None:
                    asker, _ = listener.accept()
                    request, files = _receive(asker)
                    reason = refusal(request, imported) if request else "no request"
                    pid = 0 if reason else _fork()
                    if request and not reason and not pid:
                        for held in (listener, asker, *(child.asker for child in children)):
                            held.close()
                        return request, files
                    for file in files:
                        os.close(file)
                    if reason:
                        _answer(asker, refused=reason)
                        asker.close()
                        continue
                    child = Child(pid, os.pidfd_open(pid), asker)
                    children.append(child)
                    selector.register(child.descriptor, selectors.EVENT_READ, child)
                    selector.register(asker, selectors.EVENT_READ, child)
                    _answer(asker, pid=pid)
                elif key.data not in children:
                    continue  # it ended, and whoever asked for it is gone, at the same moment
                elif key.fileobj is key.data.asker:
                    # It is gone, or wants this: either way the process has to go.
                    selector.unregister(key.data.asker)
                    _kill(key.data)
                else:
                    children.remove(key.data)
                    _end(key.data, selector)


def _receive(asker: socket.socket) -> tuple[dict[str, Any] | None, list[int]]:
    head, files, _, _ = socket.recv_fds(asker, LENGTH.size, MOST_FILES)
    words = b""
    if len(head) == LENGTH.size:
        (length,) = LENGTH.unpack(head)
        while len(words) < length and (more := asker.recv(length - len(words))):
            words += more
        if len(words) == length:
            return json.loads(words), files
    return None, files


def _answer(asker: socket.socket, **words: Any) -> None:
    try:
        asker.sendall(json.dumps(words).encode() + b"\n")
    except OSError:
        return  # It is gone; the selector says so too.


def _fork() -> int:
    names = [(task / "comm").read_text().strip() for task in Path("/proc/self/task").iterdir()]
    if len(names) != 1:
        raise RuntimeError(f"zygote: has the threads {names}, expected one; import less beforehand")
    return os.fork()


def _kill(child: Child) -> None:
    try:
        # A process that has just been forked may have no group yet.
        signal.pidfd_send_signal(child.descriptor, signal.SIGKILL)
        os.killpg(child.pid, signal.SIGKILL)
    except ProcessLookupError:
        return


def _kill_all(children: list[Child]) -> None:
    for child in children:
        _kill(child)
        os.waitpid(child.pid, 0)


def _end(child: Child, selector: selectors.BaseSelector) -> None:
    status = os.waitstatus_to_exitcode(os.waitpid(child.pid, 0)[1])
    selector.unregister(child.descriptor)
    os.close(child.descriptor)
    if child.asker in selector.get_map():
        selector.unregister(child.asker)
    _answer(child.asker, status=status)
    child.asker.close()


def become(request: dict[str, Any], files: list[int], added: dict[str, str]) -> list[str]:
    """Take over what the asking process would have inherited; hand back Python's arguments."""
    os.setsid()
    _take_files(dict(zip(request["files"], files, strict=True)))
    os.environ.clear()
    os.environ.update(added | request["environ"])
    os.chdir(request["directory"])
    os.umask(request["mask"])
    os.sched_setaffinity(0, request["cores"])
    os.nice(request["nice"] - os.nice(0))
    own = limits()
    for name, limit in request["limits"].items():
        if limit != own[name]:
            resource.setrlimit(getattr(resource, name), tuple(limit))
    for number in set(request["ignored"]) ^ set(ignored()):
        usual = signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL
        signal.signal(number, signal.SIG_IGN if number in request["ignored"] else usual)
    if os.environ.get("PYTHONFAULTHANDLER"):
        faulthandler.enable()
    # Both were set while modules were imported; each process has its own.
    tempfile.tempdir = None
    np.random.seed()  # noqa: NPY002
    arguments: list[str] = request["arguments"]
    if arguments[0] == "-u":
        for stream in (sys.stdout, sys.stderr):
            assert isinstance(stream, io.TextIOWrapper)
            stream.reconfigure(write_through=True)
    return arguments


def _take_files(files: dict[int, int]) -> None:
    """Give files their numbers, and close all others. By number, a file that is open here."""
    above = max([*files, *files.values()]) + 1
    high = {number: os.dup2(file, above + number) for number, file in files.items()}
    os.closerange(0, above)
    for number, file in high.items():
        os.dup2(file, number)
    last = max(int(path.name) for path in Path("/proc/self/fd").iterdir())
    os.closerange(max(files) + 1, last + 1)


def run_program(arguments: list[str], paths: list[str]) -> None:
    """Run a program as Python does, which these are the arguments of."""
    sys.orig_argv[1:] = arguments
    option, *others = arguments[arguments[0] == "-u" :]
    main = types.ModuleType("__main__")
    main.__dict__["__builtins__"] = builtins
    sys.modules["__main__"] = main
    sys.path[:] = [_first_path(option), *dict.fromkeys([*_split_path(os.environ), *paths])]
    try:
        if option == "-m":
            sys.argv[:] = ["-m", *others[1:]]
            runpy._run_module_as_main(others[0])  # type: ignore[attr-defined]
        elif option == "-c":
            sys.argv[:] = ["-c", *others[1:]]
            exec(compile(others[0], "<string>", "exec"), main.__dict__)
        else:
            sys.argv[:] = [option, *others]
            path = os.path.abspath(option)  # noqa: PTH100 - as Python, which follows no links here
            loader = importlib.machinery.SourceFileLoader("__main__", path)
            main.__dict__.update(__file__=path, __cached__=None, __loader__=loader)
            exec(compile(Path(path).read_bytes(), path, "exec"), main.__dict__)
    except Exception as error:
        _end_with(error)


def _first_path(option: str) -> str:
    if option == "-m":
        return str(Path.cwd())
    return "" if option == "-c" else str(Path(option).resolve().parent)


def _end_with(error: Exception) -> NoReturn:
    """End as Python does by an error that nobody caught: its trace begins in the program."""
    trace = error.__traceback__
    while trace is not None and trace.tb_frame.f_code.co_filename in (__file__,):
        trace = trace.tb_next
    error.__traceback__ = trace
    sys.excepthook(type(error), error, trace)
    raise SystemExit(1) from None


def main(listener: int, owner: int, modules: list[str]) -> None:
    imported = import_all(modules)
    served = socket.socket(fileno=listener)
    sys.executable = str(Path(served.getsockname()).with_name(EXECUTABLE))
    taken = serve(served, owner, imported)
    if taken is not None:
        run_program(become(*taken, imported.added), imported.paths)


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3:])
