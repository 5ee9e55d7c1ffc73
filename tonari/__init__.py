"""The trainer, the planner and the command line, over `dataio`, `shuffle` and `importance`."""

from tonari.names import require_names

require_names()
