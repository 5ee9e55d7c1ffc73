"""What can go wrong with a prediction."""

from tonari.trainer.errors import ConfigError


class OracleError(ConfigError):
    """A prediction cannot be made: the message names the cause and the cure."""
