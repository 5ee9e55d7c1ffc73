"""Whether worker processes can find what they are to run; if they ended, why, and what to do."""

import copyreg
import io
import multiprocessing
import os
import signal
import sys
from collections.abc import Mapping, Sequence
from multiprocessing.reduction import ForkingPickler
from pathlib import Path

THREADS = "or use threads: Workers(processes=0)"
STARTED = "TONARI_WORKER_PROCESS"
"""Set in the environment of worker processes."""

UNGUARDED = 73
"""The exit status of a worker process that was about to run the whole script once more."""


def check_sendable(
    functions: Mapping[str, object], *, instead: str = THREADS, by_feeders: bool = False
) -> None:
    """Refuse, before any process is started, what processes will not find.

    Args:
        functions: What they are to run, by what messages call it.
        instead: What else to do, for messages.
        by_feeders: Whether they are those of feeders, which import no script.

    Raises:
        ValueError: If one cannot be pickled, or is defined where no other process can read it.
    """
    main = sys.modules.get("__main__")
    path = getattr(main, "__file__", None)
    by_name = getattr(main, "__spec__", None) is not None
    if not by_feeders and path is not None and not by_name and not Path(path).is_file():
        raise ValueError(
            f"Workers: processes cannot read the script again, which came from {path}, expected a "
            f"file; save it and run `python FILE`, {THREADS}"
        )
    for what, function in functions.items():
        try:
            data = pickled(function)
        except Exception as error:
            raise ValueError(
                f"{what}: {function!r:.80} cannot be sent to processes ({error}), expected what is "
                "defined at the top of a module: no lambda, nothing that a function or a cell "
                f"makes; move it there, give it arguments by functools.partial, {instead}"
            ) from error
        if b"__main__" in data and (by_feeders or (path is None and not by_name)):
            where = "the script itself" if by_feeders else "a notebook or on the command line"
            raise ValueError(
                f"{what}: {function!r:.80} is defined in {where}, where "
                "processes cannot read it; write it into a file beside it, such as mine.py, and "
                f"import it from there, {instead}"
            )


def pickled(function: object) -> bytes:
    """Write what a process would be sent, without what moves tensors to shared memory."""
    data = io.BytesIO()
    pickler = ForkingPickler(data)
    pickler.dispatch_table = copyreg.dispatch_table
    pickler.dump(function)
    return data.getvalue()


def end_if_unguarded() -> None:
    """End this worker process if it runs the user's script instead of its work.

    Each process imports the script. Where that is not kept from training by ``if __name__``, it
    would open the cache and start processes of its own.
    """
    if os.environ.get(STARTED) and getattr(multiprocessing.current_process(), "_inheriting", False):
        # Silently: the process that started this one says why, once.
        os._exit(UNGUARDED)


def why_ended(statuses: Sequence[int | None]) -> str:
    """Say why worker processes ended that should run on, and what to do.

    Args:
        statuses: Of all; None of those that run.
    """
    ended = [status for status in statuses if status is not None]
    killed = sorted(-status for status in ended if status < 0)
    if UNGUARDED in ended:
        return _guard()
    if signal.SIGKILL in killed:
        return (
            "one was killed (SIGKILL), as the kernel does where memory runs out (dmesg names it); "
            "use fewer processes, smaller batches or Workers(prefetch=1)"
        )
    if signal.SIGINT in killed or (not killed and 0 in ended):
        return "one was interrupted (SIGINT); start again, what was saved goes on from there"
    if killed:
        return (
            f"one was ended by {signal.Signals(killed[0]).name}: compiled code of the transform or "
            "of a decoder crashed; find it by `python -X faulthandler` with Workers(processes=0)"
        )
    if _has_no_guard():
        return _guard()
    return f"one failed as it started, and printed why above; correct that, {THREADS}"


def _guard() -> str:
    path = getattr(sys.modules.get("__main__"), "__file__", None) or "the script"
    return (
        f"each imports {path}, which trains as it is imported; put what it does below "
        f'`if __name__ == "__main__":`, {THREADS}'
    )


def _has_no_guard() -> bool:
    path = getattr(sys.modules.get("__main__"), "__file__", None)
    try:
        return path is not None and "__main__" not in Path(path).read_text()
    except (OSError, ValueError):
        return False
