"""What a benchmark cannot do."""

from tonari.errors import CommandError


class BenchError(CommandError):
    """A benchmark cannot be run, or what it measured is wrong."""
