"""How a parallel filesystem spreads a file over its servers, and a way to run its tools."""

import os
import subprocess
from collections.abc import Callable, Sequence
from typing import Literal

from tonari.bench.storage.site.record import JsonRecord, Natural

TOOL_TIMEOUT_S = 10.0

RunTool = Callable[[Sequence[str]], str | None]
"""Runs a tool; what it printed, or None where it is absent, fails or does not end."""

ALL_OSTS = -1
"""Stripe count of a file on all OSTs."""


class Component(JsonRecord, frozen=True, kw_only=True):
    """A part of a Lustre file with stripes of its own.

    Attributes:
        start_bytes: Where it begins in the file.
        end_bytes: Where it ends; None for the end of the file.
        on_mdt: Whether its data lie on the metadata server.
        stripe_count: Number of OSTs; `ALL_OSTS` for every one, 0 for the filesystem's default.
        osts: Those that hold it, by number; empty until it is written, and for a directory.
    """

    start_bytes: Natural
    end_bytes: Natural | None
    on_mdt: bool
    stripe_count: int
    stripe_bytes: Natural
    osts: tuple[int, ...] = ()
    pool: str | None = None


class StripeLayout(JsonRecord, frozen=True, kw_only=True):
    """How a file, or a new file in a directory, lies on the servers; None where it is unknown.

    Attributes:
        stripe_count: OSTs of the widest component; `ALL_OSTS` for every one.
        stripe_bytes: Stripe size of the widest component.
        num_osts: How many OSTs the filesystem has.
        osts: Those that hold the file, by number.
        components: In file order; one of them for a plain layout.
        dom_bytes: How much of a file's beginning lies on the metadata server.
        block_bytes: Block size, of GPFS alone.
        data_replicas: Copies of the data, of GPFS alone.
    """

    kind: Literal["lustre", "gpfs"]
    said_by: Literal["lfs", "xattr", "mmlsattr"]
    stripe_count: int | None = None
    stripe_bytes: Natural | None = None
    num_osts: int | None = None
    osts: tuple[int, ...] = ()
    components: tuple[Component, ...] = ()
    dom_bytes: Natural = 0
    block_bytes: Natural | None = None
    pool: str | None = None
    data_replicas: int | None = None
    fileset: str | None = None


def run_tool(command: Sequence[str]) -> str | None:
    """RunTool a tool of the site; see ``RunTool``. Blocks, at most `TOOL_TIMEOUT_S`."""
    try:
        ended = subprocess.run(
            command, capture_output=True, text=True, errors="replace", timeout=TOOL_TIMEOUT_S,
            check=False, stdin=subprocess.DEVNULL, env={"LC_ALL": "C", "PATH": _path()},
        )  # fmt: skip
    except (OSError, subprocess.TimeoutExpired):
        return None
    return ended.stdout if ended.returncode == 0 else None


def _path() -> str:
    # Sites leave these out of users' PATH.
    return f"{os.environ.get('PATH', os.defpath)}:/usr/sbin:/sbin:/usr/lpp/mmfs/bin"
