"""What can go wrong with a run's settings."""


class ConfigError(Exception):
    """The configuration asks for something unknown, out of range or impossible on this world."""
