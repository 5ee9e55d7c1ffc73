"""What is rehearsed in a process of its own."""

import contextlib
import os
from collections.abc import Callable


def in_process(function: Callable[[], str]) -> str:
    """Call a function in a forked process: killed ranks leave threads behind that never end."""
    reader, writer = os.pipe()
    process = os.fork()
    if process == 0:
        with contextlib.suppress(BaseException):
            os.write(writer, function().encode()[: 1 << 16])
        os._exit(0)
    os.close(writer)
    with open(reader, "rb") as file:
        said = file.read().decode()
    os.waitpid(process, 0)
    return said
