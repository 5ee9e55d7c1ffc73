"""Find in which line of the program a thread is, and whether it waits for other ranks there."""

import sys
from pathlib import Path

import torch

from dataio.world import World

TORCH = str(Path(torch.__file__).parent)
OPERATORS = (f"{TORCH}/_ops.py", f"{TORCH}/_library/")
"""A collective is called through these, in the backward pass of tensor parallelism too."""

WAITING = (f"{TORCH}/distributed/", str(Path(sys.modules[World.__module__].__file__ or "").parent))


def find_place(thread: int) -> tuple[str, bool]:
    """Find the line of the program that a thread executes, and whether it waits for other ranks."""
    frame = sys._current_frames().get(thread)
    while frame and frame.f_code.co_filename.startswith(OPERATORS):
        frame = frame.f_back
    waits = frame is not None and frame.f_code.co_filename.startswith(WAITING)
    while frame and frame.f_code.co_filename.startswith(TORCH) and frame.f_back:
        frame = frame.f_back
    if frame is None:
        return "no line of Python", waits
    code = frame.f_code
    name = getattr(code, "co_qualname", None) or code.co_name  # Python 3.10 has no `co_qualname`
    return f"{code.co_filename}:{frame.f_lineno} ({name})", waits
