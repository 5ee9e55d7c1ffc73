"""What can go wrong with a run: its settings, what it keeps, and between its ranks."""

from dataio.base.errors import DataioError
from dataio.base.location import shown


class ConfigError(Exception):
    """The configuration asks for something unknown, out of range or impossible on this world."""

    def __init__(self, message: object = "") -> None:
        super().__init__(shown(str(message)))


class DeliveryError(DataioError):
    """A batch did not reach all ranks of its replica, or not as it was read."""


class CheckpointError(Exception):
    """A checkpoint is damaged, or could not be written."""
