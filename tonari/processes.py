"""Run a command that may start others, and leave none of them behind."""

import os
import signal
import subprocess
import tempfile
from collections.abc import Callable, Mapping, Sequence

GRACE_S = 3.0


def run_group(
    command: Sequence[str], *, timeout_s: float, env: Mapping[str, str] | None = None,
    on_timeout: Callable[[int], None] | None = None,
) -> tuple[int | None, str]:  # fmt: skip
    """Run a command in a process group of its own. Blocks until it ends or the time is over.

    Args:
        command: Program and arguments.
        timeout_s: Then all of the group is ended.
        env: Its variables; optional, defaults to those of this process.
        on_timeout: Called with the id of the command's process before the group is ended. Optional.

    Returns:
        The exit status, None if it took too long; and all that it wrote.
    """
    # A file, not a pipe: a rank that outlives its launcher would keep a pipe open.
    with tempfile.TemporaryFile() as output:
        process = subprocess.Popen(
            command, env=env, stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT,
            start_new_session=True,
        )  # fmt: skip
        status = None
        try:
            status = process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            if on_timeout is not None:
                on_timeout(process.pid)
            # Only a launcher that is asked can end ranks that have left the group.
            process.terminate()
            _wait(process)
        finally:
            _kill_group(process)
        output.seek(0)
        return status, output.read().decode(errors="replace")


def _wait(process: "subprocess.Popen[bytes]") -> None:
    try:
        process.wait(GRACE_S)
    except subprocess.TimeoutExpired:
        process.kill()


def _kill_group(process: "subprocess.Popen[bytes]") -> None:
    try:
        os.killpg(process.pid, signal.SIGKILL)
    except ProcessLookupError:
        return  # Nobody is left: all is well.
    process.wait()
