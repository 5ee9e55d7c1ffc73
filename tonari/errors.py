"""What a command cannot do, beside what the packages raise."""

from dataio.base.location import shown


class CommandError(Exception):
    """A command cannot do what it was asked to do."""

    def __init__(self, message: object = "") -> None:
        super().__init__(shown(str(message)))
