"""The trainer, the planner and the command line, over `dataio`, `shuffle` and `importance`."""

from tonari.names import require_names

__version__ = "0.1.0"

require_names()
