"""What a benchmark cannot do."""


class BenchError(Exception):
    """A benchmark cannot be run, or what it measured is wrong."""
