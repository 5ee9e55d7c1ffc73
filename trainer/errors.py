"""What can go wrong with a run's settings, and with what it keeps."""


class ConfigError(Exception):
    """The configuration asks for something unknown, out of range or impossible on this world."""


class CheckpointError(Exception):
    """A checkpoint is damaged, or could not be written."""
