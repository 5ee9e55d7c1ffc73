"""What can go wrong with a run: its settings, what it keeps, and between its ranks."""

from dataio.base.errors import DataioError


class ConfigError(DataioError):
    """The configuration asks for something unknown, out of range or impossible on this world."""


class DeliveryError(DataioError):
    """A batch did not reach all ranks of its replica, or not as it was read."""


class CheckpointError(DataioError):
    """A checkpoint is damaged, or could not be written."""


class EvaluationError(DataioError):
    """The process that evaluates beside a run cannot go on."""
