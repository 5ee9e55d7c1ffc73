"""Which rows a run trained when, and when a sample was trained: `tonari rows`, and in Python."""

from tonari.rows.run import RunRows, open

__all__ = ["RunRows", "open"]
