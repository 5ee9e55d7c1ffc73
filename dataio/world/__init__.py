"""Who is where, and a few verbs between ranks."""

from dataio.world.abort import keep_lines_whole, leave_together, wait_for_rank_0
from dataio.world.base import Request, Transport
from dataio.world.discover import discover_world, launcher_name, single_world
from dataio.world.limits import claim_open_files
from dataio.world.start import watch_start
from dataio.world.threads import run_threads, thread_worlds
from dataio.world.topology import Topology
from dataio.world.world import CHANNEL_TAGS, World

__all__ = [
    "CHANNEL_TAGS",
    "Request",
    "Topology",
    "Transport",
    "World",
    "claim_open_files",
    "discover_world",
    "keep_lines_whole",
    "launcher_name",
    "leave_together",
    "run_threads",
    "single_world",
    "thread_worlds",
    "wait_for_rank_0",
    "watch_start",
]
